"""exp, softmax and SiLU, at a speed that does not dominate prefill on a CPU.

MLX's CPU exp takes 23 ns per element (one at a time); numpy's is vectorised, a whole softmax takes 2.5 ns. Without this the
two take three quarters of a prefill. Large arrays on a CPU are therefore evaluated and computed by numpy, which reads MLX's
memory in place. Small ones, those of decoding, stay lazy: for them the wait for the evaluation costs more than it saves.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

__all__ = ["exp", "on_host", "silu", "softmax"]

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
    out = np.negative(values)
    with np.errstate(over="ignore"):  # e^-x = inf gives x / inf = 0, which is right
        np.exp(out, out=out)
    out += 1.0
    np.divide(values, out, out=out)
    return mx.array(out).astype(x.dtype)


def on_host(elements: int) -> bool:
    """Whether this many exponentials are better computed by numpy: on a CPU, from HOST_ELEMENTS on."""
    return elements >= HOST_ELEMENTS and mx.default_device().type == mx.DeviceType.cpu
