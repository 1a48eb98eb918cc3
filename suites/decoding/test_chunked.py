"""However a prompt is cut, by the caller or by the engine, its logits are those of the uncut prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.cases.case import Case
from harness.check import Check
from harness.schedule import Feed, Operation, Schedule, Step
from suites.decoding.lengths import ALLOCATION_STEP, PAST, allocation_boundaries, crosses_allocation, is_short, total
from suites.decoding.named import for_others


def _fed(pieces: Iterable[int]) -> Schedule:
    feeds: list[Operation] = [Feed(piece, all_rows=True) for piece in pieces]
    return Schedule((*feeds, Step(PAST)))


def _repeated(pieces: Sequence[int], total: int) -> list[int]:
    """The pieces over and over, until they make up `total`."""
    cut: list[int] = []
    while sum(cut) < total:
        cut.append(min(pieces[len(cut) % len(pieces)], total - sum(cut)))
    return cut


def _cuts(case: Case) -> list[list[int]]:
    n = total(case)
    if crosses_allocation(case):
        step = ALLOCATION_STEP
        around = [[boundary, n - boundary] for boundary in allocation_boundaries(case)]
        return [*around, [step - 1, 1, 1, step - 1, 1, 1, n - 2 * step - 2], _repeated([130, 97, 5, 1, 2], n)]
    plans = [[1, n - 1], [n - 1, 1], _repeated([1, 3, 7], n), _repeated([13, 2, 5], n)]
    if is_short(case):
        plans.append([case.prompt, n - case.prompt])
    return plans + [_repeated([size], n) for size in (16, 17)]


def _by_the_caller(case: Case) -> Sequence[Schedule]:
    return [_fed(pieces) for pieces in _cuts(case)]


def _by_the_engine(case: Case) -> Sequence[Schedule]:
    n = total(case)
    if crosses_allocation(case):
        step = ALLOCATION_STEP
        return [Schedule((Feed(n, chunk=size), Step(PAST))) for size in (step - 1, step, step + 1, 100, n - 1)]
    last_rows = [Schedule((Feed(n, chunk=size), Step(1))) for size in (31, n - 1, 16, 7, 3)]
    first = case.prompt if is_short(case) else 5
    return [*last_rows, Schedule((Feed(first), Feed(n - first, chunk=9), Step(PAST)))]


chunked_prefill_matches_full_forward = Check(
    name="chunked_prefill_matches_full_forward",
    holds="a prompt that is fed in pieces, however uneven, gives at every row the logits of one full forward",
    schedules=_by_the_caller,
    faults=(
        "mask_missing_on_later_chunks",
        "rope_offset_off_by_one",
        "window_out_of_order",
        "recurrent_state_stays",
        "conv_tail_forgotten",
        "first_key_forgotten",
    ),
    needs=frozenset({"all_rows"}),
    layout="dense",  # a model that owns its state is fed in pieces with empty slices, and cut by the engine
    applies=for_others("chunked_prefill_matches_full_forward"),
)

engine_cut_prefill_matches_full_forward = Check(
    name="engine_cut_prefill_matches_full_forward",
    holds="a prompt that the engine itself cuts into chunks of any size gives the logits of one full forward",
    schedules=_by_the_engine,
    faults=("last_row_from_wrong_index", "rope_offset_off_by_one", "recurrent_state_forgotten", "first_key_forgotten"),
    needs=frozenset({"chunk"}),
    counters={"prefill_chunks": 16},  # more than there are feeds, so that an engine that does not cut does not reach it
    applies=for_others("engine_cut_prefill_matches_full_forward"),
)
