"""exp and what is made of it, at a speed that does not dominate prefill on a CPU.

MLX's CPU exp takes 23 ns per element (one at a time), numpy's vectorised one 1 ns; without this, softmax and SiLU take
three quarters of a prefill. Large arrays on a CPU are therefore evaluated and sent through numpy, which sees MLX's memory
without copying. Small ones stay lazy: for them the evaluation would cost more than it saves.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

__all__ = ["exp", "silu"]

HOST_ELEMENTS = 4096  # from here on, evaluating and numpy is faster than MLX's CPU kernel


def exp(x: mx.array) -> mx.array:
    """e^x in float32."""
    if x.size < HOST_ELEMENTS or mx.default_device().type != mx.DeviceType.cpu:
        return mx.exp(x.astype(mx.float32))
    return mx.array(np.exp(np.asarray(x.astype(mx.float32))))


def silu(x: mx.array) -> mx.array:
    """x / (1 + e^-x), computed in float32, returned in x's dtype."""
    wide = x.astype(mx.float32)
    # e^88 is the last power that float32 holds; beyond it the quotient is 0 to float32 anyway.
    return (wide / (1.0 + exp(mx.minimum(-wide, 88.0)))).astype(x.dtype)
