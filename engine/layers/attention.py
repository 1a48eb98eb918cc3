"""Causal attention of one sequence's new tokens over all its tokens, with grouped queries.

On a GPU this is MLX's fused kernel. On a CPU MLX composes it from primitives, computes the upper triangle too and spends
most of the time in exp, so there it is composed here: query blocks see only the keys they may see.
"""

from __future__ import annotations

import mlx.core as mx

from engine.layers.exponential import exp

__all__ = ["attention"]

QUERY_BLOCK = 128  # queries at a time; bounds the part of the upper triangle that is computed and masked


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """q [1, heads, n, d], k [1, kv_heads, length, d], v [1, kv_heads, length, d_v] -> [1, heads, n, d_v], in q's dtype.

    The n queries belong to the last n of the keys; query i sees the keys up to its own.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal" if q.shape[2] > 1 else None)
    return composed_attention(q, k, v, scale)


def composed_attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """The same from primitives; scores and softmax in float32 in every dtype."""
    (_, heads, n, d), kv_heads, length = q.shape, k.shape[1], k.shape[2]
    q = (q * scale).reshape(kv_heads, heads // kv_heads, n, d)  # query heads of a group share one KV head
    k, v = k[0], v[0]
    blocks = []
    for start in range(0, n, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n)
        visible = length - n + stop  # keys that the block's last query sees
        rows = q[:, :, start:stop].reshape(kv_heads, -1, d)
        scores = (rows @ k[:, :visible].swapaxes(-1, -2)).astype(mx.float32)
        if stop - start > 1:
            scores = scores.reshape(kv_heads, -1, stop - start, visible) + _causal(stop - start, visible)
        scores = scores.reshape(kv_heads, -1, visible)
        weights = exp(scores - scores.max(axis=-1, keepdims=True))
        total = weights.sum(axis=-1, keepdims=True)
        out = (weights.astype(v.dtype) @ v[:, :visible]) / total
        blocks.append(out.reshape(1, heads, stop - start, v.shape[-1]).astype(q.dtype))
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def _causal(n: int, length: int) -> mx.array:
    """0 where query i of the last n sees key j, -inf where it does not: float32 [n, length]."""
    queries = mx.arange(length - n, length)[:, None]
    return mx.where(mx.arange(length) <= queries, 0.0, -float("inf"))
