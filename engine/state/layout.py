"""Who owns the state of a sequence."""

from __future__ import annotations

from enum import Enum

__all__ = ["SequenceStateLayout"]


class SequenceStateLayout(str, Enum):
    DENSE = "dense"  # the engine owns a list of slots per sequence and passes it to forward
    MODEL_OWNED = "model_owned"  # the model holds the state of one sequence; the engine passes empty lists

    def __str__(self) -> str:
        return self.value
