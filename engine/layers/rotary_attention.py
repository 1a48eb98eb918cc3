"""Grouped-query attention with rotary positions, half-split pairs: https://arxiv.org/abs/2305.13245, https://arxiv.org/abs/2104.09864.

Weights q_proj, k_proj, v_proj, o_proj as in checkpoints of the Llama lineage; the number of key/value heads is that of k_proj.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.layers.attention import attention
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rope import rotate
from engine.layers.weights import Weights
from engine.state import Span

__all__ = ["Attention"]


class Attention:
    """Keeps one state, that at index `slot` of a span's slots: a KV state, or with a window a ring.

    scale: of the scores; None: head_dim^-0.5. window: a query sees its own token and the window - 1 before it. sinks: each head
    has one more logit, the parameter `sinks`, in its softmax. q_norm, k_norm: of each head, before it is rotated. softcap: of
    the scores.
    """

    def __init__(
        self,
        weights: Weights,
        head_dim: int,
        bias: bool,
        slot: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        softcap: float | None = None,
    ) -> None:
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.slot = slot
        self.window, self.softcap = window, softcap
        self.sinks = weights["sinks"] if sinks else None  # [heads]
        self.q_norm, self.k_norm = q_norm, k_norm
        self.q_proj = Linear(weights.at("q_proj"), bias)
        self.k_proj = Linear(weights.at("k_proj"), bias)
        self.v_proj = Linear(weights.at("v_proj"), bias)
        self.o_proj = Linear(weights.at("o_proj"), bias)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, spans: Sequence[Span]) -> mx.array:
        T = x.shape[0]
        q = self.q_proj(x).reshape(T, -1, self.head_dim)  # [T, heads, head_dim]
        k = self.k_proj(x).reshape(T, -1, self.head_dim)  # [T, kv_heads, head_dim]
        v = self.v_proj(x).reshape(T, -1, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (a.swapaxes(0, 1)[None] for a in (q, k, v))  # [1, heads or kv_heads, T, head_dim]
        outs = []
        for span in spans:
            rows = slice(span.start, span.stop)
            keys, values = span.slots[self.slot].append(k[:, :, rows], v[:, :, rows], span.padding)
            outs.append(attention(q[:, :, rows], keys, values, self.scale, self.window, self.sinks, self.softcap))
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)  # [1, heads, T, head_dim]
        return self.o_proj(out.squeeze(0).swapaxes(0, 1).reshape(T, -1))
