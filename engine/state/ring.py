"""Sliding window: keys and values of the last tokens, as many as a window needs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from engine.state.buffers import STEP, TokenBuffers
from engine.state.snapshot import StateSnapshot
from engine.state.state import only_the_later

__all__ = ["RingKVState"]


class RingKVState(TokenBuffers):
    """Buffers [1, heads, capacity, dim] of at least the last min(length, window) tokens, oldest first.

    Its slots do not go round: they run on to the end of the buffer, and then the window moves to the front of a new one, once
    in min(STEP, window) single tokens. So keys are always in the order of their tokens, a write never overwrites what a query
    may still see, and one that failed can be taken back. A longer append gets a buffer that just holds it, as long as the next
    append leaves it.
    """

    axis = 2

    def __init__(self, window: int) -> None:
        """window: tokens that a query sees, its own included."""
        if window < 1:
            raise ValueError(f"window must be at least 1 (got {window})")
        super().__init__()
        self.window = window

    def append(self, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        """keys [1, heads, n, k_dim], values [1, heads, n, v_dim]. Returns what the n queries may see, in the tokens' order:
        the last window - 1 before them (fewer at the start), then them.

        The last `padding` of the new ones do not become part of the state.
        """
        start = self.length
        stop = self._append((keys, values), padding)
        seen_keys, seen_values = self._view(max(0, start - self.window + 1), stop)
        return seen_keys, seen_values

    def view(self) -> tuple[mx.array, mx.array]:
        """The last min(length, window) keys and values, of which there must be some. Not to be kept."""
        keys, values = self._view(max(0, self.length - self.window), self.length)
        return keys, values

    def can_rewind(self, n: int) -> bool:
        return n == 0 or 0 <= n <= self.length <= self.window

    def _kept_from(self) -> int:
        return max(self._first, self.length - self.window)

    def _room(self, n: int) -> int:
        return max(n, min(STEP, self.window))

    def snapshot(self, start: int = 0) -> StateSnapshot | None:
        return self._window_before(self.length) if self.length > start else None

    def _capture(self, base: int, offset: int) -> StateSnapshot | None:
        return self._window_before(offset)

    def _window_before(self, stop: int) -> StateSnapshot | None:
        return self._page(max(0, stop - self.window), stop)

    def _restore(self, snapshot: StateSnapshot, target: int) -> bool:
        if target > snapshot.stop or (target < snapshot.stop and snapshot.stop > self.window):
            return False
        if snapshot.source is not self:
            arrays = snapshot.arrays()
            self._drop_buffers(snapshot.start)
            self._write(arrays, 0)
        self.length = target
        return True

    def merge(self, parent: StateSnapshot | None, child: StateSnapshot | None) -> StateSnapshot | None:
        return only_the_later(parent, child)

    def split(self, snapshot: StateSnapshot, at: int) -> tuple[StateSnapshot | None, StateSnapshot | None]:
        return None, snapshot

    def checkpoint(self) -> Any:
        return self.snapshot()  # lazy: a window is copied only when the buffer is left behind before the next checkpoint

    def rollback(self, checkpoint: Any) -> None:
        if self._captures is not None:  # what will be dropped need not be copied out
            self._captures.rewind(0 if checkpoint is None else checkpoint.stop)
        if checkpoint is None:
            self._drop_buffers(0)
        else:
            self._restore(checkpoint, checkpoint.stop)
