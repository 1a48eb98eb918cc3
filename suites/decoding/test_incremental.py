"""Decoding one token at a time gives the logits of one full forward."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases.case import Case
from harness.check import Check
from harness.schedule import Schedule
from suites.decoding.lengths import crosses_allocation, is_short, total
from suites.decoding.named import for_others


def _schedules(case: Case) -> Sequence[Schedule]:
    n = total(case)
    if crosses_allocation(case):  # steps over both boundaries; steps over all of the prompt would show no more
        return [Schedule.parse(f"feed a 250; step a 12; feed a 244; step a {n - 506}")]
    starts = [n - 4, 1, *([case.prompt] if is_short(case) else [])]
    return [Schedule.parse(f"feed a {start}; step a {n - start}") for start in dict.fromkeys(starts)]


incremental_logits_match_full_forward = Check(
    name="incremental_logits_match_full_forward",
    holds="logits of one-token steps against the cache are those of one full forward over the same tokens",
    schedules=_schedules,
    faults=(
        "rope_offset_off_by_one",
        "kv_write_one_slot_early",
        "first_key_forgotten",
        "window_one_too_short",
        "conv_tail_forgotten",
        "recurrent_state_forgotten",
    ),
    applies=for_others("incremental_logits_match_full_forward"),
)
