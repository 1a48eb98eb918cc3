"""Captures: snapshots at offsets that were scheduled beforehand, taken while writes of any length cross them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from engine.state.snapshot import StateSnapshot

__all__ = ["Captures"]


class Captures:
    """Offsets in ascending order, and what was captured at those that were reached.

    A capture of a growing state covers [base, offset). `base` is the length at which the schedule was made, and then the offset
    captured last; other ends of writes never move it, or the stretches would not join up.
    """

    def __init__(self, offsets: Sequence[int], length: int) -> None:
        """Raises ValueError for offsets that do not ascend, or lie before `length`."""
        if any(later <= earlier for earlier, later in pairwise(offsets)):
            raise ValueError(f"offsets of captures must ascend strictly (got {list(offsets)})")
        if offsets and offsets[0] < length:
            raise ValueError(f"cannot capture at offset {offsets[0]}: the state holds {length} tokens already")
        self.offsets = list(offsets)
        self._start = length
        self._visited: list[tuple[StateSnapshot | None, int]] = []  # of the first offsets: the capture, and the base after it

    def visit(self, start: int, stop: int, capture: Callable[[int, int], StateSnapshot | None]) -> None:
        """A write took the state from `start` to `stop` tokens: `capture(base, offset)` at each offset in [start, stop].

        An offset before `start` that no write crossed (a restore jumped over it) stays without a capture.
        """
        for offset in self.offsets[len(self._visited) : bisect_right(self.offsets, stop)]:
            base = self._visited[-1][1] if self._visited else self._start
            self._visited.append((capture(base, offset), offset) if offset >= start else (None, base))

    def inside(self, start: int, stop: int) -> list[int]:
        """Offsets strictly between `start` and `stop` that have to be captured yet."""
        return [offset for offset in self.offsets[len(self._visited) :] if start < offset < stop]

    def rewind(self, length: int) -> None:
        """The state went back to `length` tokens: what was captured after them is dropped and will be captured anew."""
        while self._visited and self.offsets[len(self._visited) - 1] > length:
            snapshot, _ = self._visited.pop()
            if snapshot is not None:
                snapshot.close()

    def take(self) -> list[StateSnapshot | None]:
        """One for each offset; None: nothing lay there (no tokens since the base), or no write reached it."""
        return [*(snapshot for snapshot, _ in self._visited), *[None] * (len(self.offsets) - len(self._visited))]

    def captured(self) -> list[StateSnapshot]:
        return [snapshot for snapshot, _ in self._visited if snapshot is not None]
