"""A case: one tiny configuration of a family, with a name for what it stresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """`config` is a config.json in the published spelling. `prompt` is the length that checks feed, at least 36 tokens:
    for the last query a causal and a bidirectional mask see the same keys, so short prompts look right when the mask is wrong
    (a case that is about short prompts has a shorter one). `planted` maps positions to tokens that every sequence has there.
    `file_dtype`: of the tensors in the file, float32 or bfloat16, which hold the same values.
    """

    family: str
    name: str
    stresses: str
    config: Mapping[str, Any]
    prompt: int = 48
    layouts: tuple[str, ...] = ("dense",)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    planted: Mapping[int, int] = field(default_factory=dict)
    file_dtype: str = "float32"

    @property
    def id(self) -> str:
        return f"{self.family}/{self.name}"
