"""What a target's rows mean for text: KL divergence from the oracle's distribution and agreement of the likeliest token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness.oracle import Oracle
from harness.replay import Replay

__all__ = ["Divergence", "divergence", "identical"]


@dataclass(frozen=True)
class Divergence:
    """KL(oracle || target) in nats over `rows` rows, and the share of rows whose likeliest token is the oracle's."""

    rows: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float


def divergence(replays: Sequence[Replay], oracle: Oracle) -> Divergence:
    """Over all rows of logits; raises ValueError where there are none."""
    found = np.array([_row(expected, got) for expected, got in _pairs(replays, oracle)])
    if not len(found):
        raise ValueError("the replays have no rows of logits")
    kl, agrees = found[:, 0], found[:, 1]
    return Divergence(len(found), float(kl.mean()), float(np.quantile(kl, 0.99)), float(kl.max()), float(agrees.mean()))


def _pairs(replays: Sequence[Replay], oracle: Oracle) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for replay in replays:
        for row in replay.rows:
            if row.logits.size:
                yield oracle.rows(replay.histories[row.history])[row.position], row.logits


def _row(expected: np.ndarray, got: np.ndarray) -> tuple[float, bool]:
    r, e = _log_softmax(expected), _log_softmax(got.astype(np.float64))
    return float(np.sum(np.exp(r) * (r - e))), bool(expected.argmax() == got.argmax())


def _log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def identical(first: Replay, second: Replay) -> tuple[int, str]:
    """Rows before the first in which two replays of one schedule differ in any bit, and what differs ("" where none does)."""
    if len(first.rows) != len(second.rows):
        return 0, f"{len(first.rows)} rows in the first run and {len(second.rows)} in the second"
    different = [
        index
        for index, (a, b) in enumerate(zip(first.rows, second.rows, strict=True))
        if (a.position, a.chosen) != (b.position, b.chosen) or a.logits.tobytes() != b.logits.tobytes()
    ]
    if not different:
        return len(first.rows), ""
    a, b = first.rows[different[0]], second.rows[different[0]]
    rows = f"{len(different)} of {len(first.rows)} rows differ between two runs of the same operations"
    where = f"{rows}, first at position {a.position}"
    if a.chosen != b.chosen:
        return different[0], f"{where}: token {a.chosen}, then {b.chosen}"
    worst = float(np.abs(a.logits.astype(np.float64) - b.logits).max()) if a.logits.shape == b.logits.shape else float("inf")
    return different[0], f"{where}: logits by up to {worst:.3g}"
