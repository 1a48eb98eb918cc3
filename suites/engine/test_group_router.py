"""engine/layers/group_router.py: scores, groups, correction bias, weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.layers.group_router import GroupRouter
from engine.layers.weights import Weights

EXPERTS, HIDDEN, T = 12, 6, 50


def router(bias: np.ndarray, top_k: int = 3, **changes: Any) -> GroupRouter:
    arrays = {"weight": mx.array(gate()), "e_score_correction_bias": mx.array(bias.astype(np.float32))}
    options: dict[str, Any] = {"groups": 4, "top_groups": 2, "normalise": True, "scale": 2.5} | changes
    return GroupRouter(Weights(arrays), top_k, **options)


def gate() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(EXPERTS, HIDDEN)).astype(np.float32)


def inputs() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(T, HIDDEN)).astype(np.float32)


def scores() -> np.ndarray:
    return 1 / (1 + np.exp(-(inputs().astype(np.float64) @ gate().T)))


def routed(built: GroupRouter, x: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = built(mx.array(inputs() if x is None else x))
    assert weights.dtype == mx.float32
    return np.array(ids), np.array(weights)


@pytest.mark.parametrize("offset", [-2.0, 0.0, 1.0])
def test_only_the_best_groups_are_chosen_from_whatever_the_sign_of_their_scores(offset: float):
    bias = np.random.default_rng(2).normal(size=EXPERTS) * 0.2 + offset
    ids, _ = routed(router(bias))
    choice = (scores() + bias).reshape(T, 4, 3)
    best = np.argsort(-np.sort(choice, axis=-1)[..., -2:].sum(-1), axis=-1)[:, :2]
    for row in range(T):
        allowed = [g * 3 + e for g in best[row] for e in range(3)]
        expected = sorted(allowed, key=lambda expert: -choice[row].reshape(-1)[expert])[:3]
        assert set(ids[row]) == set(expected)


def test_groups_of_one_expert_are_chosen_by_it():
    ids, _ = routed(router(np.zeros(EXPERTS), groups=12, top_groups=4))
    assert all(set(row) == set(np.argsort(-s)[:3]) for row, s in zip(ids, scores(), strict=True))


def test_the_correction_bias_chooses_and_does_not_weigh():
    bias = np.zeros(EXPERTS)
    bias[[1, 5]] = 10.0
    ids, weights = routed(router(bias, top_k=2, groups=1, top_groups=1, normalise=False))
    assert all(set(row) == {1, 5} for row in ids)
    np.testing.assert_allclose(weights, 2.5 * np.take_along_axis(scores(), ids, 1), rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_normalised_weights_sum_to_the_scale(top_k: int):
    _, weights = routed(router(np.zeros(EXPERTS), top_k=top_k))
    np.testing.assert_allclose(weights.sum(-1), 2.5, rtol=1e-5)


def test_scores_of_zero_are_no_division_by_zero():
    arrays = {"weight": mx.ones((EXPERTS, HIDDEN)), "e_score_correction_bias": mx.zeros((EXPERTS,))}
    built = GroupRouter(Weights(arrays), 3, groups=4, top_groups=2, normalise=True, scale=2.5)
    ids, weights = routed(built, np.full((2, HIDDEN), -1e4, np.float32))  # the sigmoids are 0
    assert not weights.any() and all(len(set(row)) == 3 for row in ids)


def test_the_router_is_float32_whatever_it_reads():
    wide = inputs()
    narrow = mx.array(wide).astype(mx.bfloat16)
    built = router(np.zeros(EXPERTS), groups=1, top_groups=1)
    ids, weights = built(narrow)
    again, same = built(narrow.astype(mx.float32))
    np.testing.assert_array_equal(np.array(ids), np.array(again))
    np.testing.assert_array_equal(np.array(weights), np.array(same))
