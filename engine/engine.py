"""The engine: sequences, their state, and forwards over them.

One entry decodes every batch size: a step over several sequences is one forward over a row of tokens, one span each. A call
either succeeds and has evaluated all it computed, or raises and leaves every sequence as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

import mlx.core as mx
import numpy as np

from engine.counting import counting
from engine.errors import Refused, RowsError, SequenceError
from engine.models.model import Model
from engine.state import SequenceStateLayout, Span, State, StateSnapshot

__all__ = ["PREFILL_CHUNK", "Engine", "SequenceId", "Snapshot"]

PREFILL_CHUNK = 2048  # tokens of one forward in prefill, which bounds the memory of activations
CLEAR_CACHE_FROM = 256  # tokens of a chunk whose buffers are given back: the next chunk's are larger and cannot reuse them

SequenceId = NewType("SequenceId", int)


@dataclass(frozen=True)
class _Mark:
    """Where a call began, to take the sequence back to after an error."""

    length: int
    checkpoints: list[Any]  # one per slot


@dataclass
class _Sequence:
    slots: list[State]
    length: int = 0  # the one position counter of the sequence
    growths: int = 0  # of its slots, as far as counted
    mark: _Mark | None = None  # of the last call that can still be taken back
    lost: bool = False  # an error struck while its state could not be taken back; the state is released


@dataclass(frozen=True)
class Snapshot:
    """A sequence's state after `length` tokens, for `Engine.restore`; later work on the sequence leaves it alone.

    Tokens are copied when the sequence overwrites or drops them, not before.
    """

    length: int
    states: tuple[StateSnapshot | None, ...] = field(repr=False)  # one per slot
    model: Model = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes that were copied so far."""
        return sum(state.nbytes for state in self.states if state is not None)


