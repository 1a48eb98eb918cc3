"""Grouped-query attention with rotary positions, half-split pairs: https://arxiv.org/abs/2305.13245, https://arxiv.org/abs/2104.09864.

Weights q_proj, k_proj, v_proj, o_proj as in checkpoints of the Llama lineage; the number of key/value heads is that of k_proj.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.layers.attention import attention
from engine.layers.linear import Linear
from engine.layers.rope import rotate
from engine.layers.weights import Weights
from engine.state import Span

__all__ = ["Attention"]


class Attention:
    """Keeps one KV state: that at index `slot` of a span's slots."""

    def __init__(self, weights: Weights, head_dim: int, bias: bool, slot: int) -> None:
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.slot = slot
        self.q_proj = Linear(weights.at("q_proj"), bias)
        self.k_proj = Linear(weights.at("k_proj"), bias)
        self.v_proj = Linear(weights.at("v_proj"), bias)
        self.o_proj = Linear(weights.at("o_proj"), bias)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, spans: Sequence[Span]) -> mx.array:
        T = x.shape[0]
        q = rotate(self.q_proj(x).reshape(T, -1, self.head_dim), cos, sin)  # [T, heads, head_dim]
        k = rotate(self.k_proj(x).reshape(T, -1, self.head_dim), cos, sin)  # [T, kv_heads, head_dim]
        v = self.v_proj(x).reshape(T, -1, self.head_dim)
        q, k, v = (a.swapaxes(0, 1)[None] for a in (q, k, v))  # [1, heads or kv_heads, T, head_dim]
        outs = []
        for span in spans:
            rows = slice(span.start, span.stop)
            keys, values = span.slots[self.slot].append(k[:, :, rows], v[:, :, rows], span.padding)
            outs.append(attention(q[:, :, rows], keys, values, self.scale))
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)  # [1, heads, T, head_dim]
        return self.o_proj(out.squeeze(0).swapaxes(0, 1).reshape(T, -1))
