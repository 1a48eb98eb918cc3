"""What a recompute returns, and the exceptions that every reference raises the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Config", "Recompute", "Reference", "ReferenceError", "Weights", "wide"]

Config = Mapping[str, Any]  # config.json as it was parsed
Weights = Mapping[str, Tensor]  # checkpoint names -> tensors of any float dtype


class ReferenceError(ValueError):
    """The reference does not compute what the config asks for, or a file does not hold it; names the field and the value."""


@dataclass(frozen=True)
class Recompute:
    """Logits [T, vocab], row p after tokens[: p + 1], in the dtype of the recompute.

    `margins` [T]: the least gap, over the layers, of any discrete choice made for a token (expert routing). `choices`
    [T, chosen], int64: the experts that were chosen, layer after layer, in ascending order within each. Both are None where the
    family makes no such choice.
    """

    logits: Tensor
    margins: Tensor | None = None
    choices: Tensor | None = None


class Reference(Protocol):
    """A module of reference_models, as `reference_models.find` returns it."""

    @staticmethod
    def parameters(config: Config) -> dict[str, tuple[int, ...]]: ...

    @staticmethod
    def recompute(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = ...) -> Recompute: ...


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, softmax and rotary angles are computed: float64 for the oracle, float32 for the noise floor."""
    return torch.float64 if dtype is torch.float64 else torch.float32
