"""Snapshots of engine/state/kv.py: lazy stretches of tokens, captures on the way, restores; the token tail pages like keys."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from engine.state import KVState, RecurrentState, RingKVState, State, StateSnapshot, TokenTail
from engine.state.snapshot import compact
from suites.engine.memory import active_memory
from suites.engine.state_rows import HEADS, TOKEN_BYTES, feed, filled, held, ids, lazily, rows, up_to


def test_kv_cache_snapshot_restore_need_base():
    state = KVState()
    filled(state, 10)
    page = state.snapshot(5)
    state.free()
    assert not state.restore(page, 10) and state.length == 0 and state.arrays() == []
    feed(state, up_to(5))
    assert state.restore(page, 10) and ids(state.view()) == up_to(10)


def test_kv_cache_data_survives_snapshot_restore():
    state, fresh = KVState(), KVState()
    filled(state, 10)
    assert fresh.restore(state.snapshot(), 10) and ids(fresh.view()) == up_to(10)
    first, second = state.snapshot(), state.snapshot(4)
    assert first is not None
    halves = KVState()
    upper, _ = state.split(first, 4)
    assert halves.restore(upper, 4) and ids(halves.view()) == up_to(4)
    assert halves.restore(second, 10) and ids(halves.view()) == up_to(10)
    assert feed(halves, [11]) == up_to(11), "a restored state goes on"


@pytest.mark.parametrize("target", [0, 3, 4, 7, 9, 10])
def test_a_restore_stops_at_its_target(target: int):
    state, other = KVState(), KVState()
    filled(state, 10)
    page = state.snapshot(4)
    filled(other, 6)
    assert other.restore(page, target) and other.length == target
    assert feed(other, [77]) == [*up_to(target), 77]


@pytest.mark.parametrize("target", [-1, 11])
def test_a_target_that_a_snapshot_does_not_reach_is_false_and_changes_nothing(target: int):
    state, other = KVState(), KVState()
    filled(state, 10)
    filled(other, 3)
    assert not other.restore(state.snapshot(), target) and not other.restore(None, target)
    assert ids(other.view()) == up_to(3)


def test_kv_cache_split_preserves_data():
    state = KVState()
    filled(state, 10)
    for is_lazy in (True, False):
        page = state.snapshot(2)
        assert page is not None
        if not is_lazy:
            page.materialize()
        upper, lower = state.split(page, 5)
        assert upper is not None and lower is not None and upper.is_lazy == lower.is_lazy == is_lazy
        assert (upper.start, upper.stop, lower.start, lower.stop) == (2, 5, 5, 10)
        assert held(upper) == up_to(5, 3) and held(lower) == up_to(10, 6)


@pytest.mark.parametrize(("at", "is_upper"), [(1, False), (2, False), (10, True), (12, True)])
def test_a_split_outside_a_snapshot_gives_it_back_whole(at: int, is_upper: bool):
    state = KVState()
    filled(state, 10)
    page = lazily(state.snapshot(2))
    assert state.split(page, at) == ((page, None) if is_upper else (None, page))
    assert page.is_lazy


def test_kv_cache_split_merge_round_trip_data():
    state = KVState()
    filled(state, 10)
    page = state.snapshot()
    assert page is not None
    page.materialize()
    merged = state.merge(*state.split(page, 4))
    assert held(merged) == up_to(10)
    other = KVState()
    assert other.restore(merged, 10) and ids(other.view()) == up_to(10)


def test_a_merge_with_nothing_is_nothing_and_one_of_stretches_that_do_not_join_an_error():
    state = KVState()
    filled(state, 10)
    page = state.snapshot(5)
    assert state.merge(None, page) is None and state.merge(None, None) is None
    with pytest.raises(ValueError, match="closed before"):
        held(page)
    first, last = state.snapshot(), state.snapshot(6)
    assert first is not None
    upper, _ = state.split(first, 5)
    with pytest.raises(ValueError, match="up to 5 with tokens from 6"):
        state.merge(upper, last)


def test_a_snapshot_of_one_state_merges_with_one_of_another():
    state, other = KVState(), KVState()
    filled(state, 6)
    filled(other, 9)
    assert held(other.merge(state.snapshot(), other.snapshot(6))) == up_to(9)


def test_kv_speculation_capture_allocates_nothing():
    """A round of drafts: captures at every draft, a rewind to what was accepted, all captures closed."""
    state = KVState()
    filled(state, 100)
    drafts = rows(up_to(104, 101))
    mx.eval(state.arrays(), drafts)
    before = active_memory()
    for accepted in (0, 2, 4):
        state.prepare_snapshots(up_to(104, 101))
        state.append(*drafts)
        mx.eval(state.arrays())
        captures = state.take_snapshots()
        assert [lazily(capture).stop for capture in captures] == up_to(104, 101)
        state.rewind(4 - accepted)
        for capture in captures:
            assert capture is not None
            capture.close()
        state.rewind(accepted)
    assert active_memory() - before < TOKEN_BYTES


def test_kv_lazy_snapshot_size_zero_until_materialized():
    state = KVState()
    filled(state, 10)
    reported: list[int] = []
    page = lazily(state.snapshot(4))
    page.set_materialize_hook(reported.append)
    assert reported == []
    for _ in range(2):
        page.materialize()
        assert reported == [page.nbytes] == [6 * TOKEN_BYTES]


def test_a_hook_that_was_taken_off_is_not_called():
    state = KVState()
    filled(state, 10)
    reported: list[int] = []
    page = lazily(state.snapshot())
    page.set_materialize_hook(reported.append)
    page.set_materialize_hook(None)
    page.materialize()
    closed = lazily(state.snapshot())
    closed.set_materialize_hook(reported.append)
    closed.close()
    state.free()
    assert reported == [] and closed.nbytes == 0


@pytest.mark.parametrize("padding", [0, 3])
def test_kv_lazy_snapshot_copied_out_on_overwrite(padding: int):
    state = KVState()
    filled(state, 10)
    page, before = lazily(state.snapshot(3)), lazily(state.snapshot())
    apart = lazily(state.split(lazily(state.snapshot()), 5)[0])
    state.rewind(4)
    feed(state, [20], padding)
    assert not page.is_lazy and not before.is_lazy and apart.is_lazy, "only what is overwritten is copied"
    assert held(page) == up_to(10, 4) and held(before) == up_to(10)
    assert ids(state.view()) == [*up_to(6), 20]


def test_a_second_append_after_a_rewind_copies_out_too():
    """What the first append left alone, the second may overwrite."""
    state = KVState()
    filled(state, 10)
    late = lazily(state.split(lazily(state.snapshot()), 8)[1])
    state.rewind(4)
    feed(state, [20, 21])
    assert late.is_lazy
    feed(state, [22])
    assert not late.is_lazy and held(late) == [9, 10]


def test_padding_overwrites_what_lies_behind_the_live_tokens():
    state = KVState()
    filled(state, 10)
    page = lazily(state.split(lazily(state.snapshot()), 8)[1])
    state.rewind(4)
    feed(state, [20], padding=2)
    assert not page.is_lazy and held(page) == [9, 10]


def test_a_growth_copies_out_what_it_leaves_behind():
    state = KVState()
    filled(state, 300)
    page = lazily(state.snapshot(290))
    state.rewind(250)
    feed(state, up_to(700, 101))
    assert held(page) == up_to(300, 291)


def test_kv_lazy_snapshot_copied_out_on_free():
    state = KVState()
    filled(state, 10)
    whole, page = lazily(state.snapshot()), lazily(state.snapshot(6))
    state.free()
    assert not whole.is_lazy and not page.is_lazy and state.length == 0 and state.nbytes == 0
    assert held(whole) == up_to(10) and held(page) == up_to(10, 7)


def test_kv_lazy_snapshot_split_merge_no_copy():
    state = KVState()
    filled(state, 1000)
    page = lazily(state.snapshot())
    before = active_memory()
    upper, lower = state.split(page, 400)
    middle, last = state.split(lazily(lower), 700)
    merged = lazily(state.merge(state.merge(upper, middle), last))
    assert active_memory() == before
    assert (merged.start, merged.stop) == (0, 1000) and held(merged) == up_to(1000)


def test_kv_lazy_snapshot_survives_path_switch():
    """Page out, go back to the common stretch, write another path: the old leaf is as it was, and so is the new one."""
    state = KVState()
    filled(state, 10)
    leaf = lazily(state.snapshot(6))
    assert state.restore(None, 6)
    feed(state, [21, 22, 23, 24, 25])
    other = lazily(state.snapshot(6))
    assert state.restore(None, 6) and state.restore(leaf, 10) and ids(state.view()) == up_to(10)
    assert held(other) == [21, 22, 23, 24, 25] and held(leaf) == up_to(10, 7)


def test_kv_restore_live_lazy_snapshot_is_offset_move():
    state = KVState()
    filled(state, 1000)
    page = lazily(state.snapshot(500))
    state.rewind(400)
    before = active_memory()
    assert state.restore(page, 900) and state.length == 900 and page.is_lazy
    assert state.restore(page, 1000) and page.is_lazy and active_memory() == before
    assert ids(state.view()) == up_to(1000)


@pytest.mark.parametrize("accepted", range(5))
def test_kv_cache_per_token_snapshot_restore(accepted: int):
    """Captures hold one token each; the live state rewinds to any number of accepted drafts and goes on."""
    state = KVState()
    filled(state, 6)
    state.prepare_snapshots([7, 8, 9, 10])
    feed(state, [7, 8, 9, 10])
    captures = [lazily(capture) for capture in state.take_snapshots()]
    assert [(capture.start, capture.stop) for capture in captures] == [(6, 7), (7, 8), (8, 9), (9, 10)]
    assert state.restore(None, 6 + accepted)
    assert feed(state, [50]) == [*up_to(6 + accepted), 50]
    assert [held(capture) for capture in captures] == [[7], [8], [9], [10]]


def test_kv_capture_merge_split():
    state = KVState()
    filled(state, 2)
    state.prepare_snapshots([5, 9])
    feed(state, up_to(9, 3))
    first, second = state.take_snapshots()
    merged = lazily(state.merge(first, second))
    assert (merged.start, merged.stop) == (2, 9)
    upper, lower = state.split(merged, 4)
    state.free()
    assert held(upper) == [3, 4] and held(lower) == up_to(9, 5)


@pytest.mark.parametrize("writes", [[2, 2], [4], [1, 1, 1, 1], [3, 1]])
def test_per_token_snapshot_persists_across_writes(writes: list[int]):
    """Offset 2, schedule 2, 3, 5: nothing at 2, then [2, 3) and [3, 5), wherever the writes end."""
    state, token = KVState(), 3
    filled(state, 2)
    state.prepare_snapshots([2, 3, 5])
    for n in writes:
        feed(state, up_to(token + n - 1, token))
        token += n
    none, first, second = state.take_snapshots()
    assert none is None
    assert [(s.start, s.stop) for s in (lazily(first), lazily(second))] == [(2, 3), (3, 5)]
    assert held(first) == [3] and held(second) == [4, 5]
    assert state.take_snapshots() == [], "the schedule has ended"


def test_an_offset_that_no_write_reached_is_none():
    state = KVState()
    state.prepare_snapshots([2, 4, 9])
    feed(state, up_to(4))
    captures = state.take_snapshots()
    assert [held(captures[0]), held(captures[1]), captures[2]] == [[1, 2], [3, 4], None]


def kinds() -> list[State]:
    recurrent = RecurrentState((1, 1), (1, 1, 1))
    recurrent.put(5, [mx.zeros((1, 1, 1))], [mx.zeros((1, 1, 1, 1))])
    kv, ring, tail = KVState(), RingKVState(4), TokenTail(2)
    for state in (kv, ring):
        feed(state, up_to(5))
    tail.append(mx.array(up_to(5)))
    return [kv, ring, tail, recurrent]


@pytest.mark.parametrize("state", kinds(), ids=lambda state: type(state).__name__)
def test_prepare_snapshots_past_offset_panics(state: State):
    for bad, said in (([4], "at offset 4: the state holds 5"), ([7, 6], "ascend"), ([6, 6], "ascend")):
        with pytest.raises(ValueError, match=said):
            state.prepare_snapshots(bad)
    state.prepare_snapshots([6])
    with pytest.raises(ValueError, match="scheduled already"):
        state.prepare_snapshots([7])
    assert state.take_snapshots() == [None]
    state.prepare_snapshots([5, 7])
    assert len(state.take_snapshots()) == 2


def test_what_was_captured_behind_a_rewind_is_captured_anew():
    state = KVState()
    filled(state, 2)
    state.prepare_snapshots([4, 6, 8])
    feed(state, up_to(7, 3))
    state.rewind(2)
    feed(state, [16, 17, 18])
    assert [held(capture) for capture in state.take_snapshots()] == [[3, 4], [5, 16], [17, 18]]


def test_an_offset_that_a_restore_jumped_over_has_no_capture_and_does_not_move_the_base():
    state, window, other = KVState(), RingKVState(2), RecurrentState((1, 1), (1, 1, 1))
    pages = []
    for one in (state, window):
        feed(one, up_to(7))
        pages.append(one.snapshot())
        one.free()
        feed(one, [1, 2])
    for n in (7, 2):
        other.put(n, [mx.full((1, 1, 1), n)], [mx.zeros((1, 1, 1, 1))])
        pages.append(other.snapshot())
        other.free()
    assert other.restore(pages.pop(), 2)
    for one, page in zip((state, window, other), pages, strict=True):
        one.prepare_snapshots([4, 7, 8])
        assert one.restore(page, 7)
    feed(state, [8])
    feed(window, [8])
    other.put(1, [mx.zeros((1, 1, 1))], [mx.zeros((1, 1, 1, 1))])
    columns = [one.take_snapshots() for one in (state, window, other)]
    assert all(column[0] is None and column[1] is not None and column[2] is not None for column in columns)
    assert [held(capture) for capture in columns[0][1:]] == [up_to(7, 3), [8]]
    assert [held(capture) for capture in columns[1][1:]] == [[6, 7], [7, 8]]
    assert [capture.stop for capture in columns[2][1:] if capture is not None] == [7, 8]


def test_a_schedule_ends_with_free_and_its_captures_are_not_copied_out():
    state = KVState()
    state.prepare_snapshots([2, 4])
    filled(state, 5)
    before = active_memory()
    state.free()
    assert active_memory() < before and state.take_snapshots() == []


def test_an_owned_snapshot_pins_no_larger_buffer():
    """Where mx.contiguous would alias: one head, a stretch that fills the buffer but for less than 16 KiB, all of it."""
    for stop, start in ((256, 0), (200, 0), (200, 190), (4000, 3999)):
        state = KVState()
        token = mx.ones((1, 1, stop, 4))
        state.append(token, token)
        mx.eval(state.arrays())
        page = lazily(state.snapshot(start))
        page.materialize()
        del token
        before, size = active_memory(), state.nbytes
        state.free()
        assert before - active_memory() >= size, f"{stop - start} of {stop} tokens keep the state's buffer alive"
        assert page.nbytes == (stop - start) * 2 * 4 * 4


@pytest.mark.parametrize("make", [KVState, lambda: RingKVState(256)])
@pytest.mark.parametrize("before", [0, 7])
def test_tokens_that_fill_a_buffer_are_copied_into_it(make, before: int):
    """As its first ones, or after a rewind to nothing: a slice of a larger array does not become the buffer."""
    state = make()
    if before:
        filled(state, before)
        state.rewind(before)
    start = active_memory()
    large = mx.random.normal((1, HEADS, 5000, 4))
    mx.eval(large)
    state.append(large[:, :, :256], large[:, :, :256, :3])
    mx.eval(state.arrays())
    del large
    assert active_memory() - start <= state.nbytes + 1024


def test_halves_of_a_split_snapshot_pin_not_the_whole():
    state = KVState()
    filled(state, 5000)
    page = state.snapshot()
    assert page is not None
    page.materialize()
    state.free()
    before = active_memory()
    upper, lower = state.split(page, 4990)
    assert upper is not None and lower is not None
    upper.close()
    del page, upper
    assert before - active_memory() > 4900 * TOKEN_BYTES and held(lower) == up_to(5000, 4991)


def test_a_lazy_snapshot_does_not_make_appends_copy():
    state = KVState()
    big = mx.zeros((1, 8, 4000, 64))
    state.append(big, big)
    state.append(big[:, :, :1], big[:, :, :1])
    del big
    token = mx.ones((1, 8, 1, 64))
    mx.eval(state.arrays(), token)
    pages = [lazily(state.snapshot(start)) for start in (0, 100, 3999)]
    before = active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        checkpoint = state.checkpoint()
        state.append(token, token)
        mx.eval(state.arrays())
    assert mx.get_peak_memory() - before < state.nbytes / 4 and checkpoint == 4003
    assert all(page.is_lazy for page in pages)


def test_a_snapshot_that_was_dropped_is_not_copied_out():
    state = KVState()
    filled(state, 1000)
    reported: list[int] = []
    page = state.snapshot()
    assert page is not None
    page.set_materialize_hook(reported.append)
    del page
    gc.collect()
    state.free()
    assert reported == []


@pytest.mark.parametrize("width", [0, 3])
def test_values_may_be_of_another_width_and_dtype(width: int):
    state, other = KVState(), KVState()
    keys, values = mx.ones((1, HEADS, 3, 4)), mx.ones((1, HEADS, 3, width), mx.bfloat16)
    state.append(keys, values)
    page = state.snapshot(1)
    state.rewind(1)
    state.append(keys, values)
    assert other.restore(state.split(StateSnapshot(0, 5, source=state), 1)[0], 1) and other.restore(page, 3)
    restored = other.view()
    assert [(array.dtype, array.shape[2:]) for array in restored] == [(mx.float32, (3, 4)), (mx.bfloat16, (3, width))]
    assert mx.array_equal(restored[0], keys).item() and mx.array_equal(restored[1], values).item()


def test_a_state_keeps_the_dtype_of_its_first_tokens():
    state, tail = KVState(), TokenTail(2)
    for n, dtype in ((200, mx.float16), (20, mx.float32), (100, mx.float32)):  # in the buffer, and into a larger one
        keys, values = state.append(mx.ones((1, HEADS, n, 4), dtype), mx.ones((1, HEADS, n, 3), dtype))
        tail.append(mx.zeros((n,), mx.int32 if dtype == mx.float16 else mx.uint32))
        assert keys.dtype == values.dtype == mx.float16
    assert [array.dtype for array in tail.arrays()] == [mx.int32] and tail.growths == state.growths == 2


def test_a_token_tail_pages_its_ids_out_like_keys():
    tail, other = TokenTail(2), TokenTail(2)
    tail.append(mx.array([1, 2, 3]))
    tail.prepare_snapshots([4, 6])
    tail.append(mx.array([4, 5, 6, 7]))
    first, second = tail.take_snapshots()
    base = lazily(tail.split(lazily(tail.snapshot()), 3)[0])
    assert not other.restore(first, 4), "the ids before it are missing"
    merged = lazily(tail.merge(first, second))
    tail.rewind(7)
    tail.append(mx.array([9, 9, 9, 9]))
    assert merged.nbytes == 3 * 4 and base.nbytes == 3 * 4
    assert other.restore(base, 3) and other.restore(merged, 6)
    assert other.append(mx.array([8])).tolist() == [5, 6, 8]


def test_a_compact_copy_of_anything_shares_nothing():
    whole = mx.arange(24000.0).reshape(1, 2, 3000, 4)
    mx.eval(whole)
    for view in (whole, whole[:, :, 1:2], whole[:, :1], whole[..., :0], whole.swapaxes(1, 2)):
        before = active_memory()
        copy = compact(view)
        mx.eval(copy)
        assert active_memory() - before >= copy.nbytes and mx.array_equal(copy, view).item()
        del copy
