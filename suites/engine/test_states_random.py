"""Random lives of states: whatever is written, taken back, paged out and in, snapshots equal eager copies of their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from engine.state import KVState, RingKVState, StateSnapshot, TokenTail
from engine.state.buffers import TokenBuffers
from suites.engine.state_rows import ids, rows


@dataclass
class Life:
    """A state, the tokens that it should hold, and snapshots with the tokens that they should hold."""

    state: TokenBuffers
    rng: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    snapshots: list[tuple[StateSnapshot, list[int]]] = field(default_factory=list)
    written: int = 0
    owned: int = 0  # bytes of its snapshots, by what hooks reported

    @property
    def window(self) -> int | None:
        return self.state.window if isinstance(self.state, RingKVState) else None

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def feed(self) -> None:
        n, padding = 1 + self.below(9), self.below(3)
        if self.below(12) == 0:
            n += 250
        new = list(range(self.written + 1, self.written + 1 + n))
        self.written += n
        before = self.tokens[max(0, len(self.tokens) - self.reach) :]
        assert self.append([*new, *[-7] * padding], padding) == [*before, *new, *[-7] * padding]
        self.tokens += new

    @property
    def reach(self) -> int:
        """Tokens before the new ones that an append returns."""
        if isinstance(self.state, TokenTail):
            return self.state.width
        return len(self.tokens) if self.window is None else self.window - 1

    def append(self, new: list[int], padding: int) -> list[int]:
        if isinstance(self.state, TokenTail):
            return [token for token in self.state.append(mx.array(new), padding).tolist() if token != -1]
        assert isinstance(self.state, (KVState, RingKVState))
        return ids(self.state.append(*rows(new), padding))

    def rewind(self) -> None:
        n = self.below(len(self.tokens) + 2)
        allowed = n <= len(self.tokens) and (n == 0 or self.window is None or len(self.tokens) <= self.window)
        assert self.state.can_rewind(n) == allowed
        assert self.state.restore(None, len(self.tokens) - n) == allowed
        if allowed:
            del self.tokens[len(self.tokens) - n :]

    def failed_call(self) -> None:
        checkpoint, tokens = self.state.checkpoint(), list(self.tokens)
        for _ in range(1 + self.below(3)):
            self.feed()
        self.state.rollback(checkpoint)
        self.tokens = tokens

    def page_out(self) -> None:
        start = self.below(len(self.tokens) + 1)
        self.keep(self.state.snapshot(start), start, self.tokens)

    def keep(self, snapshot: StateSnapshot | None, start: int, tokens: list[int]) -> None:
        if start == len(tokens):
            assert snapshot is None
            return
        assert snapshot is not None
        start = start if self.window is None else max(0, len(tokens) - self.window)
        assert (snapshot.start, snapshot.stop) == (start, len(tokens))
        snapshot.set_materialize_hook(self.report)
        self.snapshots.append((snapshot, tokens[start:]))

    def report(self, nbytes: int) -> None:
        self.owned += nbytes

    def page_in(self) -> None:
        if not self.snapshots:
            return
        snapshot, tokens = self.snapshots[self.below(len(self.snapshots))]
        target = snapshot.start + self.below(len(tokens) + 2)
        if self.window is None:
            allowed = len(self.tokens) >= snapshot.start and target <= snapshot.stop
        else:
            allowed = target == snapshot.stop or (target < snapshot.stop <= self.window)
        assert self.state.restore(snapshot, target) == allowed
        if allowed:
            base = self.tokens[: snapshot.start] if self.window is None else [0] * snapshot.start
            self.tokens = (base + tokens)[:target]

    def split(self) -> None:
        if not self.snapshots or self.window is not None:
            return
        snapshot, tokens = self.snapshots.pop(self.below(len(self.snapshots)))
        if not snapshot.is_lazy:
            self.owned -= snapshot.nbytes
        at = snapshot.start + self.below(len(tokens) + 1)
        for part in self.state.split(snapshot, at):
            if part is not None:
                part.set_materialize_hook(self.report)
                self.owned += part.nbytes
                low = part.start - snapshot.start
                self.snapshots.append((part, tokens[low : low + part.stop - part.start]))

    def merge(self) -> None:
        """Two that join, where there are some."""
        if self.window is not None:
            return
        for i, (parent, before) in enumerate(self.snapshots):
            for j, (child, after) in enumerate(self.snapshots):
                if parent.stop == child.start and i != j:
                    self.owned -= parent.nbytes + child.nbytes
                    merged = self.state.merge(parent, child)
                    assert merged is not None
                    merged.set_materialize_hook(self.report)
                    self.owned += merged.nbytes
                    kept = [pair for k, pair in enumerate(self.snapshots) if k not in (i, j)]
                    self.snapshots = [*kept, (merged, before + after)]
                    return

    def free(self) -> None:
        if self.below(6) == 0:
            self.state.free()
            self.tokens = []

    def drop(self) -> None:
        if self.snapshots:
            snapshot, _ = self.snapshots.pop(self.below(len(self.snapshots)))
            self.owned -= snapshot.nbytes
            snapshot.close()

    def check(self) -> None:
        assert self.state.length == len(self.tokens)
        assert self.owned == sum(snapshot.nbytes for snapshot, _ in self.snapshots)
        for snapshot, tokens in self.snapshots:
            assert (
                self.contents(self.state.copy(snapshot.start, snapshot.stop) if snapshot.is_lazy else snapshot.arrays())
                == tokens
            )

    def contents(self, arrays: list[mx.array]) -> list[int]:
        return arrays[0].tolist() if isinstance(self.state, TokenTail) else ids(arrays)


ACTIONS = ("feed", "feed", "feed", "rewind", "failed_call", "page_out", "page_out", "page_in", "split", "merge", "free", "drop")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("make", [KVState, lambda: RingKVState(5), lambda: RingKVState(300), lambda: TokenTail(3)])
def test_every_snapshot_equals_an_eager_copy_through_any_life(make, seed: int):
    life = Life(make(), np.random.default_rng(seed))
    for _ in range(60):
        getattr(life, ACTIONS[life.below(len(ACTIONS))])()
        life.check()
