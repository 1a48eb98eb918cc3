"""A tiny model with a state of every kind, and its logits computed by numpy in float64 over the whole history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine.layers.attention import attention
from engine.models.layouts import BothLayouts
from engine.state import KVState, RecurrentState, RingKVState, Span, State, TokenTail

VOCAB, HIDDEN, WINDOW, KERNEL, DECAY, NEIGHBOURS = 23, 8, 4, 3, 0.9, 2

_RNG = np.random.default_rng(0)
EMBEDDING = _RNG.normal(size=(VOCAB, HIDDEN))
QUERY, KEY, CONV_IN, OUT = _RNG.normal(size=(4, HIDDEN, HIDDEN)) / np.sqrt(HIDDEN)
KERNEL_WEIGHTS = _RNG.normal(size=(KERNEL, HIDDEN))


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, n)]


class Model(BothLayouts):
    """Slots: keys of all tokens (if `grows`), keys of a window, a recurrence behind a convolution, the tokens before."""

    vocab_size = VOCAB

    def __init__(self, grows: bool = True) -> None:
        self.grows = grows
        arrays = (EMBEDDING, QUERY, KEY, CONV_IN, OUT, KERNEL_WEIGHTS)
        self.embedding, self.query, self.key, self.conv_in, self.out, self.kernel = (
            mx.array(a.astype(np.float32)) for a in arrays
        )

    def make_slots(self) -> list[State]:
        growing: list[State] = [KVState()] if self.grows else []
        return [*growing, RingKVState(WINDOW), RecurrentState((KERNEL - 1, HIDDEN), (1, HIDDEN, HIDDEN)), TokenTail(NEIGHBOURS)]

    def forward(self, ids: mx.array, spans: Sequence[Span], rows: Sequence[int] | None) -> mx.array:
        spans = self.own(spans)
        x = self.embedding[ids]
        y = mx.concatenate([self.mixed(x[span.start : span.stop], ids[span.start : span.stop], span) for span in spans])
        return (y if rows is None else y[mx.array(list(rows), mx.int32)]) @ self.embedding.T

    def mixed(self, x: mx.array, ids: mx.array, span: Span) -> mx.array:
        *attended, recurrent, tail = span.slots
        q, k, v = ((x @ w)[None, None] for w in (self.query, self.key, self.out))
        total = self.scanned(x, recurrent, span.padding)
        for slot in attended:
            window = slot.window if isinstance(slot, RingKVState) else None
            total = total + attention(q, *slot.append(k, v, span.padding), 0.5, window=window).squeeze((0, 1))
        context = tail.append(ids, span.padding)
        known = (context >= 0)[:, None] * self.embedding[mx.maximum(context, 0)]
        return total + known[: x.shape[0]]  # the token NEIGHBOURS before each

    def scanned(self, x: mx.array, slot: RecurrentState, padding: int) -> mx.array:
        conv, state = slot.get()
        inputs = mx.concatenate([conv.squeeze(0), x @ self.conv_in])
        n = x.shape[0]
        mixed = sum((inputs[i : i + n] * self.kernel[i] for i in range(KERNEL)), mx.zeros((n, HIDDEN)))
        stops = [*slot.splits(n - padding), n - padding]
        outs, boundaries = [], {0: state}
        for t in range(n):
            state = DECAY * state + mx.outer(mixed[t], x[t])
            outs.append(state[0, 0] @ x[t])
            boundaries[t + 1] = state
        slot.put(n - padding, [inputs[None, stop : stop + KERNEL - 1] for stop in stops], [boundaries[stop] for stop in stops])
        return mx.stack(outs)


def expected_logits(ids: list[int], grows: bool = True) -> np.ndarray:
    """float64 [len(ids), VOCAB]."""
    x, T = EMBEDDING[ids], len(ids)
    q, k, v = x @ QUERY, x @ KEY, x @ OUT
    ages = np.arange(T)[:, None] - np.arange(T)
    total = np.zeros((T, HIDDEN))
    for window in [T] * grows + [WINDOW]:
        p = np.exp(np.where((ages >= 0) & (ages < window), q @ k.T * 0.5, -np.inf))
        total += p / p.sum(-1, keepdims=True) @ v
    inputs = np.concatenate([np.zeros((KERNEL - 1, HIDDEN)), x @ CONV_IN])
    state: Any = np.zeros((HIDDEN, HIDDEN))
    for t in range(T):
        mixed = sum(inputs[t + i] * KERNEL_WEIGHTS[i] for i in range(KERNEL))
        state = DECAY * state + np.outer(mixed, x[t])
        total[t] += state @ x[t]
        if t >= NEIGHBOURS:
            total[t] += x[t - NEIGHBOURS]
    return total @ EMBEDDING.T
