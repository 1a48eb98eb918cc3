"""One sequence at a time, without a scheduler: for the command line, the harness and small programs.

One step is in flight: the forward of a chosen token, and the choice after it, are dispatched before the token is read. So the
device computes while the caller works, and every token that was read has been fed: the sequence holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.engine import Engine, SequenceId
from engine.errors import SequenceError
from engine.models import family
from engine.models.model import Model
from engine.sampling import GREEDY, Sampler, Sampling
from engine.state import SequenceStateLayout

__all__ = ["DirectEngine", "Generation", "Token", "decode"]

CLEAR_CACHE_EVERY = 256  # tokens; gives memory of outgrown buffers back to the system


@dataclass(frozen=True)
class Token:
    """id: the token. text: what became whole with it ("" where bytes are missing, or without a tokenizer).

    logits: the row [vocab] it was chosen from, in the compute dtype.
    """

    id: int
    text: str
    logits: mx.array = field(repr=False)


class _Stream:
    """Chosen tokens of a sequence with one step in flight. Each token that `next` returns has been fed to the engine."""

    def __init__(self, engine: Engine, sequence: SequenceId, logits: mx.array, sampler: Sampler) -> None:
        self._engine, self._sequence, self._sampler = engine, sequence, sampler
        self.logits = logits  # [1, vocab]: the row after all tokens that were fed
        self._choose()

    def next(self) -> tuple[int, mx.array]:
        """The next token and the row [1, vocab] that it was chosen from."""
        token, row = self._token, self.logits
        before = self._engine.length(self._sequence)
        self.logits = self._engine.step_async(self._sequence, token)
        try:
            self._choose()
            return int(np.asarray(token)[0]), row
        except BaseException:  # an interrupt too: nobody learns of the token, so the sequence must not hold it
            self._engine.abandon(self._sequence, before)
            raise

    def _choose(self) -> None:
        self._token = self._sampler.choose(self.logits)
        waiting = [*self._sampler.pending_arrays(), *self._engine.pending_arrays(self._sequence)]
        mx.async_eval(self._token, self.logits, *waiting)


def decode(
    engine: Engine, sequence: SequenceId, logits: mx.array, count: int, sampling: Sampling = GREEDY
) -> tuple[list[int], mx.array]:
    """Choose and feed `count` tokens after the row `logits` [1, vocab].

    Returns the tokens and logits [count, vocab], whose row i is the one after tokens[i] was fed.
    """
    stream = _Stream(engine, sequence, logits, Sampler(sampling))
    tokens, rows = [], []
    for _ in range(count):
        token, row = stream.next()
        tokens.append(token)
        rows.append(row)
    result = mx.concatenate([*rows[1:], stream.logits])  # the first row is the caller's
    mx.eval(result, engine.pending_arrays(sequence))
    return tokens, result


class Generation:
    """The tokens of one reply, one by one; end of text is neither yielded nor counted.

    However it ends (a stop token, the budget, `close`, or nobody asks for more), `fed` is what the sequence holds: a token is
    recorded before it is handed out. The sequence stays open for a next turn (`generate(..., after=this)`).
    """

    def __init__(
        self, direct: DirectEngine, sequence: SequenceId, logits: mx.array, fed: list[int], budget: int, sampler: Sampler
    ):
        self.sequence = sequence
        self.fed = fed  # prompt and every token after it, a stop token included
        self.count = 0  # tokens yielded
        self.budget = budget
        self.finish_reason: str | None = None if budget else "length"  # or "stop"
        self.sampler = sampler
        self._direct = direct
        self._text = direct.tokenizer.stream() if direct.tokenizer is not None else None
        self._stream: _Stream | None = _Stream(direct.engine, sequence, logits, sampler) if budget else None

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        if self._stream is None:
            raise StopIteration
        token, row = self._stream.next()
        self.fed.append(token)
        if token in self._direct.eos_token_ids:
            self._finish("stop")
            raise StopIteration
        self.count += 1
        if self.count == self.budget:
            self._finish("length")
        elif self.count % CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()
        return Token(token, "" if self._text is None else self._text.feed(token), row[0])

    def close(self) -> None:
        """Stop early."""
        self._stream = None

    def tail(self) -> str:
        """Text of trailing bytes that no token made whole; for after the last token."""
        return "" if self._text is None else self._text.flush()

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self.close()


class DirectEngine:
    """A model with an engine of its own that holds one conversation at a time."""

    def __init__(
        self,
        model: Model,
        *,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Any = None,
        checkpoint: Any = None,
        layout: SequenceStateLayout = SequenceStateLayout.DENSE,
    ) -> None:
        """tokenizer: has `stream()`, whose result has `feed(token) -> str` and `flush() -> str`; None: no text."""
        self.engine = Engine(model, layout=layout)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokenizer = tokenizer
        self.checkpoint = checkpoint
        self._sequence: SequenceId | None = None

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: str | None = None,
        quantised: str | None = None,
        layout: SequenceStateLayout = SequenceStateLayout.DENSE,
    ) -> DirectEngine:
        """Load a directory, a GGUF file or a hub id; see engine.checkpoint.load for dtypes, quantised weights and errors.

        `checkpoint` has no weights afterwards: the model holds them, experts in stacks.
        """
        from engine.checkpoint import load  # here: brings tokenizers and hub access, which `decode` needs not

        loaded = load(source, dtype=dtype, quantised=quantised)
        model = family(loaded.model_type).Model(loaded.config, loaded.weights)
        loaded = replace(loaded, weights={})
        return cls(model, eos_token_ids=loaded.eos_token_ids, tokenizer=loaded.tokenizer, checkpoint=loaded, layout=layout)

    def generate(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        after: Generation | None = None,
    ) -> Generation:
        """Prefill `tokens`, then choose up to max_tokens.

        Starts a new sequence and closes the one before, or appends to the sequence that `after` left. Raises SequenceError for
        an empty prompt, a token outside the vocabulary, or an `after` whose sequence is closed.
        """
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0 (got {max_tokens})")
        if after is None:
            self.close()
            self._sequence = self.engine.open()
        elif after.sequence != self._sequence:
            raise SequenceError(f"sequence {after.sequence} is not the open one; generate without `after`")
        else:
            after.close()
        assert self._sequence is not None
        before = self.engine.length(self._sequence)
        try:
            logits = self.engine.prefill(self._sequence, tokens)
            fed = [*(after.fed if after else ()), *map(int, tokens)]
            return Generation(self, self._sequence, logits, fed, max_tokens, Sampler(sampling, fed))
        except BaseException:  # nobody gets a Generation that knows of these tokens
            self.engine.abandon(self._sequence, before)
            if after is None:
                self.close()
            raise

    def close(self) -> None:
        """Release the sequence."""
        if self._sequence is not None:
            self.engine.close(self._sequence)
            self._sequence = None
