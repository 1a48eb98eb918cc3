"""engine/state/ring.py against the sliding-window contract of layer caches, and attention over it against all keys, masked.

The contract speaks of a ring whose slots go round. Ours run on and move, so that what an append returns is in the tokens' order
after single steps too, and no mask has to be turned; where a scenario is about slots it is about surviving tokens here.
"""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from engine.errors import Refused
from engine.layers.attention import attention
from engine.state import KVState, RingKVState, StateSnapshot
from engine.state.buffers import STEP
from suites.engine.memory import active_memory
from suites.engine.state_rows import TOKEN_BYTES, feed, filled, held, ids, lazily, up_to


def window_at(stop: int, window: int) -> list[int]:
    return up_to(stop, max(1, stop - window + 1))


# Appends: which tokens survive.


def test_rotating_concat_mid_rotation():
    state = RingKVState(4)
    for token in up_to(9):
        assert feed(state, [token]) == window_at(token, 4)
    assert feed(state, [10, 11]) == up_to(11, 7)


def test_rotating_concat_aligned_invariant():
    state = RingKVState(4)
    for token in up_to(8):  # the window ends where a buffer of 4 would
        feed(state, [token])
    assert feed(state, [9, 10]) == up_to(10, 6)


def test_rotating_concat_after_decode_grows_buffer():
    """Steps, then more tokens than the window holds, then steps: the buffer is as large as it has to be, and no longer."""
    state = RingKVState(8)
    for token in up_to(3):
        feed(state, [token])
    assert feed(state, up_to(23, 4)) == up_to(23)
    large = state.nbytes
    assert feed(state, [24]) == up_to(24, 17) and state.nbytes < large
    assert feed(state, [25, 26]) == up_to(26, 18)


def test_rotating_concat_after_live_rewind():
    state = RingKVState(8)
    feed(state, up_to(5))
    assert state.restore(None, 2)
    assert feed(state, [9, 10, 11]) == [1, 2, 9, 10, 11]


def test_rotating_concat_growing_buffer():
    """A window larger than the step of allocation: it grows by steps until it is full, and then no more."""
    state, sizes, window = RingKVState(2 * STEP + 100), [], 2 * STEP + 100
    start = 1
    while start < 6 * STEP:
        n = 37
        assert feed(state, up_to(start + n - 1, start)) == up_to(start + n - 1, max(1, start - window + 1))
        start += n
        sizes.append(state.nbytes)
    assert sizes == sorted(sizes) and sizes[-1] == (window + STEP) * TOKEN_BYTES and len(set(sizes)) == state.growths == 4


def test_rotating_concat_runner_chunked_prefill():
    state = RingKVState(4)
    assert feed(state, up_to(8)) == up_to(8)
    assert feed(state, up_to(16, 9)) == up_to(16, 6)
    assert feed(state, up_to(20, 17)) == up_to(20, 14)


def test_rotating_concat_multi_turn_chat():
    state, stop = RingKVState(4), 0
    for prompt, reply in ((6, 3), (1, 7), (9, 1)):
        assert feed(state, up_to(stop + prompt, stop + 1)) == up_to(stop + prompt, max(1, stop - 2))
        stop += prompt
        for _ in range(reply):
            stop += 1
            assert feed(state, [stop]) == window_at(stop, 4)


def test_rotating_concat_offset_tracking():
    state, seen = RingKVState(4), 0
    for n in (1, 3, 1, 9, 1, 1, 2, 5):
        feed(state, up_to(seen + n, seen + 1))
        seen += n
        assert state.length == seen and ids(state.view()) == window_at(seen, 4)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 300])
def test_any_pieces_give_the_tokens_that_a_window_needs(window: int):
    rng = np.random.default_rng(window)
    for _ in range(12):
        state, seen = RingKVState(window), 0
        while seen < 3 * window + 9:
            n, padding = int(rng.integers(1, window + 6)), int(rng.integers(0, 3))
            new = up_to(seen + n, seen + 1)
            assert feed(state, new, padding) == [*up_to(seen, max(1, seen - window + 2)), *new, *[-7] * padding]
            seen += n
            assert state.length == seen and ids(state.view()) == window_at(seen, window)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        RingKVState(0)


# Snapshots and restores.


@pytest.mark.parametrize("stop", [10, 5])
def test_rotating_kv_cache_restore_outside_window(stop: int):
    """Once the window has moved there is no way back but a snapshot, whatever the buffer still holds."""
    state = RingKVState(4)
    filled(state, stop)
    assert not state.restore(None, 3) and not state.can_rewind(1)
    with pytest.raises(Refused, match=f"cannot rewind 1 tokens of a state that holds {stop}"):
        state.rewind(1)
    assert state.restore(None, stop) and not state.restore(None, stop + 1)
    assert state.length == stop and ids(state.view()) == window_at(stop, 4)


