"""The engine over a model with every kind of state: growing, sliding window, recurrent, token tail."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.direct import decode
from engine.engine import Engine, SequenceId
from engine.errors import Refused, SequenceError
from engine.state import KVState, RecurrentState, RingKVState, SequenceStateLayout, Span, State, StateSnapshot, TokenTail
from suites.engine.memory import active_memory
from suites.engine.tiny_states import WINDOW, Model, expected_logits, tokens

ATOL = 2e-4


@pytest.fixture
def engine() -> Engine:
    return Engine(Model())


def goes_on(engine: Engine, sequence: SequenceId, history: list[int]) -> None:
    """The sequence holds the history: a chunk and steps after it are those of a recompute of all."""
    more = tokens(6, seed=99)
    assert engine.length(sequence) == len(history)
    expected = expected_logits(history + more)[len(history) :]
    rows = [engine.prefill(sequence, more[:4], all_logits=True), *(engine.step({sequence: token}) for token in more[4:])]
    np.testing.assert_allclose(np.array(mx.concatenate(rows)), expected, atol=ATOL)


def started(engine: Engine, history: list[int]) -> SequenceId:
    sequence = engine.open()
    if history:
        engine.prefill(sequence, history)
    return sequence


@pytest.mark.parametrize("layout", list(SequenceStateLayout), ids=str)
@pytest.mark.parametrize("chunk", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 7, 30])
def test_chunks_and_steps_are_one_piece(layout: SequenceStateLayout, chunk: int):
    engine, ids = Engine(Model(), layout=layout), tokens(30)
    sequence = engine.open()
    rows = [engine.prefill(sequence, ids[:20], chunk=chunk, all_logits=True), *(engine.step({sequence: t}) for t in ids[20:])]
    np.testing.assert_allclose(np.array(mx.concatenate(rows)), expected_logits(ids), atol=ATOL)


@pytest.mark.parametrize("pad_to", [6, 11, 32])
def test_padding_never_becomes_part_of_a_state(engine: Engine, pad_to: int):
    ids = tokens(11)
    sequence, plain = engine.open(), started(engine, ids)
    rows = engine.prefill(sequence, ids, pad_to=pad_to, all_logits=True)
    np.testing.assert_allclose(np.array(rows), expected_logits(ids), atol=ATOL)
    slots, expected = (engine._sequences[s].slots for s in (sequence, plain))
    for slot, other in zip(slots, expected, strict=True):
        assert slot.length == other.length == 11
        snapshot, wanted = slot.snapshot(), other.snapshot()
        assert snapshot is not None and wanted is not None
        for got, array in zip(snapshot.arrays(), wanted.arrays(), strict=True):
            np.testing.assert_allclose(np.array(got), np.array(array), atol=1e-5)
    goes_on(engine, sequence, ids)


def test_unequal_lanes_of_a_batch_are_their_solo_runs(engine: Engine):
    lanes = {started(engine, tokens(n, seed=n)): tokens(n, seed=n) for n in (1, 3, 4, 17, 33)}
    for round_ in range(7):
        row = {sequence: tokens(1, seed=100 + round_ + sequence)[0] for sequence in lanes}
        rows = np.array(engine.step(row))
        for index, (sequence, history) in enumerate(lanes.items()):
            history.append(row[sequence])
            np.testing.assert_allclose(rows[index], expected_logits(history)[-1], atol=ATOL)
    assert engine.counters["batched_rows"] == 7 * len(lanes)


@pytest.mark.parametrize("length", [3, WINDOW, WINDOW + 1, 20])
def test_a_rewind_that_a_state_refuses_leaves_all_as_they_were(engine: Engine, length: int):
    history = tokens(length)
    sequence = started(engine, history)
    before = [(slot.length, [np.array(array) for array in slot.arrays()]) for slot in engine._sequences[sequence].slots]
    with pytest.raises(Refused, match=r"(RingKV|Recurrent)State cannot rewind 2 tokens; restore a snapshot"):
        engine.rewind(sequence, 2)
    for slot, (held, arrays) in zip(engine._sequences[sequence].slots, before, strict=True):
        assert slot.length == held
        assert all(np.array_equal(np.array(a), b) for a, b in zip(slot.arrays(), arrays, strict=True))
    engine.rewind(sequence, 0)
    goes_on(engine, sequence, history)


class Failing:
    """A method of a state that fails at its n-th call: every state before it in the forward has its new tokens."""

    def __init__(self, at: int, original: Any) -> None:
        self.at, self.original, self.calls = at, original, 0

    def install(self, patch: pytest.MonkeyPatch, kind: type[State], name: str) -> None:
        failing = self

        def method(state: State, *arguments: Any) -> Any:
            failing.calls += 1
            if failing.calls == failing.at:
                raise MemoryError("no memory")
            return failing.original(state, *arguments)

        patch.setattr(kind, name, method)


KINDS: list[tuple[type[State], str]] = [
    (KVState, "append"),
    (RingKVState, "append"),
    (RecurrentState, "put"),
    (RecurrentState, "get"),
    (TokenTail, "append"),
]


@pytest.mark.parametrize(("kind", "name"), KINDS, ids=[f"{kind.__name__}.{name}" for kind, name in KINDS])
@pytest.mark.parametrize("length", [0, 2, WINDOW, 15])
def test_a_call_that_fails_in_any_state_leaves_all_sequences_as_they_were(
    engine: Engine, kind: type[State], name: str, length: int
):
    histories = [tokens(length, seed=1), tokens(9, seed=2)]
    one, two = (started(engine, history) for history in histories)
    calls = (
        (lambda: engine.step({one: 5, two: 6}), 2),
        (lambda: engine.prefill(one, tokens(30, seed=3), chunk=7), 4),
        (lambda: engine.prefill(one, tokens(30, seed=3)), 1),
        (lambda: engine.prefill(two, tokens(8, seed=3), chunk=1), 8),
        (lambda: engine.step_async(two, mx.array([3])), 1),
    )
    for call, at in calls:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
            Failing(at, getattr(kind, name)).install(patch, kind, name)
            call()
    for sequence, history in zip((one, two), histories, strict=True):
        goes_on(engine, sequence, history)


@pytest.mark.parametrize("length", [2, WINDOW, 15])
def test_an_error_while_results_are_evaluated_is_taken_back(engine: Engine, length: int, monkeypatch: pytest.MonkeyPatch):
    history = tokens(length)
    sequence = started(engine, history)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for call in (lambda: engine.step({sequence: 4}), lambda: engine.prefill(sequence, tokens(9), chunk=4)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine, "_evaluate", interrupted)
            call()
    goes_on(engine, sequence, history)


def test_an_abandoned_step_or_prefill_is_taken_back_and_no_more_than_that(engine: Engine):
    history = tokens(15)
    sequence = started(engine, history)
    for abandoned in (True, False):
        logits = engine.step_async(sequence, mx.array([3]))
        mx.async_eval(logits, engine.pending_arrays(sequence))
        if abandoned:
            engine.abandon(sequence, 15)
    goes_on(engine, sequence, [*history, 3])
    other = started(engine, history)
    engine.prefill(other, tokens(30, seed=8), chunk=4)
    engine.abandon(other, 15)
    goes_on(engine, other, history)
    engine.abandon(other, 15)  # six tokens and three calls ago
    with pytest.raises(SequenceError, match="lost"):
        engine.length(other)
    engine.close(other)


@pytest.mark.parametrize("length", [0, 1, 3, WINDOW, WINDOW + 1, 15])
def test_a_snapshot_goes_on_anywhere(engine: Engine, length: int):
    history = tokens(length)
    sequence = started(engine, history)
    taken = engine.snapshot(sequence)
    copy = engine.restore(taken)
    for one in (sequence, copy):
        goes_on(engine, one, history)
    engine.restore(taken, sequence)
    goes_on(engine, sequence, history)
    engine.close(sequence)
    other = started(engine, tokens(21, seed=5))
    engine.restore(taken, other)
    goes_on(engine, other, history)
    assert taken.length == length and (taken.nbytes > 0) == (length > 0)


def test_rounds_of_drafts_are_taken_back_by_a_snapshot_without_copies(engine: Engine):
    """What a rewind cannot do: back to the snapshot, forth by what was accepted."""
    history = tokens(40)
    sequence = started(engine, history)
    for accepted in (0, 2, 3):
        taken = engine.snapshot(sequence)
        engine.prefill(sequence, tokens(3, seed=accepted))
        assert [state is None or state.is_lazy for state in taken.states] == [True, True, False, True]
        engine.restore(taken, sequence)
        assert [state is None or state.is_lazy for state in taken.states] == [True, True, False, True]
        kept = tokens(3, seed=accepted)[:accepted]
        if kept:
            engine.prefill(sequence, kept)
        history += kept
    goes_on(engine, sequence, history)


def test_a_restore_that_fails_loses_the_sequence_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    sequence, other = started(engine, tokens(9)), started(engine, tokens(7))
    taken = engine.snapshot(other)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        Failing(1, RecurrentState._restore).install(patch, RecurrentState, "_restore")
        engine.restore(taken, sequence)
    with pytest.raises(SequenceError, match="lost"):
        engine.length(sequence)
    goes_on(engine, other, tokens(7))
    engine.restore(taken, sequence)
    goes_on(engine, sequence, tokens(7))


@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_states_captured_while_a_prompt_runs_restore_at_each_offset(engine: Engine, chunk: int):
    """Pages of all slots at the scheduled offsets, in a fresh sequence: the growing ones need those before them."""
    history, offsets = tokens(30), [1, 3, WINDOW, WINDOW + 1, 12, 13, 29]
    sequence = engine.open()
    slots = engine._sequences[sequence].slots
    for slot in slots:
        slot.prepare_snapshots(offsets)
    rows = engine.prefill(sequence, history, all_logits=True, chunk=chunk)
    np.testing.assert_allclose(np.array(rows), expected_logits(history), atol=ATOL)
    goes_on(engine, sequence, history)
    columns: list[list[StateSnapshot | None]] = [slot.take_snapshots() for slot in slots]
    engine.close(sequence)
    for index, offset in enumerate(offsets):
        fresh = engine.model.make_slots()
        for slot, column in zip(fresh, columns, strict=True):
            for capture, stop in zip(column[: index + 1], offsets, strict=False):
                assert slot.restore(capture, stop)
        got = engine.model.forward(mx.array(history[offset:]), [Span(0, 30 - offset, offset, fresh)], None)
        np.testing.assert_allclose(np.array(got), expected_logits(history)[offset:], atol=ATOL)


def test_a_failed_prompt_does_not_spoil_its_captures(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    history = tokens(20)
    sequence = engine.open()
    for slot in (slots := engine._sequences[sequence].slots):
        slot.prepare_snapshots([6, 11])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        Failing(3, TokenTail.append).install(patch, TokenTail, "append")
        engine.prefill(sequence, tokens(20, seed=9), chunk=4)
    engine.prefill(sequence, history, chunk=4)
    fresh = engine.model.make_slots()
    for slot, taken in zip(fresh, [slot.take_snapshots() for slot in slots], strict=True):
        assert slot.restore(taken[0], 6) and slot.restore(taken[1], 11)
    got = engine.model.forward(mx.array(history[11:]), [Span(0, 9, 11, fresh)], None)
    np.testing.assert_allclose(np.array(got), expected_logits(history)[11:], atol=ATOL)


def test_closing_a_sequence_frees_all_but_what_snapshots_keep(engine: Engine):
    kept = started(engine, tokens(9))
    gc.collect()
    mx.synchronize()
    before = active_memory()
    sequence = started(engine, tokens(900))
    taken = engine.snapshot(sequence)
    size = engine.nbytes(sequence)
    engine.close(sequence)
    gc.collect()
    mx.synchronize()
    assert 0 < taken.nbytes < size and active_memory() - before <= taken.nbytes + 4096
    goes_on(engine, engine.restore(taken), tokens(900))
    goes_on(engine, kept, tokens(9))


def test_state_bytes_of_windows_and_recurrences_are_flat_over_2000_steps():
    engine = Engine(Model(grows=False))
    engine.prefill(sequence := engine.open(), tokens(50))
    ids = tokens(2000, seed=4)

    def size() -> int:
        return sum(slot.nbytes for slot in engine._sequences[sequence].slots if not isinstance(slot, TokenTail))

    sizes, growths = set(), 0
    for index, token in enumerate(ids):
        engine.step({sequence: token})
        sizes.add(size())
        if index == 100:
            growths = engine.counters["cache_growths"]
    assert len(sizes) == 1 and engine.counters["cache_growths"] - growths == 8, "only the token tail grew: to 2304 ids"
    expected = expected_logits(tokens(50) + ids + [5], grows=False)[-1]
    np.testing.assert_allclose(np.array(engine.step({sequence: 5}))[0], expected, atol=1e-3)


def test_a_greedy_run_with_a_step_in_flight_is_the_recompute(engine: Engine):
    history = tokens(9)
    sequence = engine.open()
    first = engine.prefill(sequence, history)
    chosen, rows = decode(engine, sequence, first, 20)
    expected = expected_logits(history + chosen)
    assert chosen == [int(row.argmax()) for row in expected[8:-1]]
    np.testing.assert_allclose(np.array(rows), expected[9:], atol=ATOL)
