"""Mixture of experts: a float32 router, experts with weights, and zero experts, which return their input.

Zero experts as in https://arxiv.org/abs/2509.01322; the correction bias as in https://arxiv.org/abs/2408.15664: it takes part
in the choice of experts, never in their weights.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from engine.layers.activations import silu, softmax
from engine.layers.mapped import BlockMap, moe_gather_qmm_mapped, values_of
from engine.layers.weights import Weights

__all__ = ["BlockMap", "Experts", "GatedExperts", "MixtureOfExperts", "Router", "moe_gather_qmm_mapped", "values_of"]


class Router:
    """Chooses `top_k` of the classifier's experts per token. Scores, bias and choice are float32 in every compute dtype."""

    def __init__(self, weights: Weights, top_k: int, *, bias: bool, normalise: bool, scale: float) -> None:
        self.classifier = weights["classifier.weight"]  # float32 [experts, hidden]
        self.bias = weights["classifier.bias"] if bias else None  # float32 [experts]
        self.correction_bias = weights["e_score_correction_bias"]  # float32 [experts]
        self.top_k = top_k
        self.normalise = normalise  # the chosen weights sum to 1 before they are scaled
        self.scale = scale

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [T, hidden]. Returns expert ids [T, top_k], each at most once in a row, and weights float32 [T, top_k]."""
        logits = x.astype(mx.float32) @ self.classifier.T
        scores = softmax(logits if self.bias is None else logits + self.bias)
        ids = mx.argpartition(-(scores + self.correction_bias), kth=self.top_k - 1, axis=-1)[:, : self.top_k]
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if self.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return ids, weights * self.scale


class Experts(Protocol):
    """Experts with weights, ids [0, len)."""

    def __len__(self) -> int: ...

    def __call__(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """x [T, hidden], ids [T, k] and weights float32 [T, k] of the chosen experts; an id from `len` on is none of these.

        Returns the weighted sums of the experts' outputs, float32 [T, hidden].
        """
        ...


class GatedExperts:
    """SwiGLU experts with the weights `{expert}.{gate,up,down}_proj.weight`, or stacked without `{expert}.`."""

    def __init__(self, weights: Weights, experts: int) -> None:
        self.gate_proj = weights.stacked(experts, "gate_proj.weight")  # [experts, intermediate, hidden]
        self.up_proj = weights.stacked(experts, "up_proj.weight")
        self.down_proj = weights.stacked(experts, "down_proj.weight")  # [experts, hidden, intermediate]
        self.experts = experts
        self.values = values_of(self.gate_proj, self.up_proj, self.down_proj)

    def __len__(self) -> int:
        return self.experts

    def __call__(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        blocks = BlockMap(ids, self.experts, self.values)
        rows = blocks.gather(x)
        gate = moe_gather_qmm_mapped(rows, self.gate_proj, blocks)
        up = moe_gather_qmm_mapped(rows, self.up_proj, blocks)
        return blocks.combine(moe_gather_qmm_mapped(silu(gate) * up, self.down_proj, blocks), weights)


class MixtureOfExperts:
    """Ids from `len(experts)` on are zero experts."""

    def __init__(self, router: Router, experts: Experts) -> None:
        self.router = router
        self.experts = experts

    def __call__(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> [T, hidden], in x's dtype."""
        ids, weights = self.router(x)
        out = self.experts(x, ids, weights)
        identity = mx.where(ids >= len(self.experts), weights, 0.0).sum(axis=-1, keepdims=True)  # [T, 1]
        return (out + identity * x).astype(x.dtype)
