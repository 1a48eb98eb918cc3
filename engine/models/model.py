"""What a family's Model offers to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from engine.state import Span, State

__all__ = ["Model"]


class Model(Protocol):
    """A loaded model. `make_slots` serves layout DENSE, the three methods after it serve MODEL_OWNED; one of the two is enough
    (the engine asks which there is).
    """

    supports_batching: bool  # spans of several sequences in one forward
    supports_padded_prefill: bool
    supports_snapshot_reuse: bool  # slots can be restored in another sequence (prefix cache)
    vocab_size: int

    def forward(self, tokens: mx.array, spans: Sequence[Span], rows: Sequence[int] | None) -> mx.array:
        """tokens: int32 [T], the spans' tokens one after another. Appends to each span's slots.

        Returns logits [len(rows), vocab] of these indices into T, or [T, vocab] for None; the head runs on these only.
        """
        ...

    def make_slots(self) -> list[State]:
        """New states of one sequence."""
        ...

    def make_caches(self) -> None:
        """MODEL_OWNED: new empty state inside the model."""
        ...

    def reset_runtime_state(self) -> None:
        """MODEL_OWNED: release the state inside the model, memory included."""
        ...

    def runtime_arrays(self) -> list[mx.array]:
        """MODEL_OWNED: all arrays of the state inside the model, to evaluate them."""
        ...
