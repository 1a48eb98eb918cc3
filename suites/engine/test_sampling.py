"""engine/sampling.py: exact kept sets, order of the filters, penalties, seeds."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.sampling import Sampler, Sampling, candidates, penalised

PROBS = np.array([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = mx.array(np.log(PROBS).astype(np.float32))


def kept(**options: Any) -> dict[int, float]:
    ids, logprobs = candidates(LOGITS, Sampling(**{"temperature": 1.0} | options))
    probs = np.exp(np.array(logprobs, dtype=np.float64))
    probs /= probs.sum()
    return {int(i): round(float(p), 4) for i, p in zip(np.array(ids), probs, strict=True) if p > 0}


def draws(sampling: Sampling, n: int = 40, logits: mx.array = LOGITS) -> list[int]:
    sampler = Sampler(sampling)
    return [int(np.array(sampler.choose(logits[None]))[0]) for _ in range(n)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 3, 4, 2, 0]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 99}, [1, 3, 4, 2, 0]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.64}, [1, 3]),
        ({"top_p": 0.66}, [1, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.49}, [1, 3, 4]),
        ({"min_p": 0.51}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 1, "top_p": 0.8}, [1]),
        # top-k first and renormalised: 0.47, 0.29, 0.24; on the original masses 0.8 would keep the third
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
        # temperature before top-p: at T=2 the masses are 0.29, 0.23, 0.2, ...
        ({"temperature": 2.0, "top_p": 0.6}, [1, 3, 4]),
        ({"temperature": 0.5, "top_p": 0.6}, [1, 3]),
        ({"temperature": 0.5, "min_p": 0.3}, [1, 3]),
    ],
)
def test_filters_keep_exactly_these_tokens(options: dict[str, Any], expected: list[int]):
    assert list(kept(**options)) == expected


def test_a_mass_that_reaches_top_p_exactly_is_enough():
    _, logprobs = candidates(LOGITS, Sampling(temperature=1.0))
    assert list(kept(top_p=float(mx.exp(logprobs)[0]))) == [1]


def test_what_is_kept_is_renormalised():
    assert kept(top_k=2) == {1: round(0.4 / 0.65, 4), 3: round(0.25 / 0.65, 4)}
    assert kept(temperature=0.5, top_k=2) == {1: round(0.16 / 0.2225, 4), 3: round(0.0625 / 0.2225, 4)}


def test_temperature_zero_is_the_arg_max_whatever_the_filters():
    assert draws(Sampling(temperature=0.0, top_k=3, top_p=0.1, min_p=0.9), 3) == [1, 1, 1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_temperature_zero_takes_the_lowest_id_of_equals(dtype: mx.Dtype):
    logits = mx.zeros(50_000).at[mx.array([49_999, 7_000, 31])].add(3.0)
    assert draws(Sampling(), 1, logits.astype(dtype)) == [31]


def test_draws_follow_the_distribution():
    counts = np.bincount(draws(Sampling(temperature=1.0, seed=3), 800), minlength=5) / 800
    np.testing.assert_allclose(counts, PROBS, atol=0.06)


def test_draws_stay_within_the_kept_set():
    assert set(draws(Sampling(temperature=1.0, top_p=0.6, seed=0), 60)) == {1, 3}


def test_a_seed_repeats_its_stream_and_other_seeds_differ():
    streams = [draws(Sampling(temperature=1.0, seed=seed)) for seed in (1, 1, 2, 2**64 - 1)]
    assert streams[0] == streams[1]
    assert len({tuple(stream) for stream in streams}) == 3


def test_a_stream_does_not_depend_on_what_else_is_drawn():
    alone = draws(Sampling(temperature=1.0, seed=7), 20)
    ours, other = Sampler(Sampling(temperature=1.0, seed=7)), Sampler(Sampling(temperature=1.0, seed=8))
    mixed = []
    for _ in range(20):
        other.choose(LOGITS[None])
        mx.random.seed(0)
        mixed.append(int(np.array(ours.choose(LOGITS[None]))[0]))
    assert mixed == alone


def test_without_a_seed_streams_differ_and_tell_their_seed():
    samplers = [Sampler(Sampling(temperature=1.0)) for _ in range(5)]
    assert len({sampler.seed for sampler in samplers}) == 5
    again = draws(Sampling(temperature=1.0, seed=samplers[0].seed), 10)
    assert [int(np.array(samplers[0].choose(LOGITS[None]))[0]) for _ in range(10)] == again


def test_penalties_count_a_token_once_or_per_occurrence():
    logits = mx.array([2.0, -2.0, 1.0, 0.5])
    seen = mx.array([0, 1, 0, 0])
    got = penalised(logits, Sampling(repeat_penalty=2.0), seen)
    np.testing.assert_allclose(np.array(got), [1.0, -4.0, 1.0, 0.5])
    got = penalised(logits, Sampling(presence_penalty=0.25), seen)
    np.testing.assert_allclose(np.array(got), [1.75, -2.25, 1.0, 0.5])
    got = penalised(logits, Sampling(frequency_penalty=0.25), seen)
    np.testing.assert_allclose(np.array(got), [1.25, -2.25, 1.0, 0.5])


def test_the_prompt_and_the_chosen_tokens_count_as_seen():
    flat = mx.array([[1.0, 0.9, 0.8, 0.7]])
    sampler = Sampler(Sampling(presence_penalty=5.0), prompt=[0])
    assert [int(np.array(sampler.choose(flat))[0]) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(("window", "expected"), [(0, [0, 0, 0]), (1, [0, 1, 0]), (2, [0, 1, 2]), (-1, [2, 3, 0])])
def test_the_window_says_how_far_back_penalties_look(window: int, expected: list[int]):
    flat = mx.array([[1.0, 0.9, 0.8, 0.7]])
    sampler = Sampler(Sampling(presence_penalty=5.0, repeat_last_n=window), prompt=[0, 1, 3, 3] if window >= 0 else [0, 1])
    got = [int(np.array(sampler.choose(flat))[0]) for _ in range(3)]
    assert got == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repeat_penalty", 0.0),
        ("presence_penalty", 1e9),
        ("repeat_last_n", -2),
        ("seed", -1),
        ("seed", 1 << 64),
        ("seed", True),
    ],
)
def test_a_field_out_of_bounds_is_named(field: str, value: Any):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})
