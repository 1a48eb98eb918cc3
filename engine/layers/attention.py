"""Causal attention of one sequence's new tokens over all its tokens, with grouped queries.

On a GPU this is MLX's fused kernel. On a CPU MLX composes it from primitives, computes the upper triangle too and spends
most of the time in exp, so large ones are composed here: query blocks see only the keys they may see, softmax runs in numpy.
"""

from __future__ import annotations

import mlx.core as mx

from engine.layers.activations import on_host, softmax

__all__ = ["attention", "causal"]

QUERY_BLOCK = 128  # queries at a time; bounds the part of the upper triangle that is computed and masked


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """q [1, heads, n, d], k [1, kv_heads, length, d], v [1, kv_heads, length, d_v] -> [1, heads, n, d_v], in q's dtype.

    The n queries belong to the last n of the keys; query i sees the keys up to its own.
    """
    (_, heads, n, _), length = q.shape, k.shape[2]
    if not on_host(heads * n * length):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal" if n > 1 else None)
    return composed_attention(q, k, v, scale)


def composed_attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """The same from primitives; scores and softmax in float32 in every dtype."""
    (_, heads, n, d), kv_heads, length = q.shape, k.shape[1], k.shape[2]
    q = (q * scale).reshape(kv_heads, heads // kv_heads, n, d)  # query heads of a group share one KV head
    k, v = k.squeeze(0), v.squeeze(0)  # not k[0], which copies
    blocks = []
    for start in range(0, n, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n)
        visible = length - n + stop  # keys that the block's last query sees
        rows = q[:, :, start:stop].reshape(kv_heads, -1, d)
        scores = (rows @ k[:, :visible].swapaxes(-1, -2)).astype(mx.float32)
        if stop - start > 1:
            scores = scores.reshape(kv_heads, -1, stop - start, visible) + causal(stop - start, visible)
        weights = softmax(scores).reshape(kv_heads, -1, visible).astype(v.dtype)
        blocks.append((weights @ v[:, :visible]).reshape(1, heads, stop - start, v.shape[-1]))
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def causal(n: int, length: int) -> mx.array:
    """0 where query i of the last n sees key j, -inf where it does not: float32 [n, length]."""
    queries = mx.arange(length - n, length)[:, None]
    return mx.where(mx.arange(length) <= queries, 0.0, -float("inf"))
