"""engine/direct.py: one step in flight, and a sequence that always holds what was recorded."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.direct import DirectEngine, decode
from engine.engine import Engine
from engine.errors import SequenceError
from engine.sampling import Sampling
from suites.engine.memory import active_memory
from suites.engine.tiny import expected_logits, model, tokens

PROMPT = tokens(9)


@pytest.fixture
def direct() -> DirectEngine:
    return DirectEngine(model())


def greedy(ids: list[int], n: int) -> list[int]:
    ids = list(ids)
    for _ in range(n):
        ids.append(int(expected_logits(ids)[-1].argmax()))
    return ids[-n:]


def test_greedy_tokens_and_their_rows_equal_the_recompute(direct: DirectEngine):
    out = list(direct.generate(PROMPT, 12))
    ids = [token.id for token in out]
    assert ids == greedy(PROMPT, 12)
    expected = expected_logits([*PROMPT, *ids])[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(np.stack([np.array(token.logits) for token in out]), expected, atol=2e-4)


def test_the_next_forward_is_dispatched_before_a_token_is_read(direct: DirectEngine):
    generation = direct.generate(PROMPT, 5)
    assert direct.engine.counters["decode_steps"] == 0
    next(generation)
    assert direct.engine.counters["decode_steps"] == 1  # of the token that was just read


def test_an_abandoned_generation_leaves_the_sequence_with_what_was_recorded(direct: DirectEngine):
    generation = direct.generate(PROMPT, 50)
    ids = [next(generation).id for _ in range(4)]
    del generation
    again = direct.generate(PROMPT, 50)
    assert [next(again).id for _ in range(4)] == ids
    again.close()
    assert again.fed == [*PROMPT, *ids] and direct.engine.length(again.sequence) == len(again.fed)
    assert again.finish_reason is None and list(again) == []
    row = np.array(direct.engine.step({again.sequence: 3}))[0]
    np.testing.assert_allclose(row, expected_logits([*again.fed, 3])[-1], atol=2e-4)


def test_a_next_turn_continues_after_the_last(direct: DirectEngine):
    first = direct.generate(PROMPT, 3)
    ids = [token.id for token in first]
    second = direct.generate([7, 8], 4, after=first)
    assert [token.id for token in second] == greedy([*PROMPT, *ids, 7, 8], 4)
    assert second.fed[: len(PROMPT) + 3] == [*PROMPT, *ids]
    direct.generate([1], 0)
    with pytest.raises(SequenceError, match="not the open one"):
        direct.generate([1], 1, after=second)


def test_a_stop_token_ends_and_is_neither_yielded_nor_counted():
    expected = greedy(PROMPT, 12)
    stop = expected[5]
    direct = DirectEngine(model(), eos_token_ids=[stop])
    generation = direct.generate(PROMPT, 12)
    ids = [token.id for token in generation]
    assert ids == expected[: expected.index(stop)]
    assert generation.finish_reason == "stop" and generation.count == len(ids)
    assert direct.engine.length(generation.sequence) == len(generation.fed) == len(PROMPT) + len(ids) + 1


def test_a_stop_token_that_is_the_first_choice_ends_the_reply_before_it_began():
    (stop,) = greedy(PROMPT, 1)
    direct = DirectEngine(model(), eos_token_ids=[stop])
    generation = direct.generate(PROMPT, 12)
    assert list(generation) == []
    assert generation.finish_reason == "stop" and generation.count == 0
    assert generation.fed == [*PROMPT, stop] and direct.engine.length(generation.sequence) == len(generation.fed)


def test_the_budget_ends_with_length(direct: DirectEngine):
    generation = direct.generate(PROMPT, 2)
    assert len(list(generation)) == 2 and generation.finish_reason == "length"
    assert direct.generate(PROMPT, 0).finish_reason == "length"
    with pytest.raises(ValueError, match="max_tokens"):
        direct.generate(PROMPT, -1)


def test_a_bad_prompt_is_an_error_at_the_call(direct: DirectEngine):
    for prompt in ([], [61], [-1]):
        with pytest.raises(SequenceError):
            direct.generate(prompt, 1)


def test_an_interrupt_while_a_token_is_read_leaves_the_sequence_with_what_was_recorded(
    direct: DirectEngine, monkeypatch: pytest.MonkeyPatch
):
    generation = direct.generate(PROMPT, 5)
    ids = [next(generation).id]

    def interrupted(*arrays: mx.array) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(generation)
    assert generation.fed == [*PROMPT, *ids] and direct.engine.length(generation.sequence) == len(generation.fed)


def test_penalties_see_the_prompts_of_all_turns(direct: DirectEngine):
    sampling = Sampling(presence_penalty=100.0)  # more than any two logits differ by: a token that was not seen wins
    first = direct.generate(range(30), 0, sampling)
    second = direct.generate([token for token in range(30, 61) if token != 50], 1, sampling, after=first)
    assert [token.id for token in second] == [50]


def test_seeded_sampling_repeats_and_seeds_differ(direct: DirectEngine):
    def run(seed: int) -> list[int]:
        return [token.id for token in direct.generate(PROMPT, 12, Sampling(temperature=1.0, seed=seed))]

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in (1, 2, 3)}) == 3


def test_sequences_of_earlier_generations_are_released(direct: DirectEngine):
    list(direct.generate(PROMPT, 3))
    level = active_memory()
    for _ in range(5):
        list(direct.generate(PROMPT, 3))
    assert active_memory() - level < 4096
    assert direct.engine.counters["opened"] == 6 and direct.engine.counters["closed"] == 5


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=0, repeat_penalty=1.1)])
def test_memory_is_flat_over_many_tokens(sampling: Sampling):
    direct = DirectEngine(model(num_hidden_layers=1))
    generation = direct.generate(PROMPT, 600, sampling)
    levels = []
    for i, _ in enumerate(generation):
        if i >= 99 and i % 100 == 99:
            levels.append(mx.get_active_memory() - direct.engine.nbytes(generation.sequence))
    assert max(levels) - min(levels) < 16384, f"memory beside the cache moved: {levels}"


class Words:
    """A tokenizer whose tokens are letters; every third gives no text of its own until the next."""

    class Stream:
        held = ""

        def feed(self, token: int) -> str:
            text = self.held + chr(97 + token % 26)
            self.held = text if token % 3 == 0 else ""
            return "" if self.held else text

        def flush(self) -> str:
            text, self.held = self.held, ""
            return text

    def stream(self) -> Words.Stream:
        return self.Stream()


def test_text_comes_with_the_token_that_completes_it_and_the_tail_at_the_end():
    direct = DirectEngine(model(), tokenizer=Words())
    generation = direct.generate(PROMPT, 12)
    out = list(generation)
    assert "".join(token.text for token in out) + generation.tail() == "".join(chr(97 + token.id % 26) for token in out)


def test_decode_feeds_what_it_chooses():
    engine = Engine(model())
    sequence = engine.open()
    last = engine.prefill(sequence, PROMPT)
    ids, rows = decode(engine, sequence, last, 6)
    assert ids == greedy(PROMPT, 6)
    assert engine.length(sequence) == len(PROMPT) + 6
    np.testing.assert_allclose(np.array(rows), expected_logits([*PROMPT, *ids])[len(PROMPT) :], atol=2e-4)
