"""Causal attention of one sequence's new tokens over all its tokens, with grouped queries, windows and sinks.

On a GPU this is MLX's fused kernel. On a CPU MLX composes it from primitives, computes the upper triangle too and spends
most of the time in exp, so large ones are composed here: query blocks see only the keys they may see, softmax runs in numpy.
"""

from __future__ import annotations

import mlx.core as mx

from engine.layers.activations import on_host, softmax

__all__ = ["attention", "causal"]

QUERY_BLOCK = 128  # queries at a time; bounds the part of the upper triangle that is computed and masked


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """q [1, heads, n, d], k [1, kv_heads, length, d], v [1, kv_heads, length, d_v] -> [1, heads, n, d_v], in q's dtype.

    The n queries belong to the last n of the keys; query i sees the keys up to its own.
    window: a query sees its own key and the window - 1 before it, however many more there are. None: all.
    sinks [heads]: of each head one more logit, as it is (not scaled), that takes part in the softmax and is dropped after it.
    softcap: scores are softcap * tanh(scores / softcap), for which there is no fused kernel.
    """
    (_, heads, n, _), length = q.shape, k.shape[2]
    if window is not None and length >= window + n:  # keys that no query sees
        k, v = (a[:, :, length - (window + n - 1) :] for a in (k, v))
        length = window + n - 1
    if softcap is not None or on_host(heads * n * length):
        return composed_attention(q, k, v, scale, window, sinks, softcap)
    mask: mx.array | str | None = "causal" if n > 1 else None
    if n > 1 and window is not None and length > window:
        mask = visibility(n, length, window)
    sinks = None if sinks is None else sinks.astype(q.dtype)  # which the kernel asks for
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def composed_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """The same from primitives; scores and softmax in float32 in every dtype."""
    (_, heads, n, d), kv_heads, length = q.shape, k.shape[1], k.shape[2]
    group = heads // kv_heads  # query heads of a group share one KV head
    q = (q * scale).reshape(kv_heads, group, n, d)
    k, v = k.squeeze(0), v.squeeze(0)  # not k[0], which copies
    sink_logits = None if sinks is None else sinks.astype(mx.float32).reshape(kv_heads, group, 1, 1)
    blocks = []
    for start in range(0, n, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n)
        rows = stop - start
        last = length - n + stop  # keys before this one the block's last query sees,
        first = 0 if window is None else max(0, last - rows - window + 1)  # from this one on its first query
        queries = q[:, :, start:stop].reshape(kv_heads, -1, d)
        scores = (queries @ k[:, first:last].swapaxes(-1, -2)).astype(mx.float32)
        scores = scores.reshape(kv_heads, group, rows, last - first)
        if softcap is not None:
            scores = mx.tanh(scores / softcap) * softcap
        if rows > 1:
            scores = scores + causal(rows, last - first, window)
        weights = softmax(scores, sink_logits).reshape(kv_heads, -1, last - first).astype(v.dtype)
        blocks.append((weights @ v[:, first:last]).reshape(1, heads, rows, v.shape[-1]))
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def causal(n: int, length: int, window: int | None = None) -> mx.array:
    """0 where query i of the last n sees key j, -inf where it does not: float32 [n, length]."""
    return mx.where(visibility(n, length, window), 0.0, -float("inf"))


def visibility(n: int, length: int, window: int | None = None) -> mx.array:
    """Whether query i of the last n sees key j: bool [n, length]."""
    queries, keys = mx.arange(length - n, length)[:, None], mx.arange(length)
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)
