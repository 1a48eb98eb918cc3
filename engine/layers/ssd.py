"""The selective state space recurrence of Mamba-2, https://arxiv.org/abs/2405.21060, in chunks and in steps.

Per head, with scalar decay A < 0 and step size dt >= 0:

    h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T        h [head_dim, state]
    y_t = h_t C_t

B and C belong to groups of heads / n_groups consecutive heads. Everything is float32. A token with dt = 0 and C = 0 is an
identity step: the state stays bit for bit and its output is 0. This is how padding passes through.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from engine.layers.activations import exp

__all__ = ["CHUNK", "scan", "step"]

CHUNK = 64  # tokens of one matrix form
CHUNKS = 4  # of which one pass takes this many: bounds its memory, and the products that carry states from chunk to chunk


def scan(x: mx.array, dt: mx.array, A: mx.array, B: mx.array, C: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """x [T, heads, head_dim], dt [T, heads], A [heads], B and C [T, groups, state], state [1, heads, head_dim, state].

    Returns y [T, heads, head_dim] and the state after the T tokens.
    """
    if x.shape[0] == 1:
        return step(x, dt, A, B, C, state)
    outs = []
    for start in range(0, x.shape[0], CHUNKS * CHUNK):
        tokens = slice(start, start + CHUNKS * CHUNK)
        y, state = _pass(x[tokens], dt[tokens], A, B[tokens], C[tokens], state)
        outs.append(y)
    return (outs[0] if len(outs) == 1 else mx.concatenate(outs)), state


def _pass(x: mx.array, dt: mx.array, A: mx.array, B: mx.array, C: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """The scan over whole chunks at once; shapes as there.

    In a chunk that starts at h_0: y_i = exp(sum of dt A up to i) h_0 C_i + sum over j <= i of exp(sum of dt A after j up to i)
    (C_i B_j) dt_j x_j. Each of these sums is taken on its own, not as a difference of running sums: its terms have one sign,
    so nothing cancels, and no exponent is positive. From chunk to chunk it is the same with whole chunks as steps.
    """
    (T, heads, head_dim), (_, groups, size) = x.shape, B.shape
    n = min(CHUNK, T)
    chunks, missing = -(-T // n), -T % n
    if missing:  # identity steps up to a whole chunk
        x, dt, B, C = (mx.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)) for a in (x, dt, B, C))
    grouped = (groups, heads // groups, chunks)
    inputs = (x * dt[:, :, None]).reshape(chunks, n, *grouped[:2], head_dim).transpose(2, 3, 0, 1, 4)  # [*grouped, n, head_dim]
    B, C = (a.reshape(chunks, n, groups, 1, size).transpose(2, 3, 0, 1, 4) for a in (B, C))  # [groups, 1, chunks, n, state]

    sums = (dt * A).reshape(chunks, n, heads).transpose(2, 0, 1).reshape(-1, n) @ _interval_sums(n)
    sums = sums.reshape(*grouped, n, n + 1)  # [.., i, 0]: up to i, [.., i, j + 1]: after j up to i
    decay = exp(sums)
    added = (inputs * decay[..., -1, 1:, None]).swapaxes(-1, -2) @ B  # to a chunk's end: [*grouped, head_dim, state]

    to_chunk = (sums[..., -1, 0].reshape(heads, chunks) @ _interval_sums(chunks)).reshape(heads, chunks, chunks + 1)
    first = mx.broadcast_to(mx.eye(1, chunks + 1), (heads, 1, chunks + 1))
    to_chunk = mx.concatenate([first, mx.tril(mx.exp(to_chunk), k=1)], axis=1)
    added = mx.concatenate([state.reshape(heads, 1, -1), added.reshape(heads, chunks, -1)], axis=1)
    states = to_chunk @ added  # before each chunk and after the last: [heads, chunks + 1, head_dim * state]
    starts = states[:, :-1].reshape(*grouped, head_dim, size)

    carried = C @ starts.swapaxes(-1, -2)  # [*grouped, n, head_dim]
    scores = decay[..., 1:] * mx.tril(C @ B.swapaxes(-1, -2))  # [*grouped, i, j]
    y = mx.addmm(carried * decay[..., :1], scores, inputs)
    y = y.transpose(2, 3, 0, 1, 4).reshape(chunks * n, heads, head_dim)
    return (y[:T] if missing else y), states[:, -1].reshape(1, heads, head_dim, size)


def step(x: mx.array, dt: mx.array, A: mx.array, B: mx.array, C: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """One token of each of `batch` sequences: x [batch, heads, head_dim], dt [batch, heads], A [heads], B and C
    [batch, groups, state], state [batch, heads, head_dim, state]. Returns y as x, and the new states.
    """
    batch, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    grouped = (batch, groups, heads // groups * head_dim, size)
    decay = mx.exp(dt * A)[:, :, None, None]
    added = (x * dt[:, :, None]).reshape(*grouped[:3], 1) * B[:, :, None]  # [batch, groups, ..., state]
    state = state * decay + added.reshape(state.shape)
    y = state.reshape(grouped) @ C[..., None]
    return y.reshape(x.shape), state


@lru_cache(maxsize=CHUNK)
def _interval_sums(n: int) -> mx.array:
    """Matrix [n, n * (n + 1)] that takes n values to their sums over all intervals.

    Read as [n, n + 1], column j of row i holds the sum from position j to i: 0 for j > i.
    """
    first, last, k = np.arange(n + 1)[None, :, None], np.arange(n)[:, None, None], np.arange(n)[None, None, :]
    inside = (first <= k) & (k <= last)  # [last, first, k]
    matrix = mx.array(inside.reshape(n * (n + 1), n).T.astype(np.float32))
    mx.eval(matrix)
    return matrix
