"""engine/state/recurrent.py: exact offsets, boundary states inside a long forward, float32, compact copies."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from engine.errors import Refused
from engine.state import RecurrentState
from suites.engine.memory import active_memory

CONV, SSM = (3, 10), (4, 5, 6)  # kernel - 1, channels; heads, head_dim, state
STATE_BYTES = 4 * (3 * 10 + 4 * 5 * 6)


def made() -> RecurrentState:
    return RecurrentState(CONV, SSM)


def states(stop: float, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """What a recurrence holds after `stop` tokens: numbers that say so."""
    return mx.full((1, *CONV), stop, dtype), mx.full((1, *SSM), -stop, dtype)


def advance(state: RecurrentState, n: int, dtype: mx.Dtype = mx.float32) -> list[int]:
    """Put n tokens, cut where the state asks for it. Returns where that was."""
    splits = state.splits(n)
    pairs = [states(state.length + offset, dtype) for offset in [*splits, n]]
    state.put(n, [conv for conv, _ in pairs], [ssm for _, ssm in pairs])
    return splits


def at(state: RecurrentState) -> float:
    """After how many tokens the state is, by its numbers."""
    conv, ssm = state.get()
    stop = conv[0, 0, 0].item()
    expected = states(stop)
    assert mx.array_equal(conv, expected[0]).item() and mx.array_equal(ssm, expected[1]).item()
    return stop


def test_recurrent_cache_get_lazy_init():
    state = made()
    for _ in range(2):
        conv, ssm = state.get()
        assert conv.shape == (1, *CONV) and ssm.shape == (1, *SSM) and conv.dtype == ssm.dtype == mx.float32
        assert not conv.any().item() and not ssm.any().item()
        assert state.length == 0 and state.arrays() == [] and state.nbytes == 0 and state.snapshot() is None


def test_recurrent_cache_put_advances():
    state = made()
    for n, length in ((7, 7), (1, 8), (1, 9), (20, 29)):
        assert advance(state, n) == [] and state.length == length == at(state)
    assert state.nbytes == STATE_BYTES and len(state.arrays()) == 2 and state.growths == 1


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_state_is_float32_whatever_it_is_given(dtype: mx.Dtype):
    state = made()
    state.prepare_snapshots([2])
    advance(state, 5, dtype)
    (capture,) = state.take_snapshots()
    assert capture is not None
    assert {array.dtype for array in [*state.get(), *state.arrays(), *capture.arrays()]} == {mx.float32}


def test_small_steps_are_not_lost_over_2000_of_them():
    """A sum of 2,000 times 1e-3 on 1.0, which a state in half precision never leaves 1.0 by."""
    state = made()
    conv, ssm = states(1)
    state.put(1, [conv], [ssm])
    for _ in range(2000):
        conv, ssm = state.get()
        state.put(1, [conv + 1e-3], [ssm - 1e-3])
        mx.eval(state.arrays())
    np.testing.assert_allclose(np.array(state.get()[0]), 3.0, rtol=1e-4)


def test_recurrent_cache_padded_round_trip():
    """Padding advances nothing: the length is that of the tokens, and a restored state continues from there."""
    state, other = made(), made()
    advance(state, 5)  # of a forward of 8 rows, 3 of which are padding
    assert state.length == 5
    snapshot = state.snapshot()
    advance(state, 2)
    assert snapshot is not None and other.restore(snapshot, 5) and at(other) == other.length == 5
    advance(other, 1)
    assert at(other) == 6 and at(state) == 7


def test_recurrent_cache_restore_exact_offset():
    state = made()
    advance(state, 5)
    snapshot = state.snapshot()
    advance(state, 4)
    assert snapshot is not None
    for target in (-1, 0, 4, 6, 9):
        assert not state.restore(snapshot, target) and at(state) == state.length == 9
    for target in (-1, 0, 8, 10):
        assert not state.restore(None, target) and at(state) == state.length == 9
    assert state.restore(None, 9) and at(state) == 9
    assert state.restore(snapshot, 5) and at(state) == state.length == 5


@pytest.mark.parametrize("n", [-1, 1, 5, 6])
def test_a_recurrence_never_rewinds(n: int):
    state = made()
    advance(state, 5)
    assert state.can_rewind(0) and not state.can_rewind(n)
    with pytest.raises(Refused, match=f"cannot rewind {n} tokens of a state that holds 5"):
        state.rewind(n)
    state.rewind(0)
    assert at(state) == state.length == 5


def test_recurrent_snapshot_splits_and_segmented_capture():
    state = made()
    advance(state, 4)
    state.prepare_snapshots([4, 5, 6, 7, 8, 20])
    assert state.splits(4) == [1, 2, 3] and state.splits(1) == [] and state.splits(2) == [1]
    assert advance(state, 4) == [1, 2, 3]
    assert state.splits(4) == []
    captures = state.take_snapshots()
    assert captures[-1] is None, "never reached"
    for index in (2, 0, 4, 1, 3):
        capture = captures[index]
        assert capture is not None and not capture.is_lazy and capture.nbytes == STATE_BYTES
        assert state.restore(capture, 4 + index) and at(state) == state.length == 4 + index
    assert state.splits(100) == []


def test_captures_over_several_forwards_lie_where_they_were_scheduled():
    state = made()
    state.prepare_snapshots([0, 3, 5, 6, 11])
    assert [advance(state, n) for n in (3, 1, 1, 9)] == [[], [], [], [1, 6]]
    captures = state.take_snapshots()
    assert captures[0] is None, "there was no state yet"
    for offset, capture in zip((3, 5, 6, 11), captures[1:], strict=True):
        assert capture is not None and capture.stop == offset and capture.arrays()[0][0, 0, 0].item() == offset


def test_states_at_other_places_than_asked_for_are_an_error_and_change_nothing():
    state = made()
    state.prepare_snapshots([2])
    conv, ssm = states(4)
    for convs, ssms in (([conv], [ssm]), ([conv, conv], [ssm]), ([], []), ([conv] * 3, [ssm] * 3)):
        with pytest.raises(ValueError, match=r"due after \[2, 4\] tokens"):
            state.put(4, convs, ssms)
    for wrong in (mx.zeros((1, 4, 10)), mx.zeros(CONV), mx.zeros((2, *CONV))):
        with pytest.raises(ValueError, match="states must be"):
            state.put(4, [conv, wrong], [ssm, ssm])
    with pytest.raises(ValueError, match="states must be"):
        state.put(4, [conv, conv], [ssm, ssm[..., :5]])
    assert state.length == 0 and state.arrays() == []


def test_captures_that_were_not_taken_are_evaluated_with_the_state():
    state = made()
    state.prepare_snapshots([2, 3])
    advance(state, 5)
    assert len(state.arrays()) == 2 + 2 * 2 and state.nbytes == STATE_BYTES
    state.take_snapshots()
    assert len(state.arrays()) == 2


def test_a_snapshot_is_a_copy_that_others_may_go_on_from():
    state, other = made(), made()
    advance(state, 3)
    snapshot = state.snapshot()
    assert snapshot is not None
    for target in (state, other):
        assert target.restore(snapshot, 3)
        advance(target, 2)
        mx.eval(target.arrays())
    assert at(state) == at(other) == 5 and snapshot.arrays()[0][0, 0, 0].item() == 3
    state.free()
    assert state.length == 0 and state.nbytes == 0 and not state.get()[0].any().item()
    assert snapshot.nbytes == STATE_BYTES and state.restore(snapshot, 3) and at(state) == 3
    assert state.snapshot(3) is None


def test_of_two_snapshots_the_later_one_counts_and_none_can_be_cut():
    state = made()
    advance(state, 3)
    parent = state.snapshot()
    advance(state, 3)
    child = state.snapshot()
    assert parent is not None and child is not None
    assert state.merge(parent, child) is child and parent.nbytes == 0 and state.split(child, 4) == (None, child)
    assert state.merge(child, None) is None and child.nbytes == 0
    with pytest.raises(ValueError, match="closed before"):
        state.restore(child, 6)


@pytest.mark.parametrize("tokens", [[1], [8], [2, 2, 1]])
def test_what_was_put_since_a_checkpoint_can_be_taken_back(tokens: list[int]):
    state = made()
    state.prepare_snapshots([0, 4, 5])
    for before in (0, 4):
        checkpoint = state.checkpoint()
        for n in tokens:
            advance(state, n)
        state.rollback(checkpoint)
        assert state.length == before and at(state) == before
        if not before:
            advance(state, 4)
    advance(state, 1)
    zero, four, five = state.take_snapshots()
    assert zero is None and four is not None and five is not None
    assert (four.arrays()[0][0, 0, 0].item(), five.arrays()[0][0, 0, 0].item()) == (4, 5)


def test_slices_of_a_long_forward_are_copied_and_let_it_go():
    """The tail of a convolution is a slice of all inputs of the forward; kept as one, it would keep them all."""
    state = RecurrentState((3, 64), (2, 4, 8))
    state.prepare_snapshots([100, 3000])
    mx.synchronize()
    gc.collect()
    before = active_memory()
    inputs, scans = mx.random.normal((1, 4003, 64)), mx.random.normal((1, 2, 4, 8000))
    stops = [*state.splits(4000), 4000]
    state.put(4000, [inputs[:, stop : stop + 3] for stop in stops], [scans[..., stop : stop + 8] for stop in stops])
    mx.eval(state.arrays())
    del inputs, scans
    mx.synchronize()
    gc.collect()
    kept = state.nbytes + sum(capture.nbytes for capture in state.take_snapshots() if capture is not None)
    assert active_memory() - before <= kept + 2048


def test_a_snapshot_of_a_short_forward_keeps_nothing_else_of_it():
    """So little that mx.contiguous would not copy it."""
    state = RecurrentState((3, 64), (2, 4, 8))
    mx.synchronize()
    gc.collect()
    before = active_memory()
    state.prepare_snapshots([21, 40])
    inputs, scans = mx.random.normal((1, 43, 64)), mx.random.normal((41, 1, 2, 4, 8))
    stops = [*state.splits(40), 40]
    state.put(40, [inputs[:, stop : stop + 3] for stop in stops], [scans[stop] for stop in stops])
    mx.eval(state.arrays())
    captures = state.take_snapshots()
    snapshot = state.snapshot()
    state.free()
    del inputs, scans
    mx.synchronize()
    gc.collect()
    kept = sum(one.nbytes for one in (*captures, snapshot) if one is not None)
    assert kept == 3 * 4 * (3 * 64 + 2 * 4 * 8) and active_memory() - before <= kept + 1024


def test_bytes_are_flat_over_2000_steps():
    state = made()
    advance(state, 50)
    used = []
    for _ in range(2000):
        checkpoint = state.checkpoint()
        inputs = mx.concatenate([state.get()[0], mx.full((1, 1, CONV[1]), state.length + 1.0)], axis=1)
        state.put(1, [inputs[:, 1:]], [state.get()[1] * 0.5])
        mx.eval(state.arrays())
        assert state.nbytes == STATE_BYTES
        used.append(mx.get_active_memory())
    assert checkpoint[0] == state.length - 1 == 2049 and state.growths == 1
    assert max(used[1000:]) <= max(used[:1000]) + 1024
