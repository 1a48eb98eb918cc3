"""Keys and values that say which token they are of, for tests of states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from engine.state import KVState, RingKVState, StateSnapshot

HEADS, K_DIM, V_DIM = 2, 4, 3
TOKEN_BYTES = HEADS * (K_DIM + V_DIM) * 4


class Appends(Protocol):
    length: int

    def append(self, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]: ...


def rows(ids: Iterable[float]) -> tuple[mx.array, mx.array]:
    """Keys whose numbers are id + 0.5 head, values whose numbers are -id."""
    column = np.array(list(ids), np.float32)[None, None, :, None]
    heads = np.arange(HEADS, dtype=np.float32)[None, :, None, None]
    keys, values = column + heads / 2 + np.zeros((1, 1, 1, K_DIM)), -column - heads / 2 + np.zeros((1, 1, 1, V_DIM))
    return mx.array(keys.astype(np.float32)), mx.array(values.astype(np.float32))


def ids(arrays: Sequence[mx.array]) -> list[int]:
    """Of which tokens these keys and values are; every number of them is looked at."""
    keys, values = (np.array(array) for array in arrays)
    found = keys[0, 0, :, 0]
    expected = rows(found)
    assert np.array_equal(keys, np.array(expected[0])) and np.array_equal(values, np.array(expected[1]))
    return found.astype(int).tolist()


def feed(state: Appends, tokens: Iterable[float], padding: int = 0) -> list[int]:
    """Append, and say which tokens came back."""
    return ids(state.append(*rows([*tokens, *[-7] * padding]), padding))


def up_to(stop: int, start: int = 1) -> list[int]:
    """start .. stop, both included."""
    return list(range(start, stop + 1))


def filled(state: KVState | RingKVState, stop: int) -> None:
    """Tokens 1 .. stop, evaluated."""
    feed(state, up_to(stop))
    mx.eval(state.arrays())


def held(snapshot: StateSnapshot | None) -> list[int]:
    """Tokens that a snapshot holds; it is lazy no more then."""
    assert snapshot is not None
    return ids(snapshot.arrays())


def lazily(snapshot: StateSnapshot | None) -> StateSnapshot:
    """The snapshot, which must be lazy."""
    assert snapshot is not None and snapshot.is_lazy and snapshot.nbytes == 0
    return snapshot
