"""MLP with squared ReLU https://arxiv.org/abs/2109.08668, down(relu(up(x))^2), alone and as the experts of a mixture."""

from __future__ import annotations

import mlx.core as mx

from engine.layers.linear import Linear
from engine.layers.mapped import BlockMap, moe_gather_qmm_mapped, values_of
from engine.layers.weights import Weights

__all__ = ["ReLU2Experts", "ReLU2MLP", "relu2"]


def relu2(x: mx.array) -> mx.array:
    return mx.square(mx.maximum(x, 0.0))


class ReLU2MLP:
    def __init__(self, weights: Weights) -> None:
        self.up_proj = Linear.of(weights.at("up_proj"))
        self.down_proj = Linear.of(weights.at("down_proj"))

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(relu2(self.up_proj(x)))


class ReLU2Experts:
    """Experts with the weights `{expert}.{up,down}_proj.weight`, or stacked without `{expert}.`."""

    def __init__(self, weights: Weights, experts: int) -> None:
        self.up_proj = weights.stacked(experts, "up_proj.weight")  # [experts, intermediate, in]
        self.down_proj = weights.stacked(experts, "down_proj.weight")  # [experts, in, intermediate]
        self.experts = experts
        self.values = values_of(self.up_proj, self.down_proj)

    def __len__(self) -> int:
        return self.experts

    def __call__(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """x [T, in], ids [T, k] and weights float32 [T, k] of the chosen. Returns the weighted sums, float32 [T, in]."""
        blocks = BlockMap(ids, self.experts, self.values)
        up = moe_gather_qmm_mapped(blocks.gather(x), self.up_proj, blocks)
        return blocks.combine(moe_gather_qmm_mapped(relu2(up), self.down_proj, blocks), weights)
