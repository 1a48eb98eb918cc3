"""A forward runs over a flat row of tokens; spans say which sequence each stretch of it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Span", "positions"]


@dataclass(frozen=True)
class Span:
    """Tokens [start, start + length) of the row; the first has position `offset` in its sequence.

    slots: the sequence's states, in the order of the model's `make_slots()`; empty in layout MODEL_OWNED.
    padding: how many of the tokens, the last ones, only fill the row up. They are computed and never become part of a state:
    whatever appends to a slot passes it on.
    """

    start: int
    length: int
    offset: int
    slots: list[Any]  # of State; their `append` differs by kind
    padding: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.length


def positions(spans: Sequence[Span]) -> np.ndarray:
    """Position of each token of the row in its own sequence: int64 [T]."""
    return np.concatenate([np.arange(span.offset, span.offset + span.length) for span in spans])
