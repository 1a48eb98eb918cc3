"""Gated MLP https://arxiv.org/abs/2002.05202: down(activation(gate(x)) * up(x)), SwiGLU with SiLU."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from engine.layers.activations import silu
from engine.layers.linear import Linear
from engine.layers.weights import Weights

__all__ = ["MLP"]


class MLP:
    def __init__(self, weights: Weights, bias: bool = False, activation: Callable[[mx.array], mx.array] = silu) -> None:
        self.activation = activation
        self.gate_proj = Linear(weights.at("gate_proj"), bias)
        self.up_proj = Linear(weights.at("up_proj"), bias)
        self.down_proj = Linear(weights.at("down_proj"), bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
