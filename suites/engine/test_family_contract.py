"""What every family keeps to, in every layout that it is served in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import engine as engine_package
from engine.direct import DirectEngine
from engine.engine import Engine, SequenceId
from engine.errors import EngineError, Refused, RowsError, SequenceError
from engine.models import FAMILIES
from engine.models.model import Model
from engine.state import SequenceStateLayout, Span
from harness.cases.case import RECURRENT, RING, Case
from suites.engine.families import ATOL, CASES, LAYOUTS, full, loaded, ragged, tokens
from suites.engine.memory import active_memory

DENSE, MODEL_OWNED = SequenceStateLayout.DENSE, SequenceStateLayout.MODEL_OWNED
LANES = (1, 2, 3, 17, 33)
PACKAGE = str(Path(engine_package.__file__).parent)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(params=CASES, ids=[case.id for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def model(case: Case, directory: Path) -> Model:
    return loaded(case.id, directory)


@pytest.fixture(params=LAYOUTS, ids=str)
def engine(model: Model, request: pytest.FixtureRequest) -> Engine:
    return Engine(model, layout=request.param)


@pytest.fixture
def dense(model: Model) -> Engine:
    return Engine(model)


@pytest.fixture
def owned(model: Model) -> Engine:
    return Engine(model, layout=MODEL_OWNED)


def close_to(rows: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(rows), expected, rtol=0, atol=ATOL)


def goes_on(engine: Engine, sequence: SequenceId, history: list[int], case: Case) -> None:
    """The sequence holds the history: rows after further tokens are those of a full forward over all of it."""
    assert engine.length(sequence) == len(history)
    more = tokens(case, 6, "more")
    expected = full(engine.model, history + more)[len(history) :]
    close_to(engine.prefill(sequence, more[:4], all_logits=True), expected[:4])
    close_to(engine.step({sequence: more[4]}), expected[4:5])
    close_to(engine.step({sequence: more[5]}), expected[5:6])


def test_every_registered_family_has_cases() -> None:
    assert {FAMILIES[case.config["model_type"]] for case in CASES} == set(FAMILIES.values())


@pytest.mark.parametrize("chunk", [1, 3, 16, 40])
def test_chunks_are_one_piece(engine: Engine, case: Case, chunk: int) -> None:
    ids = tokens(case, 40)
    close_to(engine.prefill(engine.open(), ids, all_logits=True, chunk=chunk), full(engine.model, ids))


def test_steps_are_one_piece(engine: Engine, case: Case) -> None:
    ids = tokens(case, 40)
    expected, sequence = full(engine.model, ids), engine.open()
    for token, row in zip(ids, expected, strict=True):
        close_to(engine.step({sequence: token}), row[None])


def test_what_a_model_supports_follows_from_its_layout(engine: Engine) -> None:
    served, is_dense = engine.model, engine.layout is DENSE
    assert (served.supports_batching, served.supports_padded_prefill, served.supports_snapshot_reuse) == (is_dense,) * 3
    assert engine.max_batch == (None if is_dense else 1)


def test_slots_are_states_of_their_own_for_each_sequence(dense: Engine) -> None:
    first, second = dense.model.make_slots(), dense.model.make_slots()
    assert len({id(slot) for slot in [*first, *second]}) == 2 * len(first) > 0
    assert all(slot.length == 0 and slot.nbytes == 0 and slot.arrays() == [] for slot in first)


@pytest.mark.parametrize("handed", ["nothing", "None", "text", "states of another"])
def test_a_model_that_owns_its_state_ignores_what_it_is_handed(case: Case, model: Model, handed: str) -> None:
    ids, served = tokens(case, 20), model.in_layout(MODEL_OWNED)
    others = model.make_slots()
    slots: Any = {"nothing": [], "None": None, "text": ["garbage"] * 99, "states of another": others}[handed]
    expected = full(model, ids)
    for start, stop in ((0, 9), (9, 19), (19, 20)):
        rows = served.forward(mx.array(ids[start:stop]), [Span(0, stop - start, start, slots)], None)
        close_to(rows, expected[start:stop])
    assert all(slot.length == 0 for slot in others)


@pytest.mark.parametrize("reset", ["reset_runtime_state", "make_caches"])
def test_a_reset_leaves_nothing(case: Case, model: Model, reset: str) -> None:
    served = model.in_layout(MODEL_OWNED)
    for name in ("a", "b"):
        ids = tokens(case, 20, name)
        close_to(served.forward(mx.array(ids), [Span(0, 20, 0, [])], None), full(model, ids))
        assert served.runtime_arrays()
        getattr(served, reset)()
        assert served.runtime_arrays() == []


def test_engines_on_one_model_do_not_meet(case: Case, model: Model) -> None:
    engines = [Engine(model, layout=layout) for layout in (MODEL_OWNED, DENSE, MODEL_OWNED)]
    histories = [tokens(case, 9 + i, "abc"[i]) for i in range(3)]
    sequences = [engine.open() for engine in engines]
    for engine, sequence, history in zip(engines, sequences, histories, strict=True):
        engine.prefill(sequence, history)
    for engine, sequence, history in zip(engines, sequences, histories, strict=True):
        goes_on(engine, sequence, history, case)


def test_what_a_layout_lacks_is_refused_and_changes_nothing(owned: Engine, dense: Engine, case: Case) -> None:
    history, sequence = tokens(case, 9), owned.open()
    owned.prefill(sequence, history)
    other = dense.open()
    dense.prefill(other, history)
    taken = dense.snapshot(other)
    for call in (
        lambda: owned.open(),
        lambda: owned.rewind(sequence, 1),
        lambda: owned.prefill(sequence, [1, 2], pad_to=8),
        lambda: owned.snapshot(sequence),
        lambda: owned.restore(taken),
        lambda: owned.restore(taken, sequence),
    ):
        with pytest.raises(Refused):
            call()
    assert owned.counters["reuse_declined"] == 3
    goes_on(owned, sequence, history, case)


def test_lanes_of_ragged_lengths_are_each_lane_alone(dense: Engine, case: Case) -> None:
    lanes = [tokens(case, length, f"lane{length}") for length in LANES]
    states = [dense.model.make_slots() for _ in lanes]
    rows = ragged(dense, lanes, states)
    close_to(rows, np.concatenate([full(dense.model, lane) for lane in lanes]))


def test_batched_steps_are_each_lane_alone(dense: Engine, case: Case) -> None:
    lanes = [tokens(case, length, f"lane{length}") for length in LANES]
    sequences = [dense.open() for _ in lanes]
    for sequence, lane in zip(sequences, lanes, strict=True):
        dense.prefill(sequence, lane)
    following = [tokens(case, 4, f"next{length}") for length in LANES]
    alone = [full(dense.model, lane + more)[len(lane) :] for lane, more in zip(lanes, following, strict=True)]
    for step in range(4):
        rows = dense.step({sequence: more[step] for sequence, more in zip(sequences, following, strict=True)})
        close_to(rows, np.stack([rows[step] for rows in alone]))
    assert dense.counters["decode_steps"] == 4 and dense.counters["batched_rows"] == 4 * len(LANES)


def test_a_batch_of_one_is_the_single_path(engine: Engine, case: Case) -> None:
    ids, found = tokens(case, 12), []
    for single in (False, True):
        sequence = engine.open()
        engine.prefill(sequence, ids[:11])
        if single:
            found.append(engine.step_async(sequence, mx.array(ids[11:])))
        else:
            found.append(engine.step({sequence: ids[11]}))
        engine.close(sequence)
    assert mx.array_equal(found[0], found[1]).item()
    assert engine.counters["batched_rows"] == 0


def test_padding_is_computed_and_never_kept(dense: Engine, case: Case) -> None:
    history = tokens(case, 21)
    expected = full(dense.model, history)
    for pad_to in (21, 22, 64, 8):
        sequence = dense.open()
        before = dense.counters["padded_rows"]
        close_to(dense.prefill(sequence, history, all_logits=True, pad_to=pad_to), expected)
        assert dense.counters["padded_rows"] - before == -len(history) % pad_to
        goes_on(dense, sequence, history, case)


@pytest.mark.parametrize("length", [0, 1, 17])
def test_a_snapshot_outlives_what_it_was_taken_of(dense: Engine, case: Case, length: int) -> None:
    history, sequence = tokens(case, length), dense.open()
    if history:
        dense.prefill(sequence, history)
    taken = dense.snapshot(sequence)
    copy = dense.restore(taken)
    goes_on(dense, sequence, history, case)
    goes_on(dense, copy, history, case)
    dense.close(sequence)
    dense.close(copy)
    goes_on(dense, dense.restore(taken), history, case)
    assert taken.length == length and (taken.nbytes > 0) == (length > 0)


@pytest.mark.parametrize("length", [6, 20])  # within the cases' windows, and beyond
def test_a_rewind_forgets_or_is_refused_and_changes_nothing(dense: Engine, case: Case, length: int) -> None:
    history, sequence = tokens(case, length), dense.open()
    dense.prefill(sequence, history)
    if RECURRENT in case.traits or (RING in case.traits and length > case.text["sliding_window"]):
        with pytest.raises(Refused, match="cannot rewind 4"):
            dense.rewind(sequence, 4)
    else:
        dense.rewind(sequence, 4)
        history = history[:-4]
    goes_on(dense, sequence, history, case)


def test_a_release_frees_memory_and_touches_nothing_in_flight(dense: Engine, case: Case) -> None:
    history, kept = tokens(case, 9), dense.open()
    dense.prefill(kept, history)
    dense.prefill(first := dense.open(), tokens(case, 33, "b"))  # tables that are made at first use belong to no sequence
    dense.close(first)
    mx.synchronize()
    before = active_memory()
    released = dense.open()
    dense.prefill(released, tokens(case, 33, "b"))
    size = dense.nbytes(released)
    assert size > 0 and active_memory() >= before + size
    dense.close(released)
    assert active_memory() <= before + 4096
    goes_on(dense, kept, history, case)


def test_a_release_frees_what_the_model_owned(owned: Engine, case: Case) -> None:
    owned.prefill(sequence := owned.open(), tokens(case, 33))  # tables that are made at first use belong to no sequence
    owned.close(sequence)
    before = active_memory()
    sequence = owned.open()
    owned.prefill(sequence, tokens(case, 33))
    size = sum(array.nbytes for array in owned.model.runtime_arrays())
    assert size > 0 and active_memory() >= before + size
    owned.close(sequence)
    assert owned.model.runtime_arrays() == [] and active_memory() <= before + 4096


class Interrupt(Exception):
    pass


class Watch:
    """In place of a model's `forward`: counts calls of the engine's functions in it, raises Interrupt at number `at`."""

    def __init__(self, model: Model, at: int | None = None) -> None:
        self.forward, self.at, self.calls = model.forward, at, 0

    def __call__(self, *arguments: Any) -> mx.array:
        sys.setprofile(self.watch)
        try:
            return self.forward(*arguments)
        finally:
            sys.setprofile(None)

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls += 1
            if self.calls == self.at:
                raise Interrupt


def calls_of(model: Model, call: Callable[[], object]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(model)
        patch.setattr(model, "forward", watch)
        call()
    assert watch.calls > 10
    return watch.calls


def interrupt(model: Model, at: int, call: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupt):
        patch.setattr(model, "forward", Watch(model, at))
        call()


def points(calls: int) -> list[int]:
    """All over a forward: the first call, some between, the last."""
    return sorted({1, *(int(calls * part) for part in (0.3, 0.6, 0.9)), calls})


def test_an_error_at_any_point_of_a_forward_leaves_dense_sequences_as_they_were(dense: Engine, case: Case) -> None:
    histories = [tokens(case, 7, "a"), tokens(case, 12, "b")]
    sequences = [dense.open() for _ in histories]
    for sequence, history in zip(sequences, histories, strict=True):
        dense.prefill(sequence, history)
    taken = [dense.snapshot(sequence) for sequence in sequences]

    def prefill() -> None:
        dense.prefill(sequences[0], [5, 6])

    def step() -> None:
        dense.step(dict.fromkeys(sequences, 5))

    def restore() -> None:  # calls repeat exactly on a restored state only: buffers are new ones then
        for sequence, snapshot in zip(sequences, taken, strict=True):
            dense.restore(snapshot, sequence)

    for call in (prefill, step):
        call()  # what a first forward makes (copies of the snapshots' pages) is no part of the others
        restore()
        calls = calls_of(dense.model, call)
        for at in points(calls):
            restore()
            interrupt(dense.model, at, call)
            for sequence, history in zip(sequences, histories, strict=True):
                goes_on(dense, sequence, history, case)


def test_an_error_in_a_later_chunk_takes_the_earlier_ones_back(dense: Engine, case: Case) -> None:
    history, sequence, ran = tokens(case, 9), dense.open(), []
    dense.prefill(sequence, history)
    forward = dense.model.forward

    def second_fails(*arguments: Any) -> mx.array:
        ran.append(arguments)
        if len(ran) == 2:
            raise Interrupt
        return forward(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupt):
        patch.setattr(dense.model, "forward", second_fails)
        dense.prefill(sequence, tokens(case, 10, "b"), chunk=4)
    goes_on(dense, sequence, history, case)


def test_an_error_in_a_model_that_owns_its_state_loses_the_request_and_nothing_of_it_stays(owned: Engine, case: Case) -> None:
    sequence = owned.open()
    owned.prefill(sequence, tokens(case, 7))
    calls = calls_of(owned.model, lambda: owned.step({sequence: 5}))
    for at in points(calls):
        owned.close(sequence)
        sequence = owned.open()
        owned.prefill(sequence, tokens(case, 7))
        interrupt(owned.model, at, lambda lost=sequence: owned.step({lost: 5}))  # type: ignore[misc]
        assert owned.model.runtime_arrays() == []
        with pytest.raises(SequenceError, match="lost"):
            owned.prefill(sequence, [5])
        with pytest.raises(RowsError, match="lost"):
            owned.step({sequence: 5})
    owned.close(sequence)
    goes_on(owned, owned.open(), [], case)


def test_an_aborted_generation_leaves_nothing_that_the_next_one_reads(case: Case, model: Model, engine: Engine) -> None:
    prompt, other = tokens(case, 11), tokens(case, 14, "b")
    expected = [token.id for token in DirectEngine(model).generate(prompt, 6)]
    direct = DirectEngine(model, layout=engine.layout)
    abandoned = direct.generate(other, 50)
    assert [token.id for token in direct.generate(prompt, 6)] == expected
    with pytest.raises(SequenceError, match="not open"):
        next(abandoned)
    next(direct.generate(other, 50))  # dropped after one token, with a step in flight
    assert [token.id for token in direct.generate(prompt, 6)] == expected
    failing = direct.generate(other, 50)
    for _ in range(2):
        next(failing)
    interrupt(direct.engine.model, 10, lambda: next(failing))
    assert [token.id for token in direct.generate(prompt, 6)] == expected
    interrupt(direct.engine.model, 10, lambda: direct.generate(other, 5))
    assert direct.engine.counters["opened"] == direct.engine.counters["closed"], "a failed request is released"
    assert [token.id for token in direct.generate(prompt, 6)] == expected


def test_an_interrupt_while_a_token_is_chosen_leaves_the_conversation_right_or_lost(
    case: Case, model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = DirectEngine(model, layout=engine.layout)
    generation = direct.generate(tokens(case, 5), 50)
    next(generation)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generation.sampler, "choose", lambda logits: (_ for _ in ()).throw(KeyboardInterrupt()))
        next(generation)
    if engine.layout is DENSE:
        goes_on(direct.engine, generation.sequence, generation.fed, case)
    else:
        assert direct.engine.model.runtime_arrays() == []
        with pytest.raises(EngineError, match="lost"):
            direct.generate([5], 1, after=generation)
