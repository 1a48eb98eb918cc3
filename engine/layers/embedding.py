"""Token embedding [vocab, hidden], quantised or plain, and the same matrix as an output head."""

from __future__ import annotations

import mlx.core as mx

from engine.layers.quantised import QuantisedTensor, matmul
from engine.layers.weights import Weights

__all__ = ["Embedding"]


class Embedding:
    def __init__(self, weights: Weights) -> None:
        self.weight = weights.matrix("weight")  # [vocab, hidden]

    def __call__(self, tokens: mx.array) -> mx.array:
        """int32 [T] -> [T, hidden]."""
        rows = self.weight[tokens]
        return rows.dequantise() if isinstance(rows, QuantisedTensor) else rows

    def as_head(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> logits [T, vocab], for a checkpoint that ties its output head to the embedding."""
        return matmul(x, self.weight)
