"""What every family shares that is served in both layouts of sequence state from one model file."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx

from engine.errors import Refused
from engine.state import SequenceStateLayout, Span, State

__all__ = ["BothLayouts"]

Served = TypeVar("Served", bound="BothLayouts")


class BothLayouts(ABC):
    """Mixin of a Model: gives a family that has `make_slots()` the layout MODEL_OWNED too.

    `forward` begins with `spans = self.own(spans)`; nothing below it knows the layout.
    """

    layout = SequenceStateLayout.DENSE
    _caches: list[State] | None = None

    @abstractmethod
    def make_slots(self) -> list[State]:
        """New states of one sequence."""

    def in_layout(self: Served, layout: SequenceStateLayout) -> Served:
        """The same weights in this layout, with runtime state of its own: engines on one model do not meet."""
        served = copy.copy(self)
        served.layout = layout
        served._caches = None
        return served

    @property
    def supports_batching(self) -> bool:
        return self.layout is SequenceStateLayout.DENSE

    @property
    def supports_padded_prefill(self) -> bool:
        return self.layout is SequenceStateLayout.DENSE

    @property
    def supports_snapshot_reuse(self) -> bool:
        return self.layout is SequenceStateLayout.DENSE

    def make_caches(self) -> None:
        """MODEL_OWNED: new empty state inside the model."""
        self._caches = self.make_slots()

    def reset_runtime_state(self) -> None:
        """MODEL_OWNED: release the state inside the model; a forward after it begins with a new one."""
        self._caches = None

    def runtime_arrays(self) -> list[mx.array]:
        """MODEL_OWNED: all arrays of the state inside the model."""
        return [array for state in self._caches or () for array in state.arrays()]

    def own(self, spans: Sequence[Span]) -> Sequence[Span]:
        """The spans with the states to work on: in MODEL_OWNED the model's, whatever the spans were handed with."""
        if self.layout is SequenceStateLayout.DENSE:
            return spans
        if len(spans) != 1:
            raise Refused(f"layout model_owned runs one sequence at a time (got {len(spans)} spans)")
        if self._caches is None:
            self.make_caches()
        caches: list[Any] = self._caches or []
        return [replace(spans[0], slots=caches)]
