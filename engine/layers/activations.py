"""exp, softmax, SiLU and GELU, at a speed that does not dominate prefill on a CPU.

MLX's CPU exp takes 23 ns per element (one at a time); numpy's is vectorised, a whole softmax takes 2.5 ns. Without this the
two take three quarters of a prefill. Large arrays on a CPU are therefore evaluated and computed by numpy, which reads MLX's
memory in place. Small ones, those of decoding, stay lazy: for them the wait for the evaluation costs more than it saves.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

__all__ = ["clamped_swiglu", "exp", "gelu_tanh", "on_host", "silu", "softmax"]

HOST_ELEMENTS = 4096  # 0.1 ms of MLX's exp, which is what an evaluation in the middle of a graph costs


def exp(x: mx.array) -> mx.array:
    """e^x of float32, in float32."""
    if not on_host(x.size):
        return mx.exp(x)
    with np.errstate(over="ignore"):
        return mx.array(np.exp(np.asarray(x)))


def softmax(x: mx.array, sinks: mx.array | None = None) -> mx.array:
    """Softmax over the last axis; computed and returned in float32.

    sinks, float32, of x's shape or broadcast to it, but 1 wide: one more logit of each row, of which no weight is returned.
    """
    x = x.astype(mx.float32)
    if not on_host(x.size):
        if sinks is None:
            return mx.softmax(x, axis=-1)
        column = mx.broadcast_to(sinks, (*x.shape[:-1], 1))
        return mx.softmax(mx.concatenate([column, x], axis=-1), axis=-1)[..., 1:]
    values = np.asarray(x)
    highest = values.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, np.asarray(sinks))
    out = np.subtract(values, highest)
    np.exp(out, out=out)
    total = out.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(np.asarray(sinks) - highest)
    out /= total
    return mx.array(out)


def silu(x: mx.array) -> mx.array:
    """x / (1 + e^-x); computed in float32, returned in x's dtype."""
    wide = x.astype(mx.float32)
    if not on_host(x.size):
        return (wide * mx.sigmoid(wide)).astype(x.dtype)
    values = np.asarray(wide)
    return mx.array(_times_sigmoid(values, np.negative(values))).astype(x.dtype)


_GELU = (8 / math.pi) ** 0.5  # twice sqrt(2 / pi)


def gelu_tanh(x: mx.array) -> mx.array:
    """GELU in its tanh form, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which is x sigmoid(twice the same argument).

    https://arxiv.org/abs/1606.08415; computed in float32, returned in x's dtype.
    """
    wide = x.astype(mx.float32)
    if not on_host(x.size):
        return (wide * mx.sigmoid(_GELU * wide * (1.0 + 0.044715 * wide * wide))).astype(x.dtype)
    values = np.asarray(wide)
    with np.errstate(over="ignore"):
        arguments = np.square(values)
        arguments *= -0.044715 * _GELU
        arguments -= _GELU
        arguments *= values
    return mx.array(_times_sigmoid(values, arguments)).astype(x.dtype)


def clamped_swiglu(gate: mx.array, up: mx.array, alpha: float, limit: float) -> mx.array:
    """gate sigmoid(alpha gate) (up + 1), with gate at most `limit` and up from -limit to limit.

    https://arxiv.org/abs/2508.10925; computed in float32, returned in gate's dtype.
    """
    dtype = gate.dtype
    gate = mx.minimum(gate.astype(mx.float32), limit)
    up = mx.clip(up.astype(mx.float32), -limit, limit) + 1.0
    if not on_host(gate.size):
        return (gate * mx.sigmoid(alpha * gate) * up).astype(dtype)
    values = np.asarray(gate)
    return (mx.array(_times_sigmoid(values, -alpha * values)) * up).astype(dtype)


def _times_sigmoid(values: np.ndarray, negated: np.ndarray) -> np.ndarray:
    """values * sigmoid(-negated), float32, written into `negated`."""
    with np.errstate(over="ignore"):  # e^x = inf gives v / inf = 0, which is right
        np.exp(negated, out=negated)
    negated += 1.0
    return np.divide(values, negated, out=negated)


def on_host(elements: int) -> bool:
    """Whether this many exponentials are better computed by numpy: on a CPU, from HOST_ELEMENTS on."""
    return elements >= HOST_ELEMENTS and mx.default_device().type == mx.DeviceType.cpu
