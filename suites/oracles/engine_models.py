"""Checkpoint directories in our own engine, so that it stands beside a third implementation with no reference between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["chunked", "logits", "stepped"]


def _session(directory: Path):
    from harness.targets.engine import EngineTarget

    return EngineTarget().load(Path(directory), dtype="float32", layout="dense").start()


def logits(directory: Path, tokens: list[int]) -> np.ndarray:
    """float32 [T, vocab] of one prefill; the checkpoint is loaded strictly."""
    session = _session(directory)
    session.open("a")
    return session.feed("a", tokens, all_rows=True, chunk=None)


def stepped(directory: Path, tokens: list[int], first: int) -> np.ndarray:
    """The same, the tokens after the first `first` one at a time."""
    session = _session(directory)
    session.open("a")
    rows = [session.feed("a", tokens[:first], all_rows=True, chunk=None)]
    return np.concatenate(rows + [session.step({"a": token}) for token in tokens[first:]])


def chunked(directory: Path, tokens: list[int], size: int) -> np.ndarray:
    """The same, in pieces of `size` tokens."""
    session = _session(directory)
    session.open("a")
    pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    return np.concatenate([session.feed("a", piece, all_rows=True, chunk=None) for piece in pieces])