@pytest.mark.parametrize("target", [0, 1, 3, 4])
def test_until_the_window_has_moved_it_rewinds_anywhere(target: int):
    state = RingKVState(4)
    filled(state, 4)
    assert state.restore(None, target) and feed(state, [70, 71]) == [*up_to(target)[-3:], 70, 71]


@pytest.mark.parametrize("stop", [2, 4, 5, 10])
def test_rotating_kv_cache_snapshot_preserves_window(stop: int):
    state = RingKVState(4)
    filled(state, stop)
    page = lazily(state.snapshot())
    assert (page.start, page.stop) == (max(0, stop - 4), stop)
    feed(state, up_to(stop + 20, stop + 1))
    assert held(page) == window_at(stop, 4) and page.nbytes == min(4, stop) * TOKEN_BYTES
    assert state.snapshot(stop + 20) is None and RingKVState(4).snapshot() is None


@pytest.mark.parametrize("stop", [2, 4, 5, 10])
def test_rotating_kv_cache_restore_from_snapshot(stop: int):
    """In a fresh state: the whole window is back, the length is that of the sequence, and the next write goes behind it."""
    state, other = RingKVState(4), RingKVState(4)
    for token in up_to(stop):
        feed(state, [token])
    page = state.snapshot()
    feed(other, up_to(7, 3))
    assert other.restore(page, stop) and other.length == stop and ids(other.view()) == window_at(stop, 4)
    assert feed(other, [80]) == [*window_at(stop, 3), 80] and feed(other, [81, 82]) == [*[*window_at(stop, 4), 80][-3:], 81, 82]
    assert held(page) == window_at(stop, 4), "the restored state wrote into the snapshot"


@pytest.mark.parametrize(
    ("stop", "target", "reached"), [(4, 2, True), (3, 0, True), (4, 5, False), (5, 4, False), (9, 9, True)]
)
def test_a_restore_before_the_end_of_a_snapshot_needs_a_window_that_has_not_moved(stop: int, target: int, reached: bool):
    state, other = RingKVState(4), RingKVState(4)
    filled(state, stop)
    filled(other, 2)
    assert other.restore(state.snapshot(), target) == reached
    assert ids(other.view()) == window_at(target, 4) if reached and target else other.length == (0 if reached else 2)
    assert not other.restore(state.snapshot(), -1)


@pytest.mark.parametrize("before", [pytest.param(1, id="not full"), pytest.param(4, id="full"), pytest.param(9, id="wrapped")])
@pytest.mark.parametrize("accepted", range(4))
def test_rotating_per_token_snapshot_restore(before: int, accepted: int):
    """Drafts of 3 tokens, captures at each: back at any accepted count, the window is the one that stood there."""
    state = RingKVState(4)
    for token in up_to(before):
        feed(state, [token])
    state.prepare_snapshots(up_to(before + 3, before))
    feed(state, up_to(before + 3, before + 1))
    captures = state.take_snapshots()
    assert [lazily(capture).stop for capture in captures] == up_to(before + 3, before)
    stop = before + accepted
    assert state.restore(captures[accepted], stop) and ids(state.view()) == window_at(stop, 4)
    assert feed(state, [90]) == [*window_at(stop, 3), 90]
    assert [held(capture) for capture in captures] == [window_at(before + i, 4) for i in range(4)]


def test_rotating_restore_lazy_own_snapshot_slices():
    """Back in the state that it names a lazy snapshot is a move; later writes copy it and its siblings out."""
    state = RingKVState(4)
    filled(state, 9)
    mine = lazily(state.snapshot())
    feed(state, [10, 11, 12])
    sibling = state.snapshot()
    assert state.restore(mine, 9) and mine.is_lazy and ids(state.view()) == window_at(9, 4)
    assert feed(state, up_to(60, 50)) == [*up_to(9, 7), *up_to(60, 50)]
    assert held(mine) == window_at(9, 4) and held(sibling) == window_at(12, 4)


def test_a_restore_of_an_own_lazy_snapshot_copies_nothing():
    state = RingKVState(1000)
    filled(state, 1500)
    mine = lazily(state.snapshot())
    feed(state, [1501])
    feed(state, [1502])
    mx.eval(state.arrays())
    gc.collect()
    before = active_memory()
    assert state.restore(mine, 1500) and mine.is_lazy and active_memory() == before
    assert ids(state.view()) == up_to(1500, 501)


def test_rotating_restore_hooked_snapshot_stays_lazy():
    state = RingKVState(4)
    filled(state, 3)
    reported: list[int] = []
    page = lazily(state.snapshot())
    page.set_materialize_hook(reported.append)
    assert state.restore(page, 3) and page.is_lazy and reported == []
    feed(state, up_to(20, 4))
    assert page.is_lazy and reported == [], "its tokens moved along, as a chunk of any length may still see them"
    feed(state, [21])
    assert reported == [3 * TOKEN_BYTES] and held(page) == [1, 2, 3]
    state.free()
    assert len(reported) == 1


