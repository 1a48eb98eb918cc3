"""A snapshot is a copy: whoever goes on from it, and however often, does so from where it was taken."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases.case import Case
from harness.check import Check
from harness.schedule import Schedule
from suites.decoding.lengths import crosses_allocation, is_short, total


def _schedules(case: Case) -> Sequence[Schedule]:
    n = total(case)
    if crosses_allocation(case):  # taken on both sides of a step of the allocation
        return [
            Schedule.parse(
                "feed a 255; save a x; step a 2; save a y; restore b x; step b 3; restore b y; feed b 9; restore a x; "
                f"feed a {n - 255}"
            )
        ]
    first = case.prompt if is_short(case) else n // 2
    return [
        Schedule.parse(
            f"feed a {first}; save a x; feed a {n - first}; restore b x; feed b 9; step b 3; step a 2; "
            "restore a x; step a 4; restore b x; step b 2; step a 1"
        ),
        Schedule.parse(
            "feed a 7; step a 2; save a x; close a; restore b x; restore c x; step b 3; feed c 5; step b 1; step c 2"
        ),
        # Back, and over the tokens of a later snapshot, which were not copied before.
        Schedule.parse(
            "feed a 9; save a x; feed a 7; step a 2; save a y; restore a x; feed a 12; restore b y; step b 3; "
            "restore a y; step a 1"
        ),
        # Over no more than the last of them.
        Schedule.parse("feed a 9; save a x; step a 1; save a y; restore a x; step a 2; restore b y; step b 2"),
        Schedule.parse(f"open a; save a x; feed a 9; restore a x; feed a 5; save a y; feed a {n - 5}; restore c y; step c 6"),
    ]


restored_snapshot_matches_recompute = Check(
    name="restored_snapshot_matches_recompute",
    holds="a sequence that is restored from a snapshot goes on as if it had been fed the snapshot's tokens",
    schedules=_schedules,
    faults=("restore_hands_out_the_live_state", "snapshot_lacks_the_last_token", "recurrent_state_forgotten"),
    needs=frozenset({"snapshot", "several_sequences"}),
    layout="dense",
    counters={"snapshots": 1, "restores": 2},
)
