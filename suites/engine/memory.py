"""Memory of live arrays, as a number that a test can compare."""

from __future__ import annotations

import gc

import mlx.core as mx

__all__ = ["active_memory"]


def active_memory() -> int:
    """Bytes that arrays hold, once garbage is collected and the stream has let go of what its last work used: it may do so
    after the results are there. What is allocated next counts its own size: MLX would take a larger buffer that it has kept of
    an array that is gone, and count all of that."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()
