"""Token tail: the ids before the new ones, for layers that look at neighbouring tokens (n-gram embeddings)."""

from __future__ import annotations

import mlx.core as mx

from engine.errors import Refused
from engine.state.kv import STEP

__all__ = ["BEFORE_START", "TokenTail"]

BEFORE_START = -1  # no token id: what stands in a tail where the sequence has not begun


class TokenTail:
    """Gives the last `width` ids. It keeps all of them, 4 bytes a token, so that it can be rewound to any length.

    Buffer int32 [capacity], allocated in steps; only [0, length) is live.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.length = 0
        self.growths = 0
        self._ids: mx.array | None = None

    def append(self, tokens: mx.array, padding: int = 0) -> mx.array:
        """tokens int32 [n]. Returns int32 [width + n]: the `width` ids before them (BEFORE_START: none), then them.

        The last `padding` of the tokens do not become live.
        """
        n, start = tokens.shape[0], self.length
        stop = start + n
        if self._ids is None or stop > self._ids.shape[0]:
            room = mx.zeros((-(-n // STEP) * STEP,), mx.int32)
            self._ids = room if self._ids is None else mx.concatenate([self._ids[:start], room])
            self.growths += 1
        self._ids[start:stop] = tokens
        self.length = stop - padding
        live = self._ids[max(0, start - self.width) : stop]
        missing = self.width + n - live.shape[0]
        return mx.concatenate([mx.full((missing,), BEFORE_START, mx.int32), live]) if missing else live

    def can_rewind(self, n: int) -> bool:
        return 0 <= n <= self.length

    def rewind(self, n: int) -> None:
        if not self.can_rewind(n):
            raise Refused(f"cannot rewind {n} tokens of a state that holds {self.length}")
        self.length -= n

    def snapshot(self) -> mx.array | None:
        """All ids, int32 [length], copied."""
        if self.length == 0 or self._ids is None:
            return None
        ids = mx.contiguous(self._ids[: self.length])
        mx.eval(ids)
        return ids

    def restore(self, snapshot: mx.array | None) -> None:
        self.length, self._ids = 0, None
        if snapshot is not None:
            self.append(snapshot)

    def arrays(self) -> list[mx.array]:
        return [] if self._ids is None else [self._ids]

    @property
    def nbytes(self) -> int:
        return 0 if self._ids is None else self._ids.nbytes
