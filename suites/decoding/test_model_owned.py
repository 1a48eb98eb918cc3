"""Layout model_owned: the model holds the state, is handed empty slices, and refuses what needs the state elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases import all_cases
from harness.cases.case import Case
from harness.check import Check
from harness.schedule import Schedule
from suites.decoding.lengths import PAST, total
from suites.decoding.named import families


def _empty_slice(case: Case) -> Sequence[Schedule]:
    n = total(case)
    return [
        Schedule.parse(f"feed a {n} all; step a {PAST}; close a; feed b {case.prompt} all; step b {PAST}; close b"),
        Schedule.parse(f"feed a 1; feed a {n // 2} all; feed a {n - n // 2 - 1} all chunk=5; step a {PAST}"),
    ]


def _padded(case: Case) -> Sequence[Schedule]:
    n = total(case)
    return [
        Schedule.parse(f"feed a {n // 2}; refuse feed a 5 pad=16; step a 3; refuse feed a 1 pad=1; feed a 9 all; step a 1"),
        Schedule.parse(f"open a; refuse feed a {n} pad={n + 16}; feed a {n}; step a {PAST}"),
    ]


def _other(case: Case) -> Sequence[Schedule]:
    n = total(case)
    return [
        Schedule.parse(
            f"feed a {n // 2}; refuse open b; step a 2; refuse rewind a 2; refuse save a x; feed a 7 all; step a {PAST}; "
            "close a; feed b 9; refuse open a; step b 3"
        )
    ]


def _checks(family: str) -> dict[str, Check]:
    empty_slice = Check(
        name=f"{family}_forward_with_empty_slice",
        holds="a model that owns its caches gives the logits of one full forward when it is handed none",
        schedules=_empty_slice,
        faults=("rope_offset_off_by_one", "kv_write_one_slot_early", "stale_state_after_close", "recurrent_state_forgotten"),
        needs=frozenset({"all_rows", "chunk"}),
        counters={"empty_slice_forwards": 8},
        applies=families(family),
        layout="model_owned",
    )
    padded = Check(
        name=f"{family}_refuses_padded_prefill",
        holds="a model that owns its caches refuses padded prefill, and the sequence goes on as it was",
        schedules=_padded,
        faults=("rope_offset_off_by_one", "kv_write_one_slot_early", "recurrent_state_forgotten", "conv_tail_forgotten"),
        applies=families(family),
        layout="model_owned",
    )
    return {check.name: check for check in (empty_slice, padded)}


for _family in sorted({case.family for case in all_cases()}):  # a family that is added later has its own without a line here
    globals().update(_checks(_family))

model_owned_refusals_leave_no_trace = Check(
    name="model_owned_refusals_leave_no_trace",
    holds="a second sequence, a rewind and a snapshot are refused, and the open sequence goes on as it was",
    schedules=_other,
    faults=("rope_offset_off_by_one", "stale_state_after_close", "recurrent_state_forgotten"),
    layout="model_owned",
)
