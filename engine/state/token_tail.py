"""Token tail: the ids before the new ones, for layers that look at neighbouring tokens (n-gram embeddings)."""

from __future__ import annotations

import mlx.core as mx

from engine.state.buffers import TokenBuffers

__all__ = ["BEFORE_START", "TokenTail"]

BEFORE_START = -1  # no token id: what stands in a tail where the sequence has not begun


class TokenTail(TokenBuffers):
    """Gives the last `width` ids. It keeps all of them, 4 bytes a token, so that it can be rewound to any length.

    Buffer int32 [capacity].
    """

    axis = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def append(self, tokens: mx.array, padding: int = 0) -> mx.array:
        """tokens int32 [n]. Returns int32 [width + n]: the `width` ids before them (BEFORE_START: none), then them.

        The last `padding` of the tokens do not become live.
        """
        start = self.length
        stop = self._append((tokens,), padding)
        live = self._view(max(0, start - self.width), stop)[0]
        missing = self.width + tokens.shape[0] - live.shape[0]
        return mx.concatenate([mx.full((missing,), BEFORE_START, mx.int32), live]) if missing else live
