"""Whole runs of the engine: prefill, then tokens that it chooses itself; and one run after another on one engine."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases.case import Case
from harness.check import Check
from harness.schedule import Schedule
from suites.decoding.lengths import crosses_allocation
from suites.decoding.named import for_others


def _greedy(case: Case) -> Sequence[Schedule]:
    n = case.prompt
    if crosses_allocation(case):
        return [Schedule.parse("feed a 250; greedy a 12"), Schedule.parse("feed a 506; greedy a 12")]
    return [Schedule.parse(f"feed a {n}; greedy a 16"), Schedule.parse("feed a 1; greedy a 8; step a 2; greedy a 4")]


def _consecutive(case: Case) -> Sequence[Schedule]:
    n = case.prompt
    first = "open a; feed a 20; step a 6; close a"
    return [
        Schedule.parse(f"{first}; feed b {n}; step b 6; close b; {first}"),
        Schedule.parse(f"feed a {n}; step a 4; close a; feed b 7; step b 4; close b; feed c 9; step c 4; close c; {first}"),
    ]


engine_run_matches_recompute_greedy = Check(
    name="engine_run_matches_recompute_greedy",
    holds="the tokens and logits of a run by the engine itself are those of a greedy recompute",
    schedules=_greedy,
    faults=("greedy_token_off_by_one", "rope_offset_off_by_one", "recurrent_state_forgotten", "first_key_forgotten"),
    needs=frozenset({"greedy"}),
    counters={"decode_steps": 8},
    applies=for_others("engine_run_matches_recompute_greedy"),
)

consecutive_runs_match_recompute = Check(
    name="consecutive_runs_match_recompute",
    holds="a run on an engine that has served others before it gives what it gives on a new engine",
    schedules=_consecutive,
    faults=("stale_state_after_close", "last_row_from_wrong_index"),
    applies=for_others("consecutive_runs_match_recompute"),
)
