"""Layout MODEL_OWNED for models that also serve DENSE: the same slots, held by the model, of one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import mlx.core as mx

from engine.errors import SequenceError
from engine.state import Span, State

__all__ = ["ModelOwned"]


class ModelOwned:
    """Mixin. The model owns its state from `make_caches()` (or a forward over a span without slots) to `reset_runtime_state()`.

    Meanwhile it ignores the slots that spans bring, and the three `supports_` are false; else it is a model of layout DENSE.
    """

    _caches: list[State] | None = None

    def make_slots(self) -> list[State]:
        raise NotImplementedError  # the family's

    @property
    def supports_batching(self) -> bool:
        return self._caches is None

    @property
    def supports_padded_prefill(self) -> bool:
        return self._caches is None

    @property
    def supports_snapshot_reuse(self) -> bool:
        return self._caches is None

    def make_caches(self) -> None:
        self._caches = self.make_slots()

    def reset_runtime_state(self) -> None:
        self._caches = None

    def runtime_arrays(self) -> list[mx.array]:
        return [array for slot in self._caches or () for array in slot.arrays()]

    def with_state(self, spans: Sequence[Span]) -> Sequence[Span]:
        """The spans with the slots that the forward works on: their own, or the model's.

        Raises SequenceError where the model's state is not of the one span's sequence: it holds another number of tokens.
        """
        if self._caches is None:
            if all(len(span.slots) == self._slot_count for span in spans):
                return spans
            self.make_caches()
        caches = self._caches or []
        if len(spans) != 1:
            raise SequenceError(f"a model that owns its state serves one sequence at a time (got {len(spans)} spans)")
        for slot in caches:
            if slot.length != spans[0].offset:
                raise SequenceError(
                    f"the model's own state holds {slot.length} tokens and the span starts at position {spans[0].offset}; "
                    "is the model shared with another engine, or was it not reset after an error?"
                )
        return [replace(spans[0], slots=caches)]

    @cached_property
    def _slot_count(self) -> int:
        return len(self.make_slots())
