"""The oracle's choices of experts beside those of the naive run, over one history: what harness.choice judges a row's by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.choice import Choice

if TYPE_CHECKING:
    from reference_models.recompute import Recompute

__all__ = ["Routing", "compare"]


@dataclass(frozen=True)
class Routing:
    """By token [T]."""

    margins: np.ndarray  # float64
    moved: np.ndarray  # float64: by how much the naive run's margin differs
    flipped: np.ndarray  # bool: the naive run chose other experts in some layer
    level: float  # root mean square of `moved`

    def choices(self, positions: np.ndarray, k: float) -> list[Choice]:
        """Of the rows at these positions. As with logits, an engine's rounding may be `k` times that of the naive run."""
        index = np.arange(len(self.margins))
        least = np.minimum.accumulate(self.margins)
        where = np.maximum.accumulate(np.where(self.margins == least, index, 0))
        flips = self.flipped.cumsum()
        last = np.maximum.accumulate(np.where(self.flipped, index, -1))
        return [
            Choice(
                margin=float(self.margins[p]),
                least=float(least[p]),
                least_position=int(where[p]),
                rounding=k * self.level,
                flips=int(flips[p]),
                last_flip=int(last[p]) if last[p] >= 0 else None,
            )
            for p in positions
        ]


def compare(exact: Recompute, naive: Recompute, calibration: Routing | None) -> Routing | None:
    """What rounding did to the choices of a history; None where a family has none to make.

    `calibration`: of the run that a short history takes part of its level from (harness.oracle).
    """
    if exact.margins is None or exact.choices is None or naive.margins is None or naive.choices is None:
        return None
    count = len(naive.margins)
    margins = exact.margins[:count].double().numpy()
    if not np.isfinite(margins).all():  # every expert is chosen for every token
        return None
    moved = np.abs(naive.margins.double().numpy() - margins)
    flipped = (naive.choices != exact.choices[:count]).any(-1).numpy()
    every = moved if calibration is None else np.concatenate([moved, calibration.moved])
    return Routing(margins, moved, flipped, math.sqrt(np.mean(every * every)))
