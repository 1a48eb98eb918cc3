"""Depthwise causal convolution with SiLU, as in front of a state space mixer; float32."""

from __future__ import annotations

from functools import reduce
from operator import add

import mlx.core as mx

from engine.layers.activations import silu
from engine.layers.weights import Weights

__all__ = ["CausalConv"]


class CausalConv:
    """Channel c of token t: silu(bias_c + sum over k of weight_(c, k) x_(t - (K - 1) + k, c)), with kernel K.

    The K - 1 inputs before the first token are the caller's: zeros where a sequence begins.
    """

    def __init__(self, weights: Weights) -> None:
        weight = weights["weight"]  # float32 [channels, 1, K], or [channels, K, 1]: the same numbers in the same order
        self.weight = mx.contiguous(weight.reshape(weight.shape[0], -1).T)  # [K, channels]
        has_bias = "bias" in weights
        self.bias = weights["bias"] if has_bias else None  # float32 [channels]
        mx.eval(self.weight)

    @property
    def kernel(self) -> int:
        return self.weight.shape[0]

    def __call__(self, window: mx.array) -> mx.array:
        """window float32 [..., K - 1 + n, channels]: the inputs before, then those of n tokens. Returns [..., n, channels]."""
        n = window.shape[-2] - self.kernel + 1
        if n == 1:
            out = (window * self.weight).sum(axis=-2, keepdims=True)
        else:
            out = reduce(add, (window[..., k : k + n, :] * self.weight[k] for k in range(self.kernel)))
        return silu(out if self.bias is None else out + self.bias)
