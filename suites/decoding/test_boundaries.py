"""What a window lets go, and what a convolution's tail holds, is right at every length around its size."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases.case import RECURRENT, RING, Case
from harness.check import Check
from harness.schedule import Schedule
from suites.decoding.lengths import PAST, taps, total, window


def _pieces(sizes: Sequence[int], n: int) -> str:
    """Feeds of these sizes over and over, up to n tokens."""
    cut: list[int] = []
    while sum(cut) < n:
        cut.append(min(sizes[len(cut) % len(sizes)], n - sum(cut)))
    return "; ".join(f"feed a {size} all" for size in cut)


def _windows(case: Case) -> Sequence[Schedule]:
    w, n = window(case), total(case)
    around = (w - 1, w, w + 1)
    texts = [f"feed a {size} all; step a {w + 2}" for size in around]  # decode crosses from each side
    texts += [f"{_pieces([size], n)}; step a {PAST}" for size in around]  # so do pieces
    texts += [
        f"feed a 1; step a {2 * w}; feed a {w + 3} all; step a {PAST}",  # pieces after steps went round
        f"feed a {2 * w + 1} all; step a 1; feed a {w - 1} all; step a 1; feed a 2 all; step a {PAST}",
        f"feed a {w - 1} pad={w + 3}; step a 2; feed a {w} all pad={2 * w}; step a {PAST}",
        f"feed a {w + 1}; save a x; step a {2 * w + 1}; restore b x; feed b {w + 1} all; step a 1; restore a x; step a {PAST}",
    ]
    return [Schedule.parse(text) for text in texts]


def _tails(case: Case) -> Sequence[Schedule]:
    k = taps(case)
    sizes = [size for size in (k - 2, k - 1, k, k + 1) if size > 0]
    texts = [f"feed a {size} all; step a {k + 1}; feed a {k} all; step a 1" for size in sizes]
    texts += [
        f"{_pieces(sizes, 3 * sum(sizes))}; step a {PAST}",
        f"feed a 1; feed b {k}; step a+b {k}; feed a {k} all; step b+a 2",
        f"feed a 1 pad=8; feed a {k} pad={k + 1}; step a 1; feed a 1 all pad=5; step a {PAST}",
        f"feed a 1 pad={k}; save a x; feed a {k}; restore b x; step b {k}; restore a x; feed a {k + 1} all; step a 1",
    ]
    return [Schedule.parse(text) for text in texts]


window_boundaries_match_full_forward = Check(
    name="window_boundaries_match_full_forward",
    holds="steps, pieces, padding and snapshots that cross the edge of a window give the logits of one full forward",
    schedules=_windows,
    faults=("window_one_too_short", "window_out_of_order", "padding_enters_the_window"),
    needs=frozenset({"all_rows", "pad", "snapshot", "several_sequences"}),
    layout="dense",
    applies=lambda case: RING in case.traits,
)

conv_tail_boundaries_match_full_forward = Check(
    name="conv_tail_boundaries_match_full_forward",
    holds="pieces, steps, padding and snapshots shorter and longer than a convolution give the logits of one full forward",
    schedules=_tails,
    faults=("conv_tail_forgotten", "recurrent_state_stays", "padding_enters_the_recurrence"),
    needs=frozenset({"all_rows", "pad", "snapshot", "several_sequences", "batch"}),
    layout="dense",
    applies=lambda case: RECURRENT in case.traits,
)
