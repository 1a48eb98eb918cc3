"""Tokens that were dropped leave no trace: what follows a rewind is as if they had never been fed.

A window gives tokens back until it has let one go, and a recurrent state never: it has absorbed them. There the engine refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases.case import RECURRENT, Case
from harness.check import Check
from harness.schedule import Feed, Operation, Rewind, Schedule, Step
from suites.decoding.lengths import ALLOCATION_STEP, allocation_boundaries, crosses_allocation, goes_back, total, window


def _rewinds_to(lengths: Sequence[int], n: int) -> Schedule:
    """Feed n, then for each length: drop the rest, and feed another suffix up to n again."""
    operations: list[Operation] = [Feed(n)]
    for length in lengths:
        operations += [Rewind(n - length), Feed(n - length)]
    return Schedule(tuple(operations))


def _schedules(case: Case) -> Sequence[Schedule]:
    n = total(case)
    if crosses_allocation(case):
        step = ALLOCATION_STEP
        return [
            _rewinds_to([*reversed(allocation_boundaries(case)), 3], n),
            Schedule((Feed(step - 2), Step(5), Rewind(4), Step(4), Rewind(1), Feed(8), Rewind(9), Step(3))),
        ]
    every = [n - count for count in (1, 2, 3, 5, 8, 13, 21, n // 2, n - 2, n - 1, n)]
    return [
        _rewinds_to(every, n),
        Schedule.parse(f"feed a {n}; rewind a 1; step a 4; rewind a 3; step a 4; rewind a 2; feed a 5"),
        Schedule.parse(
            f"feed a 16; feed a {n - 16}; rewind a {n - 17}; step a 3; rewind a 4; step a 3; rewind a 4; feed a 7; step a 2"
        ),
    ]


rewind_and_go_on_matches_recompute = Check(
    name="rewind_and_go_on_matches_recompute",
    holds="after the last tokens are dropped and others are fed, logits are those of the tokens that are left",
    schedules=_schedules,
    faults=("rewind_moves_only_the_counter", "rewind_drops_one_too_few"),
    needs=frozenset({"rewind"}),
    layout="dense",
    applies=goes_back,
)


def _refused(case: Case) -> Sequence[Schedule]:
    n = total(case)
    if RECURRENT in case.traits:
        return [Schedule.parse(f"feed a 9; refuse rewind a 1; step a 3; refuse rewind a 12; feed a {n - 12} all; step a 1")]
    w = window(case)
    return [
        Schedule.parse(
            f"feed a {w}; rewind a 3; feed a 2; step a 1; rewind a {w - 1}; step a {w}; refuse rewind a 1; step a 3"
        ),
        Schedule.parse(f"feed a {n}; refuse rewind a 1; step a 1; refuse rewind a {n}; feed a {w + 1} all; step a 1"),
        Schedule.parse(f"feed a {w - 1}; step a 1; rewind a 1; feed a {w} all; refuse rewind a 2; step a 2"),
    ]


states_that_cannot_go_back_refuse_it = Check(
    name="states_that_cannot_go_back_refuse_it",
    holds="a rewind past what a window or a recurrent state can give back is refused, and the sequence goes on as it was",
    schedules=_refused,
    faults=("window_one_too_short", "rope_offset_off_by_one", "recurrent_state_forgotten", "conv_tail_forgotten"),
    needs=frozenset({"rewind", "all_rows"}),
    layout="dense",
    applies=lambda case: not goes_back(case),
)
