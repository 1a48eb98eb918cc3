"""What is paged out of a state: a stretch of its tokens, or all of it at one point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

__all__ = ["StateSnapshot", "compact"]


class Source(Protocol):
    """A state whose live buffers a lazy snapshot names."""

    _lazy: Any  # of StateSnapshot: the lazy ones, to be copied out before their slots are overwritten or dropped

    def copy(self, start: int, stop: int) -> list[mx.array]: ...


class StateSnapshot:
    """Tokens [start, stop) of a state that grows, or what a state of fixed size holds after `stop` tokens (start is 0 then).

    A lazy one owns nothing: it names tokens in the buffers of `source`, which copies them out before it overwrites or drops
    them. It must hold no array: with another handle on a buffer each write would copy the whole buffer. An owned one holds
    compact copies. Whoever holds a snapshot closes it, or drops it.
    """

    def __init__(self, start: int, stop: int, arrays: Sequence[mx.array] = (), source: Source | None = None) -> None:
        self.start = start
        self.stop = stop
        self.source = source  # None: not lazy
        self._arrays = list(arrays)
        self._hook: Callable[[int], None] | None = None
        self._is_closed = False
        if source is not None:
            source._lazy.add(self)

    @property
    def is_lazy(self) -> bool:
        return self.source is not None

    @property
    def nbytes(self) -> int:
        """Bytes that it owns; 0 while lazy and once closed."""
        return sum(array.nbytes for array in self._arrays)

    def arrays(self) -> list[mx.array]:
        """What it holds, in the state's order; a lazy one is copied out first. Do not write to them."""
        self.materialize()
        if self._is_closed:
            raise ValueError(f"the snapshot of tokens {self.start} to {self.stop} was closed before; take another one")
        return self._arrays

    def materialize(self) -> None:
        """Copy out what is still lazy, and report it to the hook."""
        if self.source is None:
            return
        arrays = self.source.copy(self.start, self.stop)
        # Waited for: the buffer can be written in place only when no copy is still reading it.
        mx.eval(arrays)
        self._arrays = arrays
        self._leave()
        if self._hook is not None:
            self._hook(self.nbytes)

    def set_materialize_hook(self, hook: Callable[[int], None] | None) -> None:
        """`hook` is called once, with the bytes that become owned, when a lazy snapshot is copied out; None: nobody is."""
        self._hook = hook

    def close(self) -> None:
        """Release what it holds; it can be restored no more."""
        self._leave()
        self._arrays, self._hook, self._is_closed = [], None, True

    def _leave(self) -> None:
        if self.source is not None:
            self.source._lazy.discard(self)
            self.source = None


def compact(array: mx.array) -> mx.array:
    """A copy that shares no memory. (mx.contiguous returns the array itself, or a share of its buffer, where it can.)"""
    return mx.concatenate([array, array[:0]], axis=0)
