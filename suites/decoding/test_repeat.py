"""The same operations on the same tokens give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases.case import Case
from harness.check import Check
from harness.schedule import Schedule
from suites.decoding.lengths import crosses_allocation, total


def _schedules(case: Case) -> Sequence[Schedule]:
    n = 250 if crosses_allocation(case) else total(case)
    once = f"open a; feed a {n // 2}; feed a {n - n // 2}; step a 8; close a"
    return [Schedule.parse(once), Schedule.parse(f"{once}; {once}")]


repeat_is_deterministic = Check(
    name="repeat_is_deterministic",
    holds="a run that is repeated, on the same engine or on a new one, gives the same logits bit by bit",
    schedules=_schedules,
    faults=("noise_in_logits", "stale_state_after_close"),
    repeats=True,
    layout="dense",  # what a run leaves behind in a model that owns its state, consecutive runs show
)
