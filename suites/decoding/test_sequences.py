"""Several sequences on one engine do not touch each other, whether they take turns or share a step."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases.case import Case
from harness.check import Check
from harness.schedule import Schedule
from suites.decoding.lengths import crosses_allocation, total


def _interleaved(case: Case) -> Sequence[Schedule]:
    n = total(case)
    if crosses_allocation(case):
        return [
            Schedule.parse(
                f"feed a 250; feed b 11; step a 3; step b 3; feed a {n - 253}; step b 2; step a 2; close b; step a 2"
            )
        ]
    return [
        Schedule.parse(
            f"feed a {n // 2}; feed b 9; step a 3; step b 3; feed a {n - n // 2 - 3}; feed b 15; step b 2; step a 2"
        ),
        Schedule.parse(
            "open a; open b; feed b 8; feed a 8; step a 1; step b 1; step a 1; close a; step b 3; open a; feed a 5; step b 1"
        ),
    ]


def _batched(case: Case) -> Sequence[Schedule]:
    if crosses_allocation(case):
        return [Schedule.parse("feed a 253; feed b 40; feed c 509; step a+b+c 6; step c+a 3; close c; step b+a 2; step a 2")]
    n = total(case)
    return [
        Schedule.parse(
            f"feed a {n}; feed b 17; feed c 5; step a+b+c 5; step c+a 3; close a; step c+b 2; feed b 3; step b+c 2; step b 2"
        ),
        Schedule.parse("feed a 1; feed b 3; feed c 17; feed d 33; step a+b+c+d 3; step d+b 2"),
    ]


interleaved_sequences_match_recompute = Check(
    name="interleaved_sequences_match_recompute",
    holds="sequences that take turns on one engine each give the logits that they give alone",
    schedules=_interleaved,
    faults=("sequences_share_state", "rope_offset_off_by_one", "recurrent_state_forgotten", "first_key_forgotten"),
    needs=frozenset({"several_sequences"}),
    layout="dense",
)

batched_steps_match_solo = Check(
    name="batched_steps_match_solo",
    holds="sequences of different lengths that are stepped in one batch each give the logits that they give alone",
    schedules=_batched,
    faults=("batch_rows_swapped", "batch_shares_first_offset", "recurrent_state_forgotten", "first_key_forgotten"),
    needs=frozenset({"several_sequences", "batch"}),
    layout="dense",
    counters={"batched_rows": 2},
)
