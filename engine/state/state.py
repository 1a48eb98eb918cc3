"""The contract of a slot: the state that one mixer keeps of one sequence."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

__all__ = ["State"]


class State(Protocol):
    """A slot. Slots are not layers: a mixer may keep several, a layer none. Position is the sequence's, never a slot's.

    `append` has the signature that its mixer needs (a KV slot takes keys and values) and takes `padding`, how many of the new
    tokens, the last ones, never become part of the state; all else is common.
    """

    length: int  # live tokens
    growths: int  # how often a buffer was allocated or enlarged

    def can_rewind(self, n: int) -> bool:
        """Whether the last n tokens can be dropped: a KV always can, a wrapped ring or a recurrence only for n = 0."""
        ...

    def rewind(self, n: int) -> None:
        """Drop the last n tokens. Raises Refused where `can_rewind(n)` is false; the state is unchanged then."""
        ...

    def snapshot(self) -> Any:
        """A copy of the state that later writes and rewinds do not change; None where there is nothing to keep."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Become what `snapshot` was taken from."""
        ...

    def arrays(self) -> list[mx.array]:
        """All arrays the state holds, to evaluate them; empty before the first append."""
        ...

    @property
    def nbytes(self) -> int: ...