@pytest.mark.parametrize("before", [2, 3, 4, 9])
def test_rotating_snapshot_single_token_write(before: int):
    state = RingKVState(4)
    for token in up_to(before):
        feed(state, [token])
    state.prepare_snapshots([before, before + 1])
    feed(state, [before + 1])
    feed(state, [before + 2])
    now, after = state.take_snapshots()
    assert held(now) == window_at(before, 4) and held(after) == window_at(before + 1, 4)


def test_rotating_snapshot_survives_later_chunk():
    state = RingKVState(4)
    state.prepare_snapshots([3, 6, 8])
    feed(state, up_to(8))
    feed(state, up_to(16, 9))
    for capture, stop in zip(state.take_snapshots(), (3, 6, 8), strict=True):
        other = RingKVState(4)
        assert other.restore(capture, stop) and ids(other.view()) == window_at(stop, 4)


def test_rotating_lazy_snapshot_size_zero_until_materialized():
    state = RingKVState(4)
    filled(state, 2)
    state.prepare_snapshots([5, 8])
    feed(state, up_to(8, 3))
    captures = [lazily(capture) for capture in state.take_snapshots()]
    state.free()
    assert [capture.nbytes for capture in captures] == [4 * TOKEN_BYTES] * 2
    assert [held(capture) for capture in captures] == [window_at(5, 4), window_at(8, 4)] and state.nbytes == 0


def test_of_two_windows_the_later_one_counts_and_none_can_be_cut():
    state = RingKVState(4)
    filled(state, 6)
    parent = lazily(state.snapshot())
    feed(state, [7])
    child = lazily(state.snapshot())
    assert state.merge(parent, child) is child and state.merge(None, child) is child and state.split(child, 6) == (None, child)
    assert state.merge(child, None) is None
    with pytest.raises(ValueError, match="closed before"):
        held(parent)


# Attention over the window.


