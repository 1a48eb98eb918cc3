"""Runtime faults of our engine, for the power of the checks: each breaks one seam of the loaded engine while it is planted.

A fault is worth something only where it was in effect: `Planted.called` says so, and a figure without it does not count. Faults
stand at seams that all families share (spans, states, the engine's calls), so that a new family is covered by the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from harness.cases.case import GROWING, RECURRENT, RING, ROPE
from harness.fault import Fault, Patch, Planted
from harness.state_faults import STATES

__all__ = ["ENGINE", "Fault", "Patch", "Planted"]


def _everywhere(original: object, replacement: Callable[..., Any]) -> list[Patch]:
    """The patches of every name in a loaded engine module that is bound to this object."""
    modules = [module for name, module in sys.modules.items() if name == "engine" or name.startswith("engine.")]
    return [
        (module, name, replacement) for module in modules for name, value in list(vars(module).items()) if value is original
    ]


def _rope_offset_off_by_one(planted: Planted) -> list[Patch]:
    from engine import engine
    from engine.state import Span

    def span(start: int, length: int, offset: int, slots: Any, padding: int) -> Span:
        if offset > 0:
            planted.mark()
            offset += 1
        return Span(start, length, offset, slots, padding)

    return [(engine, "Span", span)]


def _batch_shares_first_offset(planted: Planted) -> list[Patch]:
    from engine import engine
    from engine.state import Span

    first = 0

    def span(start: int, length: int, offset: int, slots: Any, padding: int) -> Span:
        nonlocal first
        if start == 0:
            first = offset
        elif offset != first:
            planted.mark()
        return Span(start, length, first, slots, padding)

    return [(engine, "Span", span)]


def _mask_missing_on_later_chunks(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine.layers import mla
    from engine.layers.attention import attention

    causal = mla.causal

    def unmasked(q: mx.array, k: mx.array, v: mx.array, *args: Any, **options: Any) -> mx.array:
        count = q.shape[2]
        if count == 1 or count == k.shape[2]:
            return attention(q, k, v, *args, **options)
        planted.mark()  # a query alone is the last one, and sees every key
        return mx.concatenate([attention(q[:, :, i : i + 1], k, v, *args, **options) for i in range(count)], axis=2)

    def open_to_all(n: int, length: int) -> mx.array:
        if n == length:
            return causal(n, length)
        planted.mark()
        return mx.zeros((n, length))

    return [*_everywhere(attention, unmasked), (mla, "causal", open_to_all)]  # where attention runs on the latents


def _kv_write_one_slot_early(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine.state import KVState

    append = KVState.append

    def early(self: KVState, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        if self.length == 0:
            return append(self, keys, values, padding)
        planted.mark()
        self.rewind(1)
        doubled = [mx.concatenate([new[:, :, :1], new], axis=2) for new in (keys, values)]
        return append(self, doubled[0], doubled[1], padding)

    return [(KVState, "append", early)]


def _first_key_forgotten(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine.state import KVState

    append = KVState.append

    def without(self: KVState, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        filled = self.length > 0
        seen = append(self, keys, values, padding)
        if not filled:
            return seen
        planted.mark()
        return seen[0][:, :, 1:], seen[1][:, :, 1:]

    return [(KVState, "append", without)]


def _padding_enters_the_state(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine.state import KVState

    append = KVState.append

    def whole(self: KVState, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        if padding:
            planted.mark()
        return append(self, keys, values)

    return [(KVState, "append", whole)]


def _rewind_moves_only_the_counter(planted: Planted) -> list[Patch]:
    from engine.state import KVState

    def rewind(self: KVState, n: int) -> None:
        if n > 0:
            planted.mark()

    return [(KVState, "rewind", rewind)]


def _rewind_drops_one_too_few(planted: Planted) -> list[Patch]:
    from engine.state import KVState

    original = KVState.rewind

    def rewind(self: KVState, n: int) -> None:
        if n > 0:
            planted.mark()
            original(self, n - 1)

    return [(KVState, "rewind", rewind)]


def _last_row_from_wrong_index(planted: Planted) -> list[Patch]:
    from engine.engine import Engine

    forward = Engine._forward

    def wrong(self: Engine, tokens: Any, states: Any, lengths: Any, rows: Any, *padding: int) -> Any:
        if rows and rows[-1] > 0:
            planted.mark()
            rows = [*rows[:-1], rows[-1] - 1]
        return forward(self, tokens, states, lengths, rows, *padding)

    return [(Engine, "_forward", wrong)]


def _stale_state_after_close(planted: Planted) -> list[Patch]:
    from engine.engine import Engine, SequenceId

    open_, close = Engine.open, Engine.close
    left: dict[Engine, Any] = {}  # the slots of the sequence that was closed last

    def stale_open(self: Engine) -> SequenceId:
        sequence = open_(self)
        if self in left:
            planted.mark()
            if self.owns_state:
                self._sequences[sequence].slots = left.pop(self)
            else:
                self.model._caches = left.pop(self)  # type: ignore[attr-defined]  # of engine.models.layouts.BothLayouts
        return sequence

    def leaky_close(self: Engine, sequence: SequenceId) -> None:
        left[self] = self._sequences[sequence].slots if self.owns_state else self.model._caches  # type: ignore[attr-defined]
        self._sequences[sequence].slots = []  # which are not freed
        close(self, sequence)

    return [(Engine, "open", stale_open), (Engine, "close", leaky_close)]


def _sequences_share_state(planted: Planted) -> list[Patch]:
    from engine.engine import Engine, SequenceId

    open_ = Engine.open

    def shared(self: Engine) -> SequenceId:
        others = list(self._sequences.values())
        sequence = open_(self)
        if others:
            planted.mark()
            self._sequences[sequence].slots = others[0].slots
        return sequence

    return [(Engine, "open", shared)]


def _restore_hands_out_the_live_state(planted: Planted) -> list[Patch]:
    from engine.engine import Engine, SequenceId, Snapshot

    snapshot, restore = Engine.snapshot, Engine.restore
    live: dict[int, tuple[Snapshot, Any]] = {}  # the snapshot is kept, so that its id stays its own

    def remembering(self: Engine, sequence: SequenceId) -> Snapshot:
        taken = snapshot(self, sequence)
        live[id(taken)] = taken, self._sequences[sequence].slots
        return taken

    def aliased(self: Engine, taken: Snapshot, into: SequenceId | None = None) -> SequenceId:
        sequence = restore(self, taken, into)
        planted.mark()
        self._sequences[sequence].slots = live[id(taken)][1]
        return sequence

    return [(Engine, "snapshot", remembering), (Engine, "restore", aliased)]


def _snapshot_lacks_the_last_token(planted: Planted) -> list[Patch]:
    from engine.state import KVState

    restore = KVState.restore

    def short(self: KVState, snapshot: Any, target: int) -> bool:
        reached = restore(self, snapshot, target)
        if self.length:
            planted.mark()
            self.rewind(1)
        return reached

    return [(KVState, "restore", short)]


def _batch_rows_swapped(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine.engine import Engine

    step = Engine.step

    def swapped(self: Engine, tokens: Mapping[Any, int]) -> mx.array:
        rows = step(self, tokens)
        if len(tokens) == 1:
            return rows
        planted.mark()
        return mx.concatenate([rows[1:], rows[:1]])

    return [(Engine, "step", swapped)]


def _greedy_token_off_by_one(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine.sampling import Sampler

    choose = Sampler.choose

    def next_id(self: Sampler, logits: mx.array) -> mx.array:
        planted.mark()
        return (choose(self, logits) + 1) % logits.shape[-1]

    return [(Sampler, "choose", next_id)]


def _noise_in_logits(planted: Planted) -> list[Patch]:
    from engine.engine import Engine

    forward = Engine._forward
    calls = 0

    def noisy(self: Engine, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        planted.mark()
        return forward(self, *arguments) * (1 + 1e-2 * calls)

    return [(Engine, "_forward", noisy)]


_ROPE, _GROWING, _ATTENTION = frozenset({ROPE}), frozenset({GROWING}), frozenset({GROWING, RING})
_ALL = (
    Fault(
        "rope_offset_off_by_one",
        "positions are one too high wherever the cache is not empty",
        _rope_offset_off_by_one,
        _ROPE,
    ),
    Fault("batch_shares_first_offset", "all rows of a batch take the position of the first", _batch_shares_first_offset, _ROPE),
    Fault(
        "mask_missing_on_later_chunks",
        "queries of a chunk on a filled cache see later keys",
        _mask_missing_on_later_chunks,
        _ATTENTION,
    ),
    Fault(
        "kv_write_one_slot_early",
        "new keys and values also overwrite those of the token before",
        _kv_write_one_slot_early,
        _GROWING,
    ),
    Fault(
        "first_key_forgotten",
        "on a filled cache no query sees the first token (planted where no position and no recurrent state can be wrong)",
        _first_key_forgotten,
        _GROWING,
        unless=frozenset({ROPE, RECURRENT}),
    ),
    Fault(
        "rewind_moves_only_the_counter",
        "a rewind leaves the dropped keys where attention sees them",
        _rewind_moves_only_the_counter,
        _GROWING,
    ),
    Fault(
        "rewind_drops_one_too_few",
        "a rewind leaves one of the dropped tokens in the cache",
        _rewind_drops_one_too_few,
        _GROWING,
    ),
    Fault("last_row_from_wrong_index", "prefill gives the row before the last", _last_row_from_wrong_index),
    Fault(
        "stale_state_after_close", "the next sequence starts on the state of the one that was closed", _stale_state_after_close
    ),
    Fault("sequences_share_state", "a second sequence writes into the state of the first", _sequences_share_state),
    Fault("padding_enters_the_state", "rows of padding are kept as if they were tokens", _padding_enters_the_state, _GROWING),
    Fault(
        "restore_hands_out_the_live_state",
        "a restored sequence writes into the state that the snapshot was taken of",
        _restore_hands_out_the_live_state,
    ),
    Fault("snapshot_lacks_the_last_token", "a restored state ends one token early", _snapshot_lacks_the_last_token, _GROWING),
    Fault("batch_rows_swapped", "the rows of a batched step come back in another order", _batch_rows_swapped),
    Fault("greedy_token_off_by_one", "the id after the likeliest one is chosen", _greedy_token_off_by_one),
    Fault("noise_in_logits", "logits grow by a hundredth with each call", _noise_in_logits),
    *STATES,
)
ENGINE: dict[str, Fault] = {fault.name: fault for fault in _ALL}
