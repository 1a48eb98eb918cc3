"""A check: named schedules with the property they stand for. Suites declare checks; the plugin makes cells of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.cases.case import Case
from harness.schedule import Schedule

__all__ = ["POWER", "POWER_DTYPE", "Check"]

POWER = 20.0  # a runtime fault must move a check's error by this many times the bound, else the check proves nothing
POWER_DTYPE = "float32"  # what a fault moves in float32 it moves in all dtypes, and there the noise floor hides least


def _every_case(case: Case) -> bool:
    return True


@dataclass(frozen=True)
class Check:
    """`schedules(case)` are replayed one after another, each on a fresh session of the same loaded model.

    `needs` names fields of Capabilities. `counters` are lower limits that prove that the feature ran (else `vacuous`).
    `faults` names runtime faults (harness.faults) that must move the numbers of this check by at least POWER times the bound
    on every case that it applies to. `repeats`: rows that follow the same tokens by the same operations are equal bit by bit.
    """

    name: str
    holds: str  # the property, one sentence
    schedules: Callable[[Case], Sequence[Schedule]]
    faults: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    counters: Mapping[str, int] = field(default_factory=dict)
    repeats: bool = False
    applies: Callable[[Case], bool] = _every_case
    layout: str | None = None  # the only layout it is about; None: all
