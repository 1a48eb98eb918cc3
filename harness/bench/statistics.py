"""Medians with exact intervals, and ratios that are paired by round: what two runs of one machine can honestly say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COVERAGE", "Interval", "interval", "ratio", "shown", "verdict"]

COVERAGE = 0.95


@dataclass(frozen=True)
class Interval:
    """Median of n samples and an interval that covers the true median with probability `coverage`, for any distribution."""

    median: float
    low: float
    high: float
    coverage: float
    n: int


def interval(samples: Sequence[float]) -> Interval:
    """Order statistics: x[k] .. x[n-1-k] misses the median with probability 2 * P(Binomial(n, 1/2) <= k).

    The narrowest interval that covers COVERAGE is taken; below 6 samples there is none, and the whole range is given with
    the coverage that it has.
    """
    if not samples or not all(math.isfinite(sample) for sample in samples):
        raise ValueError(f"an interval needs finite samples (got {list(samples)})")
    ordered = sorted(samples)
    n = len(ordered)

    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n if n > 1 else 0.0

    k = max((k for k in range((n - 1) // 2 + 1) if coverage(k) >= COVERAGE), default=0)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return Interval(middle, ordered[k], ordered[n - 1 - k], coverage(k), n)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Interval of ours / theirs, paired by round, so that what slows both in one round cancels."""
    return interval([a / b for a, b in zip(ours, theirs, strict=True)])


def shown(found: Interval) -> bool:
    """Whether the rounds show a difference at all: the interval of the ratio covers COVERAGE and leaves 1 out."""
    return found.coverage >= COVERAGE and not found.low <= 1 <= found.high


def verdict(found: Interval) -> str:
    """In a word, of a ratio of speeds, ours to theirs; ~ where the rounds show no difference."""
    return "~" if not shown(found) else "faster" if found.median > 1 else "slower"
