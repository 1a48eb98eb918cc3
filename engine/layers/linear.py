"""Linear map, as checkpoints hold it: weight [out, in], quantised or plain, optional bias [out]."""

from __future__ import annotations

import mlx.core as mx

from engine.layers.quantised import QuantisedTensor, matmul
from engine.layers.weights import Weights

__all__ = ["Linear"]


class Linear:
    def __init__(self, weights: Weights, bias: bool = False) -> None:
        self.weight = weights.matrix("weight")  # [out, in]
        self.bias = weights["bias"] if bias else None

    @classmethod
    def of(cls, weights: Weights) -> Linear:
        """With its bias where the checkpoint has one."""
        return cls(weights, "bias" in weights)

    def __call__(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return matmul(x, self.weight)
        if isinstance(self.weight, QuantisedTensor):
            return matmul(x, self.weight) + self.bias  # after any global scale
        return mx.addmm(self.bias, x, self.weight.T)
