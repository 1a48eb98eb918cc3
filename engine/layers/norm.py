"""RMS norm https://arxiv.org/abs/1910.07467; the mean square is taken in float32 in every dtype."""

from __future__ import annotations

import mlx.core as mx

from engine.layers.weights import Weights

__all__ = ["RMSNorm"]


class RMSNorm:
    def __init__(self, weights: Weights, eps: float) -> None:
        self.weight = weights["weight"]  # [hidden]
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)
