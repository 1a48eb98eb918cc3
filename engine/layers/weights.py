"""Names in a checkpoint, level by level."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

__all__ = ["Weights"]


class Weights:
    """A checkpoint's weights below a prefix: `weights.at("model.layers.0")["self_attn.q_proj.weight"]`."""

    def __init__(self, arrays: Mapping[str, mx.array], prefix: str = "") -> None:
        self._arrays = arrays
        self._prefix = prefix

    def at(self, name: str) -> Weights:
        return Weights(self._arrays, f"{self._prefix}{name}.")

    def __getitem__(self, name: str) -> mx.array:
        return self._arrays[self._prefix + name]
