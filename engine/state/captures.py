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
        self._snapshots: list[StateSnapshot | None] = []  # of the first offsets
        self._bases = [length]  # before each of these, and after the last

    def visit(self, start: int, stop: int, capture: Callable[[int, int], StateSnapshot | None]) -> None:
        """A write took the state from `start` to `stop` tokens: `capture(base, offset)` at each offset in [start, stop].

        An offset before `start` that no write crossed (a restore jumped over it) stays without a capture.
        """
        for offset in self.offsets[len(self._snapshots) : bisect_right(self.offsets, stop)]:
            base = self._bases[-1]
            crossed = offset >= start
            self._snapshots.append(capture(base, offset) if crossed else None)
            self._bases.append(offset if crossed else base)

    def inside(self, start: int, stop: int) -> list[int]:
        """Offsets strictly between `start` and `stop` that have to be captured yet."""
        return [offset for offset in self.offsets[len(self._snapshots) :] if start < offset < stop]

    def rewind(self, length: int) -> None:
        """The state went back to `length` tokens: what was captured after them is dropped and will be captured anew."""
        while self._snapshots and self.offsets[len(self._snapshots) - 1] > length:
            snapshot = self._snapshots.pop()
            self._bases.pop()
            if snapshot is not None:
                snapshot.close()

    def take(self) -> list[StateSnapshot | None]:
        """One for each offset; None: nothing lay there (no tokens since the base), or no write reached it."""
        return [*self._snapshots, *[None] * (len(self.offsets) - len(self._snapshots))]

    def captured(self) -> list[StateSnapshot]:
        return [snapshot for snapshot in self._snapshots if snapshot is not None]
