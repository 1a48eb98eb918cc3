"""Names in a checkpoint, level by level."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from engine.errors import Refused
from engine.layers.quantised import QuantisedTensor, Weight, stack

__all__ = ["Weights"]


class Weights:
    """A checkpoint's weights below a prefix: `weights.at("model.layers.0")["self_attn.q_proj.weight"]`."""

    def __init__(self, tensors: Mapping[str, Weight], prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = prefix

    def at(self, name: str) -> Weights:
        return Weights(self._tensors, f"{self._prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def __getitem__(self, name: str) -> mx.array:
        """A parameter that is an array: a norm, a bias, a router. Raises Refused for a quantised one."""
        tensor = self._tensors[self._prefix + name]
        if isinstance(tensor, QuantisedTensor):
            raise Refused(
                f"tensor {self._prefix}{name} is quantised ({tensor.mode}), which is not supported for what it is used for"
            )
        return tensor

    def matrix(self, name: str) -> Weight:
        """A parameter that a format may quantise: of a linear map, an embedding, an expert."""
        return self._tensors[self._prefix + name]

    def stacked(self, experts: int, name: str) -> Weight:
        """One matrix of all experts [experts, out, in]: `name` as it is, or `0.name` to `{experts - 1}.name` stacked."""
        if name in self:
            return self.matrix(name)
        stacked = stack([self.matrix(f"{expert}.{name}") for expert in range(experts)])
        mx.eval(stacked.arrays() if isinstance(stacked, QuantisedTensor) else stacked)  # a copy: lets go of the single ones
        return stacked
