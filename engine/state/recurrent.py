"""Recurrent state: the tail of a causal convolution and the matrix state of a recurrence (Mamba2, linear attention)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from engine.state.snapshot import StateSnapshot, compact
from engine.state.state import State, only_the_later

__all__ = ["RecurrentState"]


class RecurrentState(State):
    """conv [1, *conv_shape] and ssm [1, *ssm_shape], float32 whatever the model computes in: they sum over all tokens.

    It has no past: it restores exactly what a snapshot holds, and never rewinds.
    """

    def __init__(self, conv_shape: tuple[int, int], ssm_shape: tuple[int, int, int]) -> None:
        """conv_shape (kernel - 1, channels): inputs of the convolution; ssm_shape (heads, head_dim, state)."""
        super().__init__()
        self.conv_shape, self.ssm_shape = conv_shape, ssm_shape
        self._state: tuple[mx.array, mx.array] | None = None

    def get(self) -> tuple[mx.array, mx.array]:
        """conv and ssm after `length` tokens, zeros before the first. Never advances."""
        if self._state is None:
            return mx.zeros((1, *self.conv_shape)), mx.zeros((1, *self.ssm_shape))
        return self._state

    def splits(self, n: int) -> list[int]:
        """Where the next n tokens have to be cut, so that `put` gets the states between the pieces: offsets inside them."""
        if self._captures is None:
            return []
        return [offset - self.length for offset in self._captures.inside(self.length, self.length + n)]

    def put(self, n: int, conv_states: Sequence[mx.array], ssm_states: Sequence[mx.array]) -> None:
        """Advance by n tokens (padding is none). States at each of `splits(n)`, and last those after all n.

        Raises ValueError, and changes nothing, for another number or shape of states.
        """
        offsets = [*self.splits(n), n]
        if not len(conv_states) == len(ssm_states) == len(offsets):
            got = f"{len(conv_states)} and {len(ssm_states)}"
            raise ValueError(f"states are due after {offsets} tokens, {len(offsets)} of each kind (got {got})")
        states = list(zip(conv_states, ssm_states, strict=True))
        for conv, ssm in states:
            if conv.shape != (1, *self.conv_shape) or ssm.shape != (1, *self.ssm_shape):
                raise ValueError(
                    f"states must be [1, {self.conv_shape}] and [1, {self.ssm_shape}] (got {conv.shape} and {ssm.shape})"
                )
        if self._state is None:
            self.growths += 1
        start = self.length
        for offset, state in zip(offsets, states, strict=True):
            # Contiguous: a slice of what a forward computed would keep all of that alive.
            conv, ssm = (mx.contiguous(array.astype(mx.float32)) for array in state)
            self._state, self.length = (conv, ssm), start + offset
            if self._captures is not None:
                self._captures.visit(self.length, self.length, self._capture)

    def can_rewind(self, n: int) -> bool:
        return n == 0

    def snapshot(self, start: int = 0) -> StateSnapshot | None:
        snapshot = self._capture(start, self.length) if self.length > start else None
        if snapshot is not None:
            mx.eval(snapshot.arrays())
        return snapshot

    def _capture(self, base: int, offset: int) -> StateSnapshot | None:
        return None if self._state is None else StateSnapshot(0, offset, [compact(array) for array in self._state])

    def _restore(self, snapshot: StateSnapshot, target: int) -> bool:
        if target != snapshot.stop:
            return False
        conv, ssm = snapshot.arrays()
        self._state, self.length = (conv, ssm), target
        return True

    def merge(self, parent: StateSnapshot | None, child: StateSnapshot | None) -> StateSnapshot | None:
        return only_the_later(parent, child)

    def split(self, snapshot: StateSnapshot, at: int) -> tuple[StateSnapshot | None, StateSnapshot | None]:
        return None, snapshot

    def free(self) -> None:
        self._drop_captures()
        self._state, self.length = None, 0

    def checkpoint(self) -> Any:
        return self.length, self._state  # arrays are never written to

    def rollback(self, checkpoint: Any) -> None:
        self.length, self._state = checkpoint
        self._recapture()

    def arrays(self) -> list[mx.array]:
        """The state, and what captures hold until they are taken, so that one evaluation covers both."""
        captured = [] if self._captures is None else self._captures.captured()
        return [*(self._state or ()), *(array for snapshot in captured for array in snapshot.arrays())]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._state or ())
