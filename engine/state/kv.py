"""Growing state: keys and values of every token so far."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from engine.errors import Refused

__all__ = ["STEP", "KVSnapshot", "KVState"]

STEP = 256  # tokens by which buffers grow


@dataclass(frozen=True)
class KVSnapshot:
    """Compact copies of the first `length` tokens: keys [1, heads, length, k_dim], values [1, heads, length, v_dim]."""

    keys: mx.array
    values: mx.array

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class KVState:
    """Buffers [1, heads, capacity, dim], allocated in steps; only [0, length) is live. Key and value dims may differ.

    Writes go to [length, length + n) in place: no other reference to a buffer may be kept, or each write copies it.
    """

    def __init__(self) -> None:
        self.length = 0
        self.growths = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def append(self, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        """keys [1, heads, n, k_dim], values [1, heads, n, v_dim]. Returns all live keys and values and all new ones.

        The last `padding` of the new ones do not become live: they stand behind every query that counts, and the next append
        overwrites them.
        """
        start, stop = self.length, self.length + keys.shape[2]
        if self._keys is None or self._values is None or stop > self._keys.shape[2]:
            self._keys = _grown(self._keys, start, keys)
            self._values = _grown(self._values, start, values)
            self.growths += 1
        self._keys[:, :, start:stop] = keys
        self._values[:, :, start:stop] = values
        self.length = stop - padding
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def can_rewind(self, n: int) -> bool:
        return 0 <= n <= self.length

    def rewind(self, n: int) -> None:
        if not self.can_rewind(n):
            raise Refused(f"cannot rewind {n} tokens of a state that holds {self.length}")
        self.length -= n

    def snapshot(self) -> KVSnapshot | None:
        if self.length == 0 or self._keys is None or self._values is None:
            return None
        # Copies, not views: a view would keep the whole buffer alive and make the next write copy it.
        snapshot = KVSnapshot(*(mx.contiguous(buffer[:, :, : self.length]) for buffer in (self._keys, self._values)))
        mx.eval(snapshot.keys, snapshot.values)
        return snapshot

    def restore(self, snapshot: KVSnapshot | None) -> None:
        self.length, self._keys, self._values = 0, None, None
        if snapshot is not None:
            self.append(snapshot.keys, snapshot.values)

    def arrays(self) -> list[mx.array]:
        return [buffer for buffer in (self._keys, self._values) if buffer is not None]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.arrays())


def _grown(buffer: mx.array | None, live: int, new: mx.array) -> mx.array:
    """`live` tokens of buffer (stale ones behind them are cut off) and room for the new ones, in whole steps."""
    batch, heads, n, dim = new.shape
    room = mx.zeros((batch, heads, -(-n // STEP) * STEP, dim), dtype=new.dtype)
    return room if buffer is None else mx.concatenate([buffer[:, :, :live], room], axis=2)
