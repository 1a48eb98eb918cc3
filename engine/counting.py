"""Counters of what the layers of a forward did: which path, how often.

The engine counts into its own `counters` while it runs a forward; a layer that is called outside one is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["count", "counting"]

_counters: ContextVar[Counter[str] | None] = ContextVar("counters", default=None)


def count(name: str, by: int = 1) -> None:
    """Add to a counter of the engine whose forward runs in this thread."""
    counters = _counters.get()
    if counters is not None:
        counters[name] += by


@contextmanager
def counting(counters: Counter[str]) -> Iterator[None]:
    """Let `count` add to these counters meanwhile."""
    token = _counters.set(counters)
    try:
        yield
    finally:
        _counters.reset(token)
