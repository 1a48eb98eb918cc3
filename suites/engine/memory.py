"""Memory of live arrays, as a number that a test can compare."""

from __future__ import annotations

import gc

import mlx.core as mx

__all__ = ["active_memory"]


def active_memory() -> int:
    """Bytes that arrays hold, once garbage is collected and the stream has let go of what its last work used: it may do so
    after the results are there."""
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
