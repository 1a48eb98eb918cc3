"""engine/state/kv.py against a plain list of tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.errors import Refused
from engine.state import KVState
from engine.state.kv import STEP
from suites.engine.memory import active_memory

HEADS, K_DIM, V_DIM = 2, 4, 3


def some(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(1, HEADS, n, K_DIM)).astype(np.float32), rng.normal(size=(1, HEADS, n, V_DIM)).astype(np.float32)


def check(got: tuple[mx.array, mx.array], keys: np.ndarray, values: np.ndarray) -> None:
    assert np.array_equal(np.array(got[0]), keys) and np.array_equal(np.array(got[1]), values)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [STEP - 1, 1, 1], [STEP, 1], [STEP + 1, STEP], [3, 2 * STEP, 5], [1] * 9])
def test_append_returns_all_that_was_appended(sizes: list[int]):
    state = KVState()
    keys, values = some(0, 0)
    for seed, n in enumerate(sizes):
        k, v = some(n, seed)
        keys, values = np.concatenate([keys, k], 2), np.concatenate([values, v], 2)
        check(state.append(mx.array(k), mx.array(v)), keys, values)
        assert state.length == keys.shape[2]


def test_buffers_grow_in_steps_and_a_growth_cuts_off_stale_slots():
    state = KVState()
    assert state.arrays() == [] and state.nbytes == 0
    token = [mx.array(a) for a in some(1, 0)]
    for _ in range(STEP):
        state.append(*token)
    assert state.growths == 1 and state.arrays()[0].shape[2] == STEP
    state.append(*token)
    assert state.growths == 2 and state.arrays()[0].shape[2] == 2 * STEP
    state.rewind(STEP)  # 1 live token in 512 slots
    state.append(*[mx.array(a) for a in some(2 * STEP, 1)])
    assert state.growths == 3 and state.arrays()[0].shape[2] == 1 + 2 * STEP
    assert state.nbytes == (1 + 2 * STEP) * HEADS * (K_DIM + V_DIM) * 4


@pytest.mark.parametrize("n", [1, 5, 300])
def test_rewind_then_append_equals_never_having_seen_the_dropped_tokens(n: int):
    state = KVState()
    k, v = some(300, 0)
    state.append(mx.array(k), mx.array(v))
    state.rewind(n)
    k2, v2 = some(7, 1)
    kept = 300 - n
    check(
        state.append(mx.array(k2), mx.array(v2)),
        np.concatenate([k[:, :, :kept], k2], 2),
        np.concatenate([v[:, :, :kept], v2], 2),
    )


@pytest.mark.parametrize("n", [-1, 4])
def test_a_rewind_out_of_bounds_is_refused_and_changes_nothing(n: int):
    state = KVState()
    state.append(*[mx.array(a) for a in some(3, 0)])
    assert not state.can_rewind(n)
    with pytest.raises(Refused):
        state.rewind(n)
    assert state.length == 3


def test_a_snapshot_survives_rewinds_and_overwrites_and_restores_elsewhere():
    state = KVState()
    k, v = some(5, 0)
    state.append(mx.array(k), mx.array(v))
    snapshot = state.snapshot()
    assert snapshot is not None and snapshot.stop == 5
    state.rewind(5)
    state.append(*[mx.array(a) for a in some(9, 1)])
    other = KVState()
    for target in (other, state):
        assert target.restore(snapshot, 5)
        k2, v2 = some(1, 2)
        check(target.append(mx.array(k2), mx.array(v2)), np.concatenate([k, k2], 2), np.concatenate([v, v2], 2))
    assert snapshot.nbytes == 5 * HEADS * (K_DIM + V_DIM) * 4


def test_a_snapshot_of_nothing_is_none_and_a_freed_state_holds_nothing():
    state = KVState()
    assert state.snapshot() is None
    state.append(*[mx.array(a) for a in some(3, 0)])
    assert state.snapshot(3) is None
    state.free()
    assert state.length == 0 and state.nbytes == 0


def test_appending_one_token_does_not_copy_the_buffer():
    state = KVState()
    big = mx.zeros((1, 8, 4000, 64))
    state.append(big, big)
    del big
    token = mx.ones((1, 8, 1, 64))
    mx.eval(state.arrays(), token)
    mx.reset_peak_memory()
    before = active_memory()
    for _ in range(3):
        state.append(token, token)
        mx.eval(state.arrays())
    assert mx.get_peak_memory() - before < state.nbytes / 4, "an append held two copies of a buffer"
