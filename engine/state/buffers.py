"""States with one entry per token, in buffers that are written in place and paged out lazily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import mlx.core as mx

from engine.state.snapshot import StateSnapshot, compact
from engine.state.state import State

__all__ = ["STEP", "TokenBuffers"]

STEP = 256  # tokens by which buffers grow


class TokenBuffers(State):
    """Buffers whose dimension `axis` is tokens, allocated in steps. Slot 0 holds token `_first`; [_first, length) is live.

    Slots behind the live ones may hold tokens that a rewind dropped, and lazy snapshots may name them: a snapshot that is still
    lazy has never had its tokens overwritten. Nothing else may keep a reference to a buffer, or each write copies it.
    """

    axis: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self._first = 0
        self._buffers: list[mx.array] = []
        self._lazy: WeakSet[StateSnapshot] = WeakSet()

    def can_rewind(self, n: int) -> bool:
        return 0 <= n <= self.length

    def _append(self, new: Sequence[mx.array], padding: int) -> int:
        """Write new tokens behind the live ones; all but the last `padding` become live. Returns where the new ones stop."""
        start = self.length
        stop = self._write(new, padding)
        if self._captures is not None:
            self._captures.visit(start, self.length, self._capture)
        return stop

    def _write(self, new: Sequence[mx.array], padding: int) -> int:
        n = new[0].shape[self.axis]
        start, stop = self.length, self.length + n
        if self._lazy:
            self._copy_out(start, stop)
        capacity = self._buffers[0].shape[self.axis] if self._buffers else 0
        if stop - self._first > capacity or n == capacity:  # MLX makes an array that is written to as a whole that new array
            self._move(new, n, capacity)
        else:
            place = self._place(start, stop)
            for buffer, rows in zip(self._buffers, new, strict=True):
                buffer[place] = rows
        self.length = stop - padding
        return stop

    def _place(self, start: int, stop: int) -> tuple[slice, ...]:
        """The index of tokens [start, stop) in a buffer."""
        return (slice(None),) * self.axis + (slice(start - self._first, stop - self._first),)

    def _view(self, start: int, stop: int) -> list[mx.array]:
        place = self._place(start, stop)
        return [buffer[place] for buffer in self._buffers]

    def copy(self, start: int, stop: int) -> list[mx.array]:
        """Compact copies of tokens [start, stop), which lie in the buffers."""
        return [compact(view) for view in self._view(start, stop)]

    def _move(self, new: Sequence[mx.array], n: int, capacity: int) -> None:
        """To new buffers: the live tokens from `_kept_from()` on, the n new ones, and room. Stale tokens are left behind."""
        first, axis = self._kept_from(), self.axis
        if first > self._first:
            self._copy_out(self._first, first)
        if self._buffers:
            new = [rows.astype(buffer.dtype) for rows, buffer in zip(new, self._buffers, strict=True)]
        rest = self._room(n) - n
        room = [mx.zeros((*rows.shape[:axis], rest, *rows.shape[axis + 1 :]), rows.dtype) for rows in new]
        kept = self._view(first, self.length)
        parts = zip(kept, new, room, strict=True) if kept else zip(new, room, strict=True)
        self._buffers, self._first = [self._joined(part) for part in parts], first
        self.growths += self._buffers[0].shape[axis] > capacity

    def _joined(self, parts: Sequence[mx.array]) -> mx.array:
        return mx.concatenate(list(parts), axis=self.axis)

    def _kept_from(self) -> int:
        """The first token that has to be kept."""
        return self._first

    def _room(self, n: int) -> int:
        """Slots to allocate for n new tokens."""
        return -(-n // STEP) * STEP

    def _copy_out(self, start: int, stop: int) -> None:
        """Make snapshots that name tokens in [start, stop) own them."""
        for snapshot in list(self._lazy):
            if snapshot.start < stop and snapshot.stop > start:
                snapshot.materialize()

    def _page(self, start: int, stop: int) -> StateSnapshot | None:
        return StateSnapshot(start, stop, source=self) if start < stop else None

    def snapshot(self, start: int = 0) -> StateSnapshot | None:
        return self._page(start, self.length)

    def _capture(self, base: int, offset: int) -> StateSnapshot | None:
        return self._page(base, offset)

    def _restore(self, snapshot: StateSnapshot, target: int) -> bool:
        if target > snapshot.stop or self.length < snapshot.start:
            return False
        if snapshot.source is not self:  # else the buffers hold its tokens still
            arrays = snapshot.arrays()
            self.length = snapshot.start
            self._write(arrays, 0)
        self.length = target
        return True

    def merge(self, parent: StateSnapshot | None, child: StateSnapshot | None) -> StateSnapshot | None:
        if parent is None or child is None:
            for snapshot in (parent, child):
                if snapshot is not None:
                    snapshot.close()
            return None
        if parent.stop != child.start:
            raise ValueError(f"cannot merge tokens up to {parent.stop} with tokens from {child.start} on: they do not join")
        if parent.source is not None and parent.source is child.source:
            merged = StateSnapshot(parent.start, child.stop, source=parent.source)
        else:
            for snapshot in (parent, child):
                snapshot.set_materialize_hook(None)  # its bytes become the merged one's
            pairs = zip(parent.arrays(), child.arrays(), strict=True)
            merged = StateSnapshot(parent.start, child.stop, [self._joined(pair) for pair in pairs])
            mx.eval(merged.arrays())
        parent.close()
        child.close()
        return merged

    def split(self, snapshot: StateSnapshot, at: int) -> tuple[StateSnapshot | None, StateSnapshot | None]:
        start, stop, source = snapshot.start, snapshot.stop, snapshot.source
        if at <= start:
            return None, snapshot
        if at >= stop:
            return snapshot, None
        if source is not None:
            upper, lower = StateSnapshot(start, at, source=source), StateSnapshot(at, stop, source=source)
        else:
            halves = [mx.split(array, [at - start], axis=self.axis) for array in snapshot.arrays()]
            upper = StateSnapshot(start, at, [compact(half[0]) for half in halves])
            lower = StateSnapshot(at, stop, [compact(half[1]) for half in halves])
            mx.eval(upper.arrays(), lower.arrays())
        snapshot.close()
        return upper, lower

    def free(self) -> None:
        self._drop_captures()
        self._drop_buffers(0)

    def _drop_buffers(self, first: int) -> None:
        """Hold nothing; the next token to be written is number `first`."""
        for snapshot in list(self._lazy):
            snapshot.materialize()
        self._buffers = []
        self.length = self._first = first

    def checkpoint(self) -> Any:
        return self.length

    def rollback(self, checkpoint: Any) -> None:
        self.length = checkpoint
        self._recapture()

    def arrays(self) -> list[mx.array]:
        return list(self._buffers)