class Engine:
    """Runs one loaded model. Not thread-safe: one thread owns it.

    counters: opened, closed, prefill_tokens, prefill_chunks, padded_rows (of padded prefill), decode_steps (forwards),
    decode_rows (tokens decoded), batched_rows (rows of steps with two or more), batches_clamped (steps that had to be cut),
    empty_slice_forwards (that were handed no slots), cache_growths (allocations of slots), rewinds, rewound_tokens, snapshots,
    restores, reuse_declined (snapshots and restores that were refused).
    """

    def __init__(
        self,
        model: Model,
        *,
        layout: SequenceStateLayout = SequenceStateLayout.DENSE,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        """`self.model` is `model` in this layout, with runtime state of its own. Raises Refused where it has no such layout."""
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1 (got {prefill_chunk})")
        self.model = model.in_layout(layout)
        self.layout = layout
        self.prefill_chunk = prefill_chunk
        self.counters: Counter[str] = Counter()
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._opened = 0

    @property
    def owns_state(self) -> bool:
        """Whether the engine holds the sequences' states (DENSE) or the model holds that of one sequence (MODEL_OWNED)."""
        return self.layout is SequenceStateLayout.DENSE

    @property
    def max_batch(self) -> int | None:
        """Rows that one forward may have; None: any number."""
        return None if self.owns_state and self.model.supports_batching else 1

    def open(self) -> SequenceId:
        """A new empty sequence. Raises Refused in layout MODEL_OWNED while another sequence is open."""
        if self.owns_state:
            slots = self.model.make_slots()
        elif self._sequences:
            raise Refused("layout model_owned serves one sequence at a time; close the open one first")
        else:
            slots = []
            self.model.make_caches()
        return self._register(_Sequence(slots))

    def close(self, sequence: SequenceId) -> None:
        """Release the sequence and its state."""
        state = self._sequences.pop(sequence, None)
        if state is None:
            raise SequenceError(f"sequence {sequence} is not open (closed before, or of another engine)")
        self._release(state)
        self.counters["closed"] += 1

    def length(self, sequence: SequenceId) -> int:
        """Tokens the sequence holds."""
        return self._get(sequence).length

    def nbytes(self, sequence: SequenceId) -> int:
        """Bytes of the sequence's states; 0 where the model owns them."""
        return sum(slot.nbytes for slot in self._get(sequence).slots)

    def prefill(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        *,
        all_logits: bool = False,
        chunk: int | None = None,
        pad_to: int | None = None,
    ) -> mx.array:
        """Append tokens in forwards of at most `chunk` tokens (default: the engine's prefill_chunk).

        pad_to: each forward has exactly this many rows, so that shapes repeat (a forward takes no more tokens then); the rows
        behind the tokens are computed and never enter the state. Raises Refused where the model supports no padding.
        Returns the logits of the last token [1, vocab], or of all [len(tokens), vocab] with all_logits.
        """
        state = self._get(sequence)
        chunk = self.prefill_chunk if chunk is None else chunk
        if chunk < 1:
            raise SequenceError(f"chunk must be at least 1 (got {chunk})")
        if pad_to is not None:
            if not self.model.supports_padded_prefill:
                raise Refused(f"{self._served()} has no padded prefill; prefill without pad_to")
            if not 1 <= pad_to <= self.prefill_chunk:
                raise SequenceError(f"pad_to must be 1 to prefill_chunk = {self.prefill_chunk} (got {pad_to})")
            chunk = min(chunk, pad_to)
        if len(tokens) == 0:
            raise SequenceError("nothing to prefill: the list of tokens is empty")
        ids = self._checked(tokens)
        self._mark([state])
        parts = []
        try:
            for start in range(0, len(ids), chunk):
                piece = ids[start : start + chunk]
                is_last = start + len(piece) == len(ids)
                padding = 0 if pad_to is None else pad_to - len(piece)
                rows = range(len(piece)) if all_logits else [len(piece) - 1] if is_last else []
                row = mx.array(np.pad(piece, (0, padding)))
                logits = self._forward(row, [state], [len(row)], None if len(rows) == len(row) else rows, padding)
                wanted = [logits] if len(rows) else []
                self._evaluate(wanted, [state])
                self.counters["prefill_chunks"] += 1
                self.counters["padded_rows"] += padding
                parts += wanted
                if len(piece) >= CLEAR_CACHE_FROM:
                    mx.clear_cache()
        except BaseException:
            self._undo([state])
            raise
        self.counters["prefill_tokens"] += len(ids)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def step(self, tokens: Mapping[SequenceId, int]) -> mx.array:
        """One token for each sequence, in one forward where the model batches. Returns logits [len(tokens), vocab].

        Raises RowsError, which names each bad row (closed sequence, token outside the vocabulary), before any row is run.
        """
        bad: dict[Any, SequenceError] = {}
        ids = []
        for sequence, token in tokens.items():
            try:
                self._get(sequence)
                ids.append(self._checked([token]))
            except SequenceError as error:
                bad[sequence] = error
        if bad:
            raise RowsError(bad)
        if not tokens:
            raise SequenceError("nothing to step: no sequence was given")
        states = [self._sequences[sequence] for sequence in tokens]
        self._mark(states)
        try:
            logits = self._step(states, mx.array(np.concatenate(ids)))
            self._evaluate([logits], states)
        except BaseException:
            self._undo(states)
            raise
        for state in states:  # nothing of it is in flight
            state.mark = None
        return logits

    def step_async(self, sequence: SequenceId, token: mx.array) -> mx.array:
        """One token that is still on the device: int32 [1], a choice among the model's own logits, so not checked here.

        Returns logits [1, vocab] that are not evaluated: the caller evaluates them, with `pending_arrays`, before long.
        """
        state = self._get(sequence)
        self._mark([state])
        try:
            return self._step([state], token)
        except BaseException:
            self._undo([state])
            raise

    def pending_arrays(self, sequence: SequenceId) -> list[mx.array]:
        """What has to be evaluated together with the logits of `step_async`, so that no lazy graph grows."""
        return self._arrays(self._get(sequence))

    def rewind(self, sequence: SequenceId, n: int) -> None:
        """Drop the last n tokens. Raises SequenceError beyond the start, Refused where a state cannot go back."""
        state = self._get(sequence)
        if not 0 <= n <= state.length:
            raise SequenceError(f"cannot rewind {n} tokens: sequence {sequence} holds {state.length}")
        if not self.owns_state:
            raise Refused("layout model_owned cannot rewind: the model holds the state; use layout dense")
        for slot in state.slots:
            if not slot.can_rewind(n):  # all are asked before any is changed
                raise Refused(f"a {type(slot).__name__} cannot rewind {n} tokens; restore a snapshot or open a new sequence")
        for slot in state.slots:
            slot.rewind(n)
        state.length -= n
        state.mark = None
        self.counters["rewinds"] += 1
        self.counters["rewound_tokens"] += n

    def abandon(self, sequence: SequenceId, length: int) -> None:
        """Go back to `length` tokens after an error: any number where states rewind, else to before the last prefill or
        step_async. A sequence whose state cannot go back is lost and its state released.
        """
        state = self._sequences.get(sequence)
        if state is None or state.lost or state.length <= length:
            return
        if state.mark is not None and state.mark.length == length:
            self._undo([state])
        elif self.owns_state and all(slot.can_rewind(state.length - length) for slot in state.slots):
            for slot in state.slots:
                slot.rewind(slot.length - length)
            state.length, state.mark = length, None
        else:
            self._lose(state)

    def snapshot(self, sequence: SequenceId) -> Snapshot:
        """The sequence's state as it is now. Raises Refused, and counts `reuse_declined`, where the model supports no reuse."""
        self._require_reuse()
        state = self._get(sequence)
        self.counters["snapshots"] += 1
        return Snapshot(state.length, tuple(slot.snapshot() for slot in state.slots), self.model)

    def restore(self, snapshot: Snapshot, into: SequenceId | None = None) -> SequenceId:
        """A sequence that stands where the snapshot was taken: a new one, or `into`, whatever that held or lost before. Going
        back in the sequence it was taken of copies no tokens.

        Raises Refused as `snapshot` does, SequenceError for a snapshot of another engine.
        """
        self._require_reuse()
        state = _Sequence([]) if into is None else self._sequences.get(into)
        if state is None:
            raise SequenceError(f"sequence {into} is not open (closed, or of another engine)")
        if snapshot.model is not self.model:
            raise SequenceError("the snapshot was taken by another engine; its states may be of another form")
        if into is None or state.lost:
            state.slots, state.growths, state.lost = self.model.make_slots(), 0, False
        try:
            for slot, saved in zip(state.slots, snapshot.states, strict=True):
                if saved is None:
                    slot.free()
                else:
                    reached = slot.restore(saved, snapshot.length)
                    assert reached, f"a snapshot of all tokens restores into any {type(slot).__name__}"
            mx.eval(self._arrays(state))
        except BaseException:
            self._lose(state)
            raise
        state.length, state.mark = snapshot.length, None
        self.counters["restores"] += 1
        return self._register(state) if into is None else into

    def _require_reuse(self) -> None:
        if not self.model.supports_snapshot_reuse:
            self.counters["reuse_declined"] += 1
            raise Refused(f"{self._served()} has no snapshots; open a new sequence and prefill its tokens")

    def _served(self) -> str:
        return f"{type(self.model).__module__.rpartition('.')[2]} in layout {self.layout}"

    def _register(self, state: _Sequence) -> SequenceId:
        sequence = SequenceId(self._opened)
        self._opened += 1
        self._sequences[sequence] = state
        self.counters["opened"] += 1
        return sequence

    def _step(self, states: list[_Sequence], tokens: mx.array) -> mx.array:
        size = self.max_batch or len(states)
        groups = [slice(start, start + size) for start in range(0, len(states), size)]
        parts = []
        for group in groups:
            members = states[group]
            parts.append(self._forward(tokens[group], members, [1] * len(members), None))
            self.counters["decode_steps"] += 1
            if len(members) > 1:
                self.counters["batched_rows"] += len(members)
        self.counters["batches_clamped"] += len(groups) > 1
        self.counters["decode_rows"] += len(states)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _forward(
        self,
        tokens: mx.array,
        states: list[_Sequence],
        lengths: list[int],
        rows: Sequence[int] | None,
        padding: int = 0,
    ) -> mx.array:
        """One forward over a row of tokens, `lengths[i]` of them for states[i], of which the last `padding` are none."""
        spans, start = [], 0
        for state, length in zip(states, lengths, strict=True):
            spans.append(Span(start, length, state.length, state.slots, padding))
            start += length
        with counting(self.counters):
            logits = self.model.forward(tokens, spans, rows)
        self.counters["empty_slice_forwards"] += not any(span.slots for span in spans)
        for state, length in zip(states, lengths, strict=True):
            state.length += length - padding
            growths = sum(slot.growths for slot in state.slots)
            self.counters["cache_growths"] += growths - state.growths
            state.growths = growths
        return logits

    def _evaluate(self, logits: list[mx.array], states: list[_Sequence]) -> None:
        mx.eval(logits, [self._arrays(state) for state in states])

    def _arrays(self, state: _Sequence) -> list[mx.array]:
        if not self.owns_state:
            return self.model.runtime_arrays()
        return [array for slot in state.slots for array in slot.arrays()]

    def _mark(self, states: list[_Sequence]) -> None:
        for state in states:
            state.mark = _Mark(state.length, [slot.checkpoint() for slot in state.slots])

    def _undo(self, states: list[_Sequence]) -> None:
        """Take back what a failed call did to these sequences; what a model owns cannot be taken back."""
        failed: BaseException | None = None
        for state in states:
            mark, state.mark = state.mark, None
            if not self.owns_state or mark is None:
                self._lose(state)
                continue
            try:
                for slot, checkpoint in zip(state.slots, mark.checkpoints, strict=True):
                    slot.rollback(checkpoint)
                state.length = mark.length
            except BaseException as error:  # the other sequences are taken back all the same
                failed = error
                self._lose(state)
        if failed is not None:
            raise failed

    def _lose(self, state: _Sequence) -> None:
        state.lost, state.length = True, 0
        self._release(state)

    def _release(self, state: _Sequence) -> None:
        slots, state.slots, state.mark = state.slots, [], None
        for slot in slots:
            slot.free()
        if not self.owns_state:
            self.model.reset_runtime_state()

    def _get(self, sequence: SequenceId) -> _Sequence:
        state = self._sequences.get(sequence)
        if state is None:
            raise SequenceError(f"sequence {sequence} is not open (closed, or of another engine)")
        if state.lost:
            raise SequenceError(f"sequence {sequence} was lost in an earlier error and its state cannot be rewound; close it")
        return state

    def _checked(self, tokens: Sequence[int]) -> np.ndarray:
        """tokens as int32 [n]. Raises SequenceError, which names the first token that the vocabulary does not have."""
        try:
            ids = np.asarray(tokens)
        except ValueError:  # ragged
            raise SequenceError("tokens must be a flat list of integers") from None
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise SequenceError(f"tokens must be a flat list of integers (got {ids.dtype} of shape {ids.shape})")
        outside = np.flatnonzero((ids < 0) | (ids >= self.model.vocab_size))
        if outside.size:
            at = int(outside[0])
            raise SequenceError(f"token {ids[at]} at index {at} is outside the vocabulary (0 to {self.model.vocab_size - 1})")
        return ids.astype(np.int32)
