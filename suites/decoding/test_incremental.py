"""Decoding one token at a time gives the logits of one full forward."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases.case import Case
from harness.check import Check
from harness.schedule import Schedule
from suites.decoding.lengths import crosses_allocation


def _schedules(case: Case) -> Sequence[Schedule]:
    n = case.prompt
    if crosses_allocation(case):  # steps over both boundaries; steps over all of the prompt would show no more
        return [Schedule.parse(f"feed a 250; step a 12; feed a 244; step a {n - 506}")]
    return [
        Schedule.parse(f"feed a 1; step a {n - 1}"),
        Schedule.parse(f"feed a {n // 2}; step a {n - n // 2}"),
    ]


incremental_logits_match_full_forward = Check(
    name="incremental_logits_match_full_forward",
    holds="logits of one-token steps against the cache are those of one full forward over the same tokens",
    schedules=_schedules,
    faults=("rope_offset_off_by_one", "kv_write_one_slot_early"),
)
