"""Which row an error ratio is of, in every report's words: the first bad row's ratio is one thing, the worst row's another."""

from __future__ import annotations

import math
from typing import NamedTuple

from harness.figures import figure
from harness.records import Record

__all__ = ["Fact", "at_first_bad", "facts", "finite", "finite_at_first_bad", "of_first_bad", "of_worst", "worst", "worst_place"]


class Fact(NamedTuple):
    """`value` is what the eye looks for; the words stand before and after it."""

    before: str
    value: str
    after: str = ""

    def __str__(self) -> str:
        return f"{self.before}{self.value}{self.after}"


def at_first_bad(record: Record) -> float | None:
    """Error ratio of the first bad row; infinite where its logits are not finite, None where nothing was measured there.

    Also None in records of schema 1, which have the worst row's alone.
    """
    if record.first_bad_ratio is None and _worst_is_first_bad(record):
        return worst(record)
    return record.first_bad_ratio


def worst(record: Record) -> float | None:
    """Error ratio of the worst row; infinite where its logits are not finite, None where nothing was measured."""
    return math.inf if record.error_ratio is None and record.worst_position is not None else record.error_ratio


def finite(record: Record) -> bool:
    """False where the worst row's logits are not finite, so that its largest error is no number."""
    return record.worst_position is None or record.error_ratio is not None or record.max_abs is not None


def finite_at_first_bad(record: Record) -> bool:
    """False where the first bad row's logits are not finite; such a row is also the worst."""
    return finite(record) or not _worst_is_first_bad(record)


def facts(record: Record) -> list[Fact]:
    """First bad position, the error ratio there, and the worst of all rows with its position where that is another row."""
    return [*of_first_bad(record), *of_worst(record)]


def of_first_bad(record: Record) -> list[Fact]:
    """Its position and its error ratio, as far as they are known."""
    found = []
    if record.first_bad_position is not None:
        several = record.first_bad_schedule is not None and len(record.schedule) > 1
        schedule = f" of schedule {record.first_bad_schedule}" if several else ""
        found.append(Fact("first bad position ", str(record.first_bad_position), schedule))
    here = at_first_bad(record)
    if not finite_at_first_bad(record):
        found.append(Fact("", "the logits are not finite"))
    elif here is not None:
        found.append(Fact("error ratio there ", figure(here), _bound(record)))
    return found


def of_worst(record: Record) -> list[Fact]:
    """The worst row's error ratio and place; empty where `of_first_bad` has said it."""
    most, here = worst(record), at_first_bad(record)
    if most is None or (here is not None and _worst_is_first_bad(record)):
        return []
    if not finite(record):
        return [Fact("", "the logits are not finite", worst_place(record))]
    return [Fact("worst error ratio ", figure(most), worst_place(record) + (_bound(record) if here is None else ""))]


def _bound(record: Record) -> str:
    return f" (bound {figure(record.bound)})" if record.bound is not None else ""


def worst_place(record: Record) -> str:
    """` at position 40`; empty where it is not known, and where the worst row is the first bad one."""
    if record.worst_position is None or _worst_is_first_bad(record):
        return ""
    if _schedules_differ(record):
        return f" at position {record.worst_position} of schedule {record.worst_schedule}"
    another = " in another row" if record.worst_position == record.first_bad_position else ""  # of another sequence or run
    return f"{another} at position {record.worst_position}"


def _schedules_differ(record: Record) -> bool:
    return None not in (record.first_bad_schedule, record.worst_schedule) and record.first_bad_schedule != record.worst_schedule


def _worst_is_first_bad(record: Record) -> bool:
    """Several rows may be at one position, of several sequences or after a rewind: their ratios tell them apart."""
    place = record.worst_schedule, record.worst_position
    same_place = record.worst_position is not None and place == (record.first_bad_schedule, record.first_bad_position)
    return same_place and record.first_bad_ratio == record.error_ratio
