"""What a family's Model offers to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from engine.state import SequenceStateLayout, Span, State

__all__ = ["Model"]


class Model(Protocol):
    """A loaded model in one layout. `make_slots` serves DENSE, the three methods after it serve MODEL_OWNED; a family that has
    one layout only refuses the other in `in_layout`. engine.models.layouts has what families with both share.
    """

    @property
    def supports_batching(self) -> bool:
        """Spans of several sequences in one forward."""
        ...

    @property
    def supports_padded_prefill(self) -> bool:
        """Spans with padding."""
        ...

    @property
    def supports_snapshot_reuse(self) -> bool:
        """Slots can be restored in another sequence (prefix cache)."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def in_layout(self, layout: SequenceStateLayout) -> Model:
        """The same weights in this layout, with runtime state of its own. Raises Refused for a layout that the family lacks."""
        ...

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
