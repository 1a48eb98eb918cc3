"""Recurrent state: the tail of a causal convolution and the matrix state of a recurrence (Mamba2, linear attention)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.errors import Refused

__all__ = ["RecurrentState"]


class RecurrentState:
    """conv [1, *conv_shape] and ssm [1, *ssm_shape], float32 whatever the model computes in."""

    def __init__(self, conv_shape: tuple[int, int], ssm_shape: tuple[int, int, int]) -> None:
        self.conv_shape, self.ssm_shape = conv_shape, ssm_shape
        self.length = 0
        self.growths = 0
        self._state: tuple[mx.array, mx.array] | None = None

    def get(self) -> tuple[mx.array, mx.array]:
        """The state after `length` tokens; zeros before the first. Never advances."""
        if self._state is None:
            return mx.zeros((1, *self.conv_shape)), mx.zeros((1, *self.ssm_shape))
        return self._state

    def splits(self, n: int) -> list[int]:
        """Where a forward of n tokens has to give boundary states: offsets strictly inside it, relative to its start."""
        return []

    def put(self, n: int, conv_states: Sequence[mx.array], ssm_states: Sequence[mx.array]) -> None:
        """The states at each of `splits(n)` and, last, after the n tokens (without padding)."""
        if not len(conv_states) == len(ssm_states) == len(self.splits(n)) + 1:
            raise ValueError(
                f"{len(self.splits(n)) + 1} boundary states are due (got {len(conv_states)} and {len(ssm_states)})"
            )
        if self._state is None:
            self.growths += 1
        self._state = conv_states[-1].astype(mx.float32), ssm_states[-1].astype(mx.float32)
        self.length += n

    def can_rewind(self, n: int) -> bool:
        return n == 0

    def rewind(self, n: int) -> None:
        if not self.can_rewind(n):
            raise Refused(f"cannot rewind {n} tokens of a recurrent state")

    def snapshot(self) -> tuple[int, mx.array, mx.array] | None:
        return None if self._state is None else (self.length, *self._state)

    def restore(self, snapshot: tuple[int, mx.array, mx.array] | None) -> None:
        self.length, self._state = (0, None) if snapshot is None else (snapshot[0], snapshot[1:])

    def arrays(self) -> list[mx.array]:
        return [] if self._state is None else list(self._state)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())
