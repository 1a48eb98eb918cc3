"""The target protocol: what an engine's adapter offers so that schedules can be replayed on it.

A target is an entry point of group `decodegate.targets`: a class without constructor arguments that has this protocol.
Adapters run in worker processes only; importing an adapter module must not import the engine it adapts (the worker has to set
up paths and BLAS first), so heavy imports stand inside `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

__all__ = ["Capabilities", "GreedyResult", "Loaded", "Session", "SnapshotSession", "Target"]


@dataclass(frozen=True)
class Capabilities:
    """What a target can do. A capability is True, or the reason (text) why the target cannot do it.

    A check names the capabilities that its schedules need; where one is text the cell ends `unsupported` with that text.
    `lacks` is what one layout lacks of them: layout -> capability -> reason.
    """

    families: frozenset[str] | None = None  # None: any family, load() decides
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    layouts: frozenset[str] = frozenset({"dense"})
    rewind: bool | str = True
    all_rows: bool | str = True  # feed ... all
    chunk: bool | str = True  # feed ... chunk=C
    batch: bool | str = True  # step a+b
    several_sequences: bool | str = True
    greedy: bool | str = True
    greedy_rows: bool | str = True  # greedy yields logits, not only token ids
    pad: bool | str = "the adapter offers no padded prefill"  # feed ... pad=P
    snapshot: bool | str = "the adapter offers no snapshots"  # save, restore
    lacks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def able(self, capability: str, layout: str) -> bool | str:
        """True, or the reason why not, in this layout."""
        lacking = self.lacks.get(layout, {}).get(capability)
        return getattr(self, capability) if lacking is None else lacking


@dataclass(frozen=True)
class GreedyResult:
    tokens: list[int]  # the N tokens the target chose
    rows: np.ndarray | None  # float32 [N, vocab]: row i is the one from which tokens[i + 1] would be chosen; None: ids only


class Session(Protocol):
    """One engine with its sequences. All logits are float32 [rows, vocab], row i after having fed the i-th token.

    A call that the engine refuses by declaration raises harness.outcomes.Refusal and leaves all sequences as they were.
    """

    def open(self, sequence: str) -> None: ...

    def feed(self, sequence: str, tokens: list[int], *, all_rows: bool, chunk: int | None) -> np.ndarray:
        """Prefill tokens after what the sequence holds; [1, vocab], or [len(tokens), vocab] with all_rows.

        A session with the capability `pad` takes `pad: int` too: each forward is padded on the right to this many rows, which
        leave nothing behind.
        """
        ...

    def step(self, tokens: dict[str, int]) -> np.ndarray:
        """One decode step for each named sequence in one call; [len(tokens), vocab] in the order of `tokens`."""
        ...

    def greedy(self, sequence: str, count: int) -> GreedyResult:
        """Decode count tokens, each the arg max of the row before; the first is chosen from the last row that was computed.

        All chosen tokens have been fed when it returns, so that the sequence is count tokens longer.
        """
        ...

    def rewind(self, sequence: str, count: int) -> None: ...

    def close(self, sequence: str) -> None: ...

    def counters(self) -> dict[str, int]:
        """What ran, as counts since the session started.

        Checks ask for prefill_chunks, decode_steps, batched_rows, padded_rows, snapshots, restores and empty_slice_forwards,
        each where it shows that the feature ran; a cell without it is vacuous.
        """
        ...


class SnapshotSession(Session, Protocol):
    """A session with the capability `snapshot`."""

    def save(self, sequence: str, snapshot: str) -> None:
        """Keep a copy of what the sequence holds under this name; an earlier one of the name is dropped."""
        ...

    def restore(self, sequence: str, snapshot: str) -> None:
        """The sequence, opened where it is not and whatever it held, holds what the snapshot was taken of."""
        ...


class Loaded(Protocol):
    """A model that is loaded in one dtype and layout."""

    def start(self) -> Session: ...


class Target(Protocol):
    name: str
    capabilities: Capabilities

    def require(self) -> None:
        """Raise Infra with the install command where the engine is not installed. Cheap: it must not load the engine."""
        ...

    def environment(self) -> dict[str, str]:
        """Versions, device, BLAS and flags that change numerics, for the record's header; may load the engine."""
        ...

    def load(self, checkpoint: Path, *, dtype: str, layout: str) -> Loaded: ...


@dataclass(frozen=True)
class Row:
    """One row of logits that a replay yielded: the logits after `histories[history][: position + 1]` were fed."""

    operation: int  # index into the schedule's operations
    history: int
    position: int
    logits: np.ndarray = field(repr=False)  # float32 [vocab]; empty where the target gives token ids only
    chosen: int | None = None  # the next token, where the target chose it itself (greedy)
