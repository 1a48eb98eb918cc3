"""Grouped-query attention without any position encoding: order comes from the causal mask and from other layers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.layers.attention import attention
from engine.layers.linear import Linear
from engine.layers.weights import Weights
from engine.state import Span

__all__ = ["UnrotatedAttention"]


class UnrotatedAttention:
    """Keeps one KV state: that at index `slot` of a span's slots."""

    def __init__(self, weights: Weights, head_dim: int, slot: int) -> None:
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.slot = slot
        self.q_proj = Linear.of(weights.at("q_proj"))
        self.k_proj = Linear.of(weights.at("k_proj"))
        self.v_proj = Linear.of(weights.at("v_proj"))
        self.o_proj = Linear.of(weights.at("o_proj"))

    def __call__(self, x: mx.array, spans: Sequence[Span]) -> mx.array:
        T = x.shape[0]
        q, k, v = (  # [1, heads or kv_heads, T, head_dim]
            projection(x).reshape(1, T, -1, self.head_dim).swapaxes(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        outs = []
        for span in spans:
            rows = slice(span.start, span.stop)
            keys, values = span.slots[self.slot].append(k[:, :, rows], v[:, :, rows], span.padding)
            outs.append(attention(q[:, :, rows], keys, values, self.scale))
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)  # [1, heads, T, head_dim]
        return self.o_proj(out.swapaxes(1, 2).reshape(T, -1))
