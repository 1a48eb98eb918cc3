"""Growing state: keys and values of every token so far."""

from __future__ import annotations

import mlx.core as mx

from engine.state.buffers import STEP, TokenBuffers

__all__ = ["STEP", "KVState"]


class KVState(TokenBuffers):
    """Buffers [1, heads, capacity, dim]. Key and value dims may differ (values of latent attention are rotary keys)."""

    axis = 2

    def append(self, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        """keys [1, heads, n, k_dim], values [1, heads, n, v_dim]. Returns all live keys and values and all new ones.

        The last `padding` of the new ones do not become live: they stand behind every query that counts, and the next append
        overwrites them.
        """
        stop = self._append((keys, values), padding)
        all_keys, all_values = self._view(0, stop)
        return all_keys, all_values

    def view(self) -> tuple[mx.array, mx.array]:
        """All live keys and values, of which there must be some, for a reader that adds none. Not to be kept."""
        keys, values = self._view(0, self.length)
        return keys, values
