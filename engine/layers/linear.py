"""Linear map, as checkpoints hold it: weight [out, in], optional bias [out]."""

from __future__ import annotations

import mlx.core as mx

from engine.layers.weights import Weights

__all__ = ["Linear"]


class Linear:
    def __init__(self, weights: Weights, bias: bool) -> None:
        self.weight = weights["weight"]  # [out, in]
        self.bias = weights["bias"] if bias else None

    def __call__(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return x @ self.weight.T
        return mx.addmm(self.bias, x, self.weight.T)
