"""engine/layers/activations.py on either path, MLX's and numpy's, against numpy in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.layers import activations


@pytest.fixture(params=[0, 1 << 40], ids=["host", "lazy"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "HOST_ELEMENTS", request.param)


def expected(scores: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    wide = scores.astype(np.float64)
    column = np.full((len(scores), 1), -np.inf) if sinks is None else np.broadcast_to(sinks, (len(scores), 1))
    wide = np.concatenate([column, wide], axis=-1)
    p = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True))[:, 1:]


LEVELS = np.array([[-1000.0], [-300.0], [-95.0], [0.0], [95.0], [300.0], [1000.0]])  # e^89 is beyond float32


@pytest.mark.parametrize("sinks", [None, LEVELS + 1.5, np.zeros((1, 1))], ids=["plain", "a sink a row", "one sink"])
def test_each_row_of_a_softmax_is_right_at_its_own_level(sinks: np.ndarray | None):
    scores = (LEVELS + np.random.default_rng(0).normal(size=(7, 50))).astype(np.float32)
    scores[:, 40:] = -np.inf  # masked
    got = activations.softmax(mx.array(scores), None if sinks is None else mx.array(sinks.astype(np.float32)))
    np.testing.assert_allclose(np.array(got), expected(scores, sinks), rtol=1e-5, atol=1e-30)


def test_silu_is_right_at_extremes_and_keeps_the_dtype():
    x = np.array([[-1e4, -100, -88.5, -3, -0.0, 0, 1e-30, 2, 88.5, 1e4]], dtype=np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        silu = wide / (1 + np.exp(-wide))
    np.testing.assert_allclose(np.array(activations.silu(mx.array(x))), silu, rtol=1e-5, atol=1e-30)
    assert activations.silu(mx.array(x).astype(mx.bfloat16)).dtype == mx.bfloat16
