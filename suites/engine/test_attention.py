"""engine/layers/attention.py with windows and sinks, against numpy in float64 in the order of the equations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.layers import activations
from engine.layers.attention import attention

HEADS, KV_HEADS = 4, 2
TOLERANCE = 2e-6
PATHS = pytest.mark.parametrize("host_elements", [0, 1 << 40], ids=["composed", "kernel"])


def some(n: int, length: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (HEADS, n, 8), (KV_HEADS, length, 8), (KV_HEADS, length, 6)
    return tuple(rng.normal(size=(1, *shape)) for shape in shapes)


def expected(arrays: tuple[np.ndarray, ...], window: int | None, sinks: np.ndarray | None, scale: float = 0.3) -> np.ndarray:
    q, k, v = arrays
    n, length = q.shape[2], k.shape[2]
    k, v = (np.repeat(a, HEADS // KV_HEADS, axis=1) for a in (k, v))
    scores = q @ k.swapaxes(-1, -2) * scale
    ages = np.arange(length - n, length)[:, None] - np.arange(length)
    scores = np.where((ages >= 0) & (ages < (window or length)), scores, -np.inf)
    dropped = np.zeros((HEADS, 1, 1)) if sinks is None else np.exp(sinks)[:, None, None]
    p = np.exp(scores)
    return p / (p.sum(-1, keepdims=True) + dropped) @ v


def got(arrays: tuple[np.ndarray, ...], window: int | None, sinks: np.ndarray | None) -> np.ndarray:
    q, k, v = (mx.array(a.astype(np.float32)) for a in arrays)
    made = None if sinks is None else mx.array(sinks.astype(np.float32))
    return np.array(attention(q, k, v, 0.3, window=window, sinks=made))


SINKS = np.array([-1.0, 0.5, 2.0, 3.5])


@PATHS
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 129, 1000])
@pytest.mark.parametrize(("n", "length"), [(1, 1), (1, 4), (1, 5), (1, 300), (3, 4), (3, 6), (7, 7), (130, 133), (300, 300)])
def test_windows_and_sinks_are_those_of_the_equations(
    monkeypatch: pytest.MonkeyPatch, host_elements: int, n: int, length: int, window: int | None, sinks: np.ndarray | None
):
    monkeypatch.setattr(activations, "HOST_ELEMENTS", host_elements)
    arrays = some(n, length)
    if sinks is None and window == 1 and n == length == 1:  # the value itself
        assert np.allclose(got(arrays, window, sinks), np.repeat(arrays[2], 2, axis=1), atol=TOLERANCE)
    np.testing.assert_allclose(got(arrays, window, sinks), expected(arrays, window, sinks), atol=TOLERANCE)


@pytest.mark.parametrize("wrong", [3, 5, None])
@pytest.mark.parametrize(("n", "length"), [(1, 9), (6, 9), (9, 9)])
def test_a_window_one_too_wide_or_too_narrow_shows(n: int, length: int, wrong: int | None):
    arrays = some(n, length)
    error = np.abs(got(arrays, 4, SINKS) - expected(arrays, wrong, SINKS)).max()
    assert error > 100 * TOLERANCE


@pytest.mark.parametrize(
    "wrong", [None, SINKS * 0.3, SINKS[::-1], np.zeros(HEADS)], ids=["left out", "scaled", "order", "zero"]
)
def test_sinks_that_are_left_out_scaled_or_of_another_head_show(wrong: np.ndarray | None):
    arrays = some(6, 9)
    assert np.abs(got(arrays, 4, SINKS) - expected(arrays, 4, wrong)).max() > 100 * TOLERANCE


@PATHS
def test_a_sink_far_above_all_scores_takes_all_the_weight_and_one_far_below_none(
    monkeypatch: pytest.MonkeyPatch, host_elements: int
):
    monkeypatch.setattr(activations, "HOST_ELEMENTS", host_elements)
    arrays = some(5, 9)
    rows = got(arrays, 4, np.array([200.0, -200.0, 200.0, -200.0]))
    assert np.isfinite(rows).all() and np.abs(rows[:, ::2]).max() == 0
    np.testing.assert_allclose(rows[:, 1::2], expected(arrays, 4, None)[:, 1::2], atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@PATHS
def test_sinks_and_windows_in_half_precision_keep_its_dtype(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, host_elements: int
):
    monkeypatch.setattr(activations, "HOST_ELEMENTS", host_elements)
    arrays = some(6, 9)
    q, k, v = (mx.array(a.astype(np.float32)).astype(dtype) for a in arrays)
    out = attention(q, k, v, 0.3, window=4, sinks=mx.array(SINKS.astype(np.float32)))
    assert out.dtype == dtype
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), expected(arrays, 4, SINKS), atol=0.05)
