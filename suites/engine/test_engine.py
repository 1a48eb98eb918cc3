"""engine/engine.py: chunks, batches, rewinds, errors, layouts, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.engine import Engine, SequenceId, Snapshot
from engine.errors import Refused, RowsError, SequenceError
from engine.models import llama
from engine.state import KVState, SequenceStateLayout
from suites.engine.memory import active_memory
from suites.engine.tiny import expected_logits, model, tokens

VOCAB = 61


@pytest.fixture
def engine() -> Engine:
    return Engine(model())


@pytest.mark.parametrize("chunk", [1, 3, 7, 20, 100])
def test_prefill_in_chunks_gives_all_rows_or_the_last(engine: Engine, chunk: int):
    ids = tokens(20)
    expected = expected_logits(ids)
    every = engine.prefill(engine.open(), ids, all_logits=True, chunk=chunk)
    np.testing.assert_allclose(np.array(every), expected, atol=2e-4)
    assert engine.counters["prefill_chunks"] == -(-20 // chunk)
    last = engine.prefill(engine.open(), ids, chunk=chunk)
    assert last.shape == (1, VOCAB)
    np.testing.assert_allclose(np.array(last)[0], expected[-1], atol=2e-4)


def test_a_step_serves_sequences_of_different_lengths_in_one_forward_in_the_order_given(engine: Engine):
    histories = [tokens(n, seed=n) for n in (3, 17, 9)]
    ids = [engine.open() for _ in histories]
    for sequence, history in zip(ids, histories, strict=True):
        engine.prefill(sequence, history)
    order = [2, 0, 1]
    rows = np.array(engine.step({ids[i]: 5 + i for i in order}))
    for row, i in zip(rows, order, strict=True):
        np.testing.assert_allclose(row, expected_logits([*histories[i], 5 + i])[-1], atol=2e-4)
    assert engine.counters["decode_steps"] == 1 and engine.counters["batched_rows"] == 3
    assert [engine.length(s) for s in ids] == [4, 18, 10]


def test_a_rewind_forgets(engine: Engine):
    sequence = engine.open()
    engine.prefill(sequence, tokens(12))
    engine.rewind(sequence, 5)
    got = engine.prefill(sequence, [1, 2, 3])
    np.testing.assert_allclose(np.array(got)[0], expected_logits([*tokens(12)[:7], 1, 2, 3])[-1], atol=2e-4)
    assert engine.length(sequence) == 10
    assert engine.counters["rewinds"] == 1 and engine.counters["rewound_tokens"] == 5


def test_cache_growths_are_counted(engine: Engine):
    sequence = engine.open()
    engine.prefill(sequence, tokens(256))
    assert engine.counters["cache_growths"] == 3  # one per slot
    engine.step({sequence: 1})
    assert engine.counters["cache_growths"] == 6


def foreign_snapshot() -> Snapshot:
    other = Engine(model())
    return other.snapshot(other.open())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("empty", lambda e, s: e.prefill(s, [])),
        ("token -1 at index 1", lambda e, s: e.prefill(s, [1, -1])),
        ("token 61 at index 0", lambda e, s: e.prefill(s, [VOCAB])),
        ("token 18446744073709551615", lambda e, s: e.prefill(s, [2**64 - 1])),
        ("flat list of integers", lambda e, s: e.prefill(s, [2**70])),
        ("flat list of integers", lambda e, s: e.prefill(s, [1.5])),
        ("flat list of integers", lambda e, s: e.prefill(s, [[1]])),
        ("flat list of integers", lambda e, s: e.prefill(s, ["1"])),
        ("flat list of integers", lambda e, s: e.prefill(s, [[1], [1, 2]])),
        ("flat list of integers", lambda e, s: e.prefill(s, [True])),
        ("chunk must be at least 1", lambda e, s: e.prefill(s, [1], chunk=0)),
        ("pad_to must be 1 to", lambda e, s: e.prefill(s, [1], pad_to=0)),
        ("pad_to must be 1 to", lambda e, s: e.prefill(s, [1], pad_to=2049)),
        ("sequence 99 is not open", lambda e, s: e.snapshot(SequenceId(99))),
        ("sequence 99 is not open", lambda e, s: e.restore(e.snapshot(s), SequenceId(99))),
        ("another engine", lambda e, s: e.restore(foreign_snapshot(), s)),
        ("cannot rewind 5", lambda e, s: e.rewind(s, 5)),
        ("cannot rewind -1", lambda e, s: e.rewind(s, -1)),
        ("sequence 99 is not open", lambda e, s: e.prefill(SequenceId(99), [1])),
        ("sequence 99 is not open", lambda e, s: e.close(SequenceId(99))),
        ("nothing to step", lambda e, s: e.step({})),
    ],
)
def test_a_bad_call_is_a_clear_error_and_leaves_the_sequence_as_it_was(
    engine: Engine, name: str, call: Callable[[Engine, SequenceId], Any]
):
    sequence = engine.open()
    engine.prefill(sequence, [1, 2, 3, 4])
    with pytest.raises(SequenceError, match=name):
        call(engine, sequence)
    assert engine.length(sequence) == 4
    np.testing.assert_allclose(np.array(engine.step({sequence: 5}))[0], expected_logits([1, 2, 3, 4, 5])[-1], atol=2e-4)


def test_a_closed_sequence_is_gone(engine: Engine):
    sequence = engine.open()
    engine.close(sequence)
    for call in (lambda: engine.prefill(sequence, [1]), lambda: engine.length(sequence), lambda: engine.close(sequence)):
        with pytest.raises(SequenceError, match="not open"):
            call()
    assert engine.open() != sequence


def test_bad_rows_of_a_step_are_named_and_the_others_can_go_on(engine: Engine):
    good, bad, closed = engine.open(), engine.open(), engine.open()
    for sequence in (good, bad, closed):
        engine.prefill(sequence, [1, 2])
    engine.close(closed)
    rows = {good: 3, bad: VOCAB, closed: 3}
    with pytest.raises(RowsError) as caught:
        engine.step(rows)
    assert set(caught.value.rows) == {bad, closed}
    assert engine.length(good) == 2 and engine.length(bad) == 2
    engine.step({sequence: token for sequence, token in rows.items() if sequence not in caught.value.rows})
    assert engine.length(good) == 3


@pytest.mark.parametrize("failing_layer", [0, 2])
def test_an_error_inside_a_forward_takes_back_what_it_appended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, failing_layer: int
):
    one, two = engine.open(), engine.open()
    for sequence in (one, two):
        engine.prefill(sequence, [1, 2, 3])
    mlp = engine.model.layers[failing_layer].mlp

    class Failing:
        def __call__(self, x: mx.array) -> mx.array:
            raise MemoryError("no memory")

    monkeypatch.setattr(engine.model.layers[failing_layer], "mlp", Failing())
    with pytest.raises(MemoryError):
        engine.step({one: 4, two: 4})
    with pytest.raises(MemoryError):
        engine.prefill(one, [4, 4, 4], chunk=2)
    monkeypatch.setattr(engine.model.layers[failing_layer], "mlp", mlp)
    rows = np.array(engine.step({one: 5, two: 6}))
    np.testing.assert_allclose(rows[0], expected_logits([1, 2, 3, 5])[-1], atol=2e-4)
    np.testing.assert_allclose(rows[1], expected_logits([1, 2, 3, 6])[-1], atol=2e-4)


class Recurrent(KVState):
    """A state that cannot go back, like a recurrence."""

    def can_rewind(self, n: int) -> bool:
        return n == 0


class Mixed(llama.Model):
    def make_slots(self) -> list[Any]:
        return [KVState(), Recurrent(), KVState()]


def mixed() -> Mixed:
    plain = model()
    changed = Mixed.__new__(Mixed)
    changed.__dict__.update(plain.__dict__)
    return changed


def test_a_rewind_that_one_slot_refuses_changes_no_slot():
    engine = Engine(mixed())
    sequence = engine.open()
    engine.prefill(sequence, [1, 2, 3])
    with pytest.raises(Refused, match="Recurrent cannot rewind 1"):
        engine.rewind(sequence, 1)
    np.testing.assert_allclose(np.array(engine.step({sequence: 4}))[0], expected_logits([1, 2, 3, 4])[-1], atol=2e-4)


def test_an_error_takes_back_even_a_state_that_cannot_rewind(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(mixed())
    sequence = engine.open()
    engine.prefill(sequence, [1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.layers[2], "mlp", None)
        with pytest.raises(TypeError):
            engine.step({sequence: 4})
    np.testing.assert_allclose(np.array(engine.step({sequence: 4}))[0], expected_logits([1, 2, 3, 4])[-1], atol=2e-4)
    engine.step_async(sequence, mx.array([5]))
    engine.abandon(sequence, 4)
    np.testing.assert_allclose(np.array(engine.step({sequence: 6}))[0], expected_logits([1, 2, 3, 4, 6])[-1], atol=2e-4)
    engine.abandon(sequence, 4)  # a step whose logits were handed out is kept by nobody
    with pytest.raises(SequenceError, match="was lost"):
        engine.rewind(sequence, 0)


def test_a_sequence_whose_state_cannot_be_taken_back_after_an_error_is_lost_alone(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(mixed())
    sequence, other = engine.open(), engine.open()
    engine.prefill(sequence, [1, 2, 3])
    engine.prefill(other, [1, 2, 3])

    def fails(_: int) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.layers[2], "mlp", None)
        patch.setattr(engine._sequences[sequence].slots[1], "rollback", fails)
        with pytest.raises(MemoryError) as caught:
            engine.step({sequence: 4, other: 4})
        assert isinstance(caught.value.__context__, TypeError)
    with pytest.raises(RowsError, match="was lost in an earlier error"):
        engine.step({sequence: 4})
    engine.step({other: 4})
    engine.restore(engine.snapshot(other), sequence)  # what it lost does not matter to a restore
    expected = expected_logits([1, 2, 3, 4, 5])[-1]
    np.testing.assert_allclose(np.array(engine.step({sequence: 5}))[0], expected, atol=2e-4)
    engine.close(sequence)


def test_an_error_while_a_step_is_evaluated_leaves_the_sequences_as_they_were(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    sequence = engine.open()
    engine.prefill(sequence, [1, 2, 3])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "_evaluate", interrupted)
        engine.step({sequence: 4})
    assert engine.length(sequence) == 3
    np.testing.assert_allclose(np.array(engine.step({sequence: 5}))[0], expected_logits([1, 2, 3, 5])[-1], atol=2e-4)


@pytest.mark.parametrize("tokens_fed", [250, 255, 256, 257])
def test_padding_across_a_step_of_the_allocation_leaves_no_trace(engine: Engine, tokens_fed: int):
    ids = tokens(tokens_fed + 8)
    sequence = engine.open()
    engine.prefill(sequence, ids[:tokens_fed], pad_to=260)
    assert engine.length(sequence) == tokens_fed and engine.counters["padded_rows"] == 260 - tokens_fed
    rows = engine.prefill(sequence, ids[tokens_fed:], all_logits=True, chunk=3)
    np.testing.assert_allclose(np.array(rows), expected_logits(ids)[tokens_fed:], atol=2e-4)


@pytest.fixture
def owned() -> Engine:
    return Engine(model(), layout=SequenceStateLayout.MODEL_OWNED)


def test_a_model_that_owns_its_state_serves_one_sequence_after_another(owned: Engine):
    for ids in (tokens(9, 1), tokens(5, 2)):
        sequence = owned.open()
        with pytest.raises(Refused, match="one sequence at a time"):
            owned.open()
        owned.prefill(sequence, ids, chunk=4)
        np.testing.assert_allclose(np.array(owned.step({sequence: 7}))[0], expected_logits([*ids, 7])[-1], atol=2e-4)
        with pytest.raises(Refused, match="cannot rewind"):
            owned.rewind(sequence, 1)
        owned.close(sequence)
        assert owned.model.runtime_arrays() == []
    assert owned.max_batch == 1


def test_a_model_that_cannot_batch_is_stepped_row_by_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llama.Model, "supports_batching", False)
    engine = Engine(model())
    ids = [engine.open(), engine.open()]
    for sequence in ids:
        engine.prefill(sequence, [1, 2])
    rows = np.array(engine.step({ids[0]: 3, ids[1]: 4}))
    np.testing.assert_allclose(rows[1], expected_logits([1, 2, 4])[-1], atol=2e-4)
    assert engine.counters["decode_steps"] == 2 and engine.counters["batched_rows"] == 0
    assert engine.counters["batches_clamped"] == 1


def test_memory_is_flat_over_many_steps_and_returns_after_close():
    engine = Engine(model(num_hidden_layers=1))
    mx.eval(engine.step({engine.open(): 1}))
    start = active_memory()
    sequence = engine.open()
    engine.prefill(sequence, tokens(8))
    levels = []
    for step in range(600):
        engine.step({sequence: step % VOCAB})
        if step % 100 == 99:
            levels.append(mx.get_active_memory() - engine.nbytes(sequence))
    assert max(levels) - min(levels) < 4096, f"memory beside the cache moved: {levels}"
    engine.close(sequence)
    assert active_memory() - start < 4096