def reference(history: np.ndarray, queries: np.ndarray, window: int) -> np.ndarray:
    """history [length, 3 HEADS d] of all keys and values, in the tokens' order; queries of the last tokens. float64."""
    keys, values = history[0], history[1]  # [heads, length, d]
    n, length = queries.shape[1], keys.shape[1]
    ages = np.arange(length - n, length)[:, None] - np.arange(length)
    scores = np.where((ages >= 0) & (ages < window), queries @ keys.swapaxes(1, 2) * 0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ values


def parity(pieces: list[int], window: int, *, width: int = 4, offsets: tuple[int, ...] = (), path: str = "window") -> None:
    """Feed random tokens in pieces; each query over what the ring returned equals it over all tokens, masked."""
    rng, total = np.random.default_rng(sum(pieces)), sum(pieces)
    q, k = rng.normal(size=(2, 2, total, 4))
    v = rng.normal(size=(2, total, width))
    state, start = RingKVState(window), 0
    if offsets:
        state.prepare_snapshots(offsets)
    for n in pieces:
        rows = slice(start, start + n)
        keys, values, queries = (mx.array(a[None, :, rows].astype(np.float32)) for a in (k, v, q))
        seen = state.append(keys, values)
        if path == "window":
            out = attention(queries, *seen, 0.5, window=window)
        else:  # an explicit mask in the tokens' order, as wide as what came back
            ages = np.arange(n)[:, None] + seen[0].shape[2] - n - np.arange(seen[0].shape[2])
            mask = mx.array(np.where((ages >= 0) & (ages < window), 0.0, -np.inf).astype(np.float32))
            out = mx.fast.scaled_dot_product_attention(queries, *seen, scale=0.5, mask=mask)
        expected = reference([k[:, : start + n], v[:, : start + n]], q[:, rows], window)  # type: ignore[arg-type]
        np.testing.assert_allclose(np.array(out)[0], expected, atol=2e-6)
        start += n
    if offsets:
        for capture, offset in zip(state.take_snapshots(), offsets, strict=True):
            assert capture is not None and capture.start == max(0, offset - window)
            assert np.array_equal(np.array(capture.arrays()[0])[0], k[:, capture.start : offset].astype(np.float32))


@pytest.mark.parametrize("path", ["none", "causal", "array"])
@pytest.mark.parametrize("window", [1, 4, 5, 7, 8, 9])
def test_rotating_kv_cache_decode_parity(window: int, path: str):
    """Single steps need no mask: what comes back is what the query may see. `causal` and `none` are that one path here."""
    parity([1] * 22, window, path="array" if path == "array" else "window")


@pytest.mark.parametrize("path", ["none", "causal", "relaxed"])
@pytest.mark.parametrize("pieces", [[7], [8], [9], [8, 8, 4], [3, 1, 9, 1, 1, 5], [1] * 9 + [2, 2]])
def test_rotating_kv_cache_prefill_parity(pieces: list[int], path: str):
    """There is one mask, the causal band; `relaxed` stands for one that the caller gives, in the tokens' order."""
    parity(pieces, 8, path="array" if path == "relaxed" else "window")
    parity(pieces, 4, path="array" if path == "relaxed" else "window")


@pytest.mark.parametrize("pieces", [[20], [8, 8, 4], [1] * 20, [9, 1, 1, 9]])
def test_rotating_kv_cache_scheduled_snapshot_parity(pieces: list[int]):
    parity(pieces, 4, offsets=(2, 4, 5, 9, 17, 20))


def test_rotating_kv_cache_mla_parity():
    """Keys and values of different width, as latent attention keeps them."""
    parity([5, 1, 1, 6, 1], 4, width=2)
    parity([5, 1, 1, 6, 1], 4, width=7)


@pytest.mark.parametrize("pieces", [[3], [4], [9], [1] * 9, [9, 1]])
def test_rotating_kv_cache_assistant_shared_history(pieces: list[int]):
    """A reader that adds no tokens of its own sees the last window, in order, and changes nothing."""
    state, stop = RingKVState(4), 0
    for n in pieces:
        feed(state, up_to(stop + n, stop + 1))
        stop += n
    for _ in range(2):
        assert ids(state.view()) == window_at(stop, 4)
    assert feed(state, [99]) == [*window_at(stop, 3), 99]


# Failed calls, memory.


@pytest.mark.parametrize("before", [0, 1, 3, 4, 9, 30])
@pytest.mark.parametrize("pieces", [[1], [1] * 9, [7], [9, 20, 1], [2, 2]])
def test_what_was_written_since_a_checkpoint_can_be_taken_back(before: int, pieces: list[int]):
    """A call that failed, however far it came: whole chunks that moved the window, or a few steps."""
    state, stop = RingKVState(4), before
    if before:
        filled(state, before)
    page = state.snapshot()
    state.prepare_snapshots([before, before + 1, before + 2])
    checkpoint = state.checkpoint()
    for n in pieces:
        feed(state, up_to(stop + n, stop + 1))
        stop += n
    state.rollback(checkpoint)
    assert state.length == before and (not before or ids(state.view()) == window_at(before, 4))
    assert feed(state, [70, 71]) == [*window_at(before, 3)[: before or 0], 70, 71]
    if before:
        assert held(page) == window_at(before, 4)
        expected = [*window_at(before, 4), 70, 71]
        assert [held(s) for s in state.take_snapshots()] == [expected[:-2][-4:], expected[:-1][-4:], expected[-4:]]


def test_single_steps_do_not_copy_the_buffer():
    """Nor does a checkpoint before each, except where the window moves to a new buffer."""
    state = RingKVState(4000)
    big = mx.zeros((1, 8, 4100, 64))
    state.append(big, big)
    del big
    token = mx.ones((1, 8, 1, 64))
    state.append(token, token)
    mx.eval(state.arrays(), token)
    mx.reset_peak_memory()
    before = active_memory()
    for _ in range(5):
        checkpoint: StateSnapshot = state.checkpoint()
        state.append(token, token)
        mx.eval(state.arrays())
        assert checkpoint.is_lazy
    assert mx.get_peak_memory() - before < state.nbytes / 4, "a step held two copies of a buffer"


@pytest.mark.parametrize("window", [4, 128, 300])
def test_bytes_are_flat_over_2000_steps(window: int):
    """Live bytes and bytes in use, a checkpoint before each step included."""
    state = RingKVState(window)
    filled(state, window + 50)
    filled_bytes, sizes, used = state.nbytes, set(), []
    for token in range(2000):
        checkpoint = state.checkpoint()
        feed(state, [token])
        mx.eval(state.arrays())
        sizes.add(state.nbytes)
        used.append(mx.get_active_memory())
    assert checkpoint.nbytes <= window * TOKEN_BYTES
    assert sizes <= {filled_bytes, (window + min(STEP, window)) * TOKEN_BYTES} and state.growths <= 2
    assert max(used[1000:]) <= max(used[:1000]) + TOKEN_BYTES


def test_a_window_is_a_fraction_of_what_all_keys_take():
    ring, kv = RingKVState(64), KVState()
    for state in (ring, kv):
        for start in range(0, 2000, 50):
            feed(state, up_to(start + 50, start + 1))
    assert ring.nbytes <= 128 * TOKEN_BYTES and kv.nbytes >= 2000 * TOKEN_BYTES
