"""The contract of a slot: the state that one mixer keeps of one sequence, and how it is paged out and in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from engine.errors import Refused
from engine.state.captures import Captures
from engine.state.snapshot import StateSnapshot

__all__ = ["State"]


class State(ABC):
    """A slot. Slots are not layers: a mixer may keep several, a layer none. Position is the sequence's, never a slot's.

    What takes new tokens has the signature that its mixer needs (a KV slot's `append` takes keys and values); all else is
    common:

    | kind      | rewind              | restore needs                          | a snapshot holds | split | merge      |
    |-----------|---------------------|----------------------------------------|------------------|-------|------------|
    | growing   | always              | the tokens before snapshot.start       | [start, stop)    | yes   | joins both |
    | ring      | until it has wrapped| nothing; its stop (any, if unwrapped)  | the window       | no    | the later  |
    | recurrent | never               | nothing; exactly its stop              | all              | no    | the later  |
    """

    def __init__(self) -> None:
        self.length = 0  # live tokens
        self.growths = 0  # how often a buffer was allocated or enlarged
        self._captures: Captures | None = None

    @abstractmethod
    def can_rewind(self, n: int) -> bool:
        """Whether the last n tokens can be dropped. The answer depends on the length alone, not on what buffers still hold."""

    def rewind(self, n: int) -> None:
        """Drop the last n tokens. Raises Refused where `can_rewind(n)` is false; the state is unchanged then."""
        if not self.can_rewind(n):
            raise Refused(f"cannot rewind {n} tokens of a state that holds {self.length} ({type(self).__name__})")
        self.length -= n
        self._recapture()

    @abstractmethod
    def snapshot(self, start: int = 0) -> StateSnapshot | None:
        """What the tokens from `start` on left in the state; later writes do not change it. None: there are none."""

    def restore(self, snapshot: StateSnapshot | None, target: int) -> bool:
        """Become what the state was after `target` tokens: by a rewind (None), or from a snapshot, which stays as it is.

        False, and no change, where that cannot be reached (the table above; no snapshot reaches beyond its stop).
        """
        if target < 0:
            return False
        if snapshot is None:
            reached = self.can_rewind(self.length - target)
            if reached:
                self.length = target
        else:
            reached = self._restore(snapshot, target)
        if reached:
            self._recapture()
        return reached

    @abstractmethod
    def _restore(self, snapshot: StateSnapshot, target: int) -> bool: ...

    def prepare_snapshots(self, offsets: Sequence[int]) -> None:
        """Have snapshots taken at these lengths, as soon as writes reach them; see `Captures`.

        Raises ValueError for a length that has passed, for lengths that do not ascend, and where earlier ones were not taken.
        """
        if self._captures is not None:
            raise ValueError("captures are scheduled already; take_snapshots() collects them and ends the schedule")
        if offsets:
            self._captures = Captures(offsets, self.length)
            self._captures.visit(self.length, self.length, self._capture)

    def take_snapshots(self) -> list[StateSnapshot | None]:
        """One for each scheduled length; ends the schedule. None: no tokens to keep, or never reached."""
        captures, self._captures = self._captures, None
        return [] if captures is None else captures.take()

    @abstractmethod
    def _capture(self, base: int, offset: int) -> StateSnapshot | None:
        """A snapshot at `offset`, which is at most the length; of a growing state from `base` on."""

    def _recapture(self) -> None:
        """After the length was set to another one without a write."""
        if self._captures is not None:
            self._captures.rewind(self.length)
            self._captures.visit(self.length, self.length, self._capture)

    @abstractmethod
    def merge(self, parent: StateSnapshot | None, child: StateSnapshot | None) -> StateSnapshot | None:
        """One snapshot of both, of which the child begins where the parent ends. Takes them over: neither is used after it."""

    @abstractmethod
    def split(self, snapshot: StateSnapshot, at: int) -> tuple[StateSnapshot | None, StateSnapshot | None]:
        """(tokens before `at`, tokens from it on). Takes the snapshot over. One that cannot be cut is (None, snapshot)."""

    @abstractmethod
    def free(self) -> None:
        """Drop everything, the schedule of captures too. Lazy snapshots that others hold are copied out and survive."""

    @abstractmethod
    def checkpoint(self) -> Any:
        """What `rollback` needs to undo all that is written from here on; costs nothing to take."""

    @abstractmethod
    def rollback(self, checkpoint: Any) -> None:
        """Become what the state was at `checkpoint`, whatever was written since. Reaches where no rewind does."""

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """All arrays the state holds, to evaluate them; empty before the first append."""

    @property
    def nbytes(self) -> int:
        """Bytes of the live state; snapshots count their own."""
        return sum(array.nbytes for array in self.arrays())

    def _drop_captures(self) -> None:
        if self._captures is not None:
            for snapshot in self._captures.captured():
                snapshot.close()
            self._captures = None


def only_the_later(parent: StateSnapshot | None, child: StateSnapshot | None) -> StateSnapshot | None:
    """`merge` of states whose snapshot holds all that matters at its stop."""
    if parent is not None:
        parent.close()
    return child
