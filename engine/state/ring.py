"""Sliding window: keys and values of the last tokens, as many as a window of `window` tokens needs."""

from __future__ import annotations

import mlx.core as mx

from engine.errors import Refused
from engine.state.kv import STEP

__all__ = ["RingKVState"]


class RingKVState:
    """Buffers [1, heads, capacity, dim] whose slots hold consecutive tokens, oldest first."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.length = 0
        self.growths = 0
        self._first = 0  # the token in slot 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def append(self, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        n = keys.shape[2]
        start = self.length - self._first
        if self._keys is None or self._values is None or start + n > self._keys.shape[2]:
            kept = min(start, self.window - 1)
            room = max(n, min(STEP, self.window))
            self._keys = _moved(self._keys, start - kept, start, keys, room)
            self._values = _moved(self._values, start - kept, start, values, room)
            self._first, start = self.length - kept, kept
            self.growths += 1
        stop = start + n
        self._keys[:, :, start:stop] = keys
        self._values[:, :, start:stop] = values
        self.length += n - padding
        first = max(0, start - self.window + 1)
        return self._keys[:, :, first:stop], self._values[:, :, first:stop]

    def can_rewind(self, n: int) -> bool:
        return n == 0 or 0 <= n <= self.length <= self.window

    def rewind(self, n: int) -> None:
        if not self.can_rewind(n):
            raise Refused(f"cannot rewind {n} tokens of a window of {self.window} that has seen {self.length}")
        self.length -= n

    def snapshot(self) -> tuple[int, mx.array, mx.array] | None:
        if self.length == 0 or self._keys is None or self._values is None:
            return None
        stop = self.length - self._first
        start = max(0, stop - self.window)
        copies = [mx.concatenate([b[:, :, start:stop], b[:, :, :0]], axis=2) for b in (self._keys, self._values)]
        mx.eval(copies)
        return self.length, copies[0], copies[1]

    def restore(self, snapshot: tuple[int, mx.array, mx.array] | None) -> None:
        self.length, self._first, self._keys, self._values = 0, 0, None, None
        if snapshot is not None:
            length, keys, values = snapshot
            self.length = self._first = length - keys.shape[2]
            self.append(keys, values)

    def arrays(self) -> list[mx.array]:
        return [buffer for buffer in (self._keys, self._values) if buffer is not None]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.arrays())


def _moved(buffer: mx.array | None, start: int, stop: int, new: mx.array, room: int) -> mx.array:
    batch, heads, _, dim = new.shape
    empty = mx.zeros((batch, heads, room, dim), dtype=new.dtype)
    return empty if buffer is None else mx.concatenate([buffer[:, :, start:stop], empty], axis=2)
