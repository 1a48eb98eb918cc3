"""A case: one tiny configuration of a family, with a name for what it stresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import reference_models

__all__ = ["GROWING", "PLAIN", "RECURRENT", "RING", "ROPE", "Case"]

# Traits: what a family keeps between forwards, and whether it counts positions. Schedules and faults ask for them.
GROWING = "growing"  # keys and values of all tokens
RING = "ring"  # keys and values of a window
RECURRENT = "recurrent"  # a state that has absorbed its tokens, and the tail of a convolution
ROPE = "rope"
PLAIN = frozenset({GROWING, ROPE})


@dataclass(frozen=True)
class Case:
    """`config` is a config.json in the published spelling. `prompt` is the length that checks feed, at least 36 tokens:
    for the last query a causal and a bidirectional mask see the same keys, so short prompts look right when the mask is wrong
    (a case that is about short prompts has a shorter one). `planted` maps positions to tokens that every sequence has there.
    `file_dtype`: of the tensors in the file, float32, bfloat16 or float16, which hold the same values but for those below
    2^-17, which float16 rounds to multiples of 2^-24. `stored`: a form of the file that harness.cases.stored has, quantised or
    under other names. `checks`: the only checks that it is for; empty: all.
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
    traits: frozenset[str] = PLAIN
    stored: str = ""
    checks: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.family}/{self.name}"

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that is about the language model: vocab_size and the special ids stand there."""
        return reference_models.text_config(self.config)
