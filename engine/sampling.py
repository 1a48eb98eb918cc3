"""Choosing the next token from a row of logits, on the device and without waiting for it.

Order: penalties -> top-k -> temperature -> softmax -> top-p -> min-p -> draw. Temperature 0 is the arg max of the penalised
logits, the lowest id of equals. Draws are reproducible: the key of draw i is a function of the seed and i alone, so that a
stream depends neither on other sequences nor on what else was drawn in the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

__all__ = ["GREEDY", "Sampler", "Sampling", "candidates", "penalised"]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _check(name: str, value: float, least: float, most: float, *, open_below: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most or (open_below and value == least):
        raise ValueError(
            f"{name} must be a number {'above' if open_below else 'from'} {least:g} to {most:g} (got {value!r:.80})"
        )


def _check_integer(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most} (got {value!r:.80})")


@dataclass(frozen=True)
class Sampling:
    """What a caller asks for. Out of bounds is a ValueError that names the field. Neutral values switch a part off."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0  # keep the least set of most likely tokens whose mass reaches top_p
    min_p: float = 0.0  # keep tokens of at least min_p times the greatest probability
    repeat_penalty: float = 1.0  # positive logits of seen tokens are divided by it, negative ones multiplied, once a token
    presence_penalty: float = 0.0  # subtracted once from the logit of a seen token
    frequency_penalty: float = 0.0  # subtracted once per occurrence
    repeat_last_n: int = -1  # tokens back, prompt included, that count as seen; -1: all, 0: no penalties
    seed: int | None = None  # None: a fresh one for each stream, which Sampler.seed tells

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repeat_penalty", self.repeat_penalty, 0.0, 100.0, open_below=True)
        _check("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _check_integer("top_k", self.top_k, 0, (1 << 31) - 1)
        _check_integer("repeat_last_n", self.repeat_last_n, -1, (1 << 31) - 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, _WORD)

    @property
    def penalises(self) -> bool:
        neutral = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) == (1.0, 0.0, 0.0)
        return self.repeat_last_n != 0 and not neutral


GREEDY = Sampling()


def penalised(logits: mx.array, sampling: Sampling, seen: mx.array) -> mx.array:
    """logits [vocab] after the penalties for the tokens in `seen` (int32 [n], any order, repeats count for frequency)."""
    counts = mx.zeros(logits.shape, dtype=mx.float32).at[seen].add(1.0)
    repeated = mx.where(logits > 0, logits / sampling.repeat_penalty, logits * sampling.repeat_penalty)
    logits = mx.where(counts > 0, repeated - sampling.presence_penalty, logits)
    return logits - sampling.frequency_penalty * counts


def candidates(logits: mx.array, sampling: Sampling) -> tuple[mx.array, mx.array]:
    """The tokens that can be drawn at temperature > 0, most likely first: ids int32 [k] and log-probabilities float32 [k].

    Those that a filter drops have -inf; the most likely token is always kept. Probabilities are not normalised again.
    """
    vocab = logits.shape[-1]
    k = min(sampling.top_k or vocab, vocab)
    ids = mx.argpartition(-logits, k - 1)[:k] if k < vocab else mx.arange(vocab)
    ids = ids[mx.argsort(-logits[ids])]
    logprobs = logits[ids] / sampling.temperature
    logprobs = logprobs - mx.logsumexp(logprobs)  # the mass of what top-k left is 1 again, as top-p expects
    probs = mx.exp(logprobs)
    before = mx.cumsum(probs, inclusive=False)  # mass of the more likely tokens
    kept = (before < sampling.top_p) & (probs >= sampling.min_p * probs[0])
    return ids.astype(mx.int32), mx.where(kept, logprobs, -math.inf)


class Sampler:
    """One stream of choices: one sequence's sampling, seed, draw counter and window of seen tokens."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self.seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed
        self._draws = 0
        self._seen = mx.array(self._recent(list(prompt)), dtype=mx.int32)

    def choose(self, logits: mx.array) -> mx.array:
        """The next token from a row of logits [1, vocab]: int32 [1], not evaluated. It counts as seen from then on."""
        row = logits[0].astype(mx.float32)
        if self.sampling.penalises:
            row = penalised(row, self.sampling, self._seen)
        if self.sampling.temperature == 0.0:
            token = mx.argmax(row, keepdims=True).astype(mx.int32)
        else:
            ids, logprobs = candidates(row, self.sampling)
            token = ids[mx.random.categorical(logprobs, key=self._next_key())].reshape(1)
        if self.sampling.penalises:
            self._seen = self._recent(mx.concatenate([self._seen, token]))
        return token

    def pending_arrays(self) -> list[mx.array]:
        """What has to be evaluated together with the choice, so that no lazy graph grows."""
        return [self._seen]

    def _recent(self, tokens: Any) -> Any:  # a list or an array
        n = self.sampling.repeat_last_n
        return tokens if n < 0 else tokens[max(0, len(tokens) - n) :]

    def _next_key(self) -> mx.array:
        self._draws += 1
        return mx.random.key(_splitmix64(self.seed + _GOLDEN * self._draws))


def _splitmix64(x: int) -> int:
    """Mixes a counter into 64 random-looking bits (Steele, Lea, Flood 2014); neighbours share nothing."""
    x &= _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
