"""A reference against a third implementation on the same checkpoint files.

`agree` holds a third implementation's float32 logits to three times the largest float32 error of the reference itself. A known
disagreement is measured instead: the difference must lie in a band, so that both its end and its growth are noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import reference_models
from reference_models.loading import load

K = 3.0
FIGURES: list[tuple[str, str, float, float]] = []  # what, checkpoint, difference, noise: for the summary of the run


@dataclass
class Comparison:
    """One checkpoint directory, its tokens, and the reference's logits for it. `changes` are made to the config first."""

    directory: Path
    tokens: list[int]
    changes: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, weights = load(self.directory)
        config |= self.changes
        reference = reference_models.find(config["model_type"])
        self.truth = reference.recompute(config, weights, self.tokens).logits.numpy()
        self.noise = 0.0  # over several orders of the tokens: the largest error of one run is a matter of luck
        for order in (
            self.tokens,
            self.tokens[::-1],
            self.tokens[16:] + self.tokens[:16],
            self.tokens[::2] + self.tokens[1::2],
        ):
            exact, naive = (reference.recompute(config, weights, order, dtype=d).logits for d in (torch.float64, torch.float32))
            self.noise = max(self.noise, float((naive.double() - exact).abs().max()))

    def difference(self, logits: np.ndarray) -> float:
        assert logits.shape == self.truth.shape
        return float(np.abs(logits.astype(np.float64) - self.truth).max())

    def agree(self, logits: np.ndarray, what: str) -> None:
        difference = self.difference(logits)
        FIGURES.append((what, self.directory.name, difference, self.noise))
        assert difference <= K * self.noise, (
            f"{what}: differs by {difference:.2e}, three times the noise is {K * self.noise:.2e}"
        )

    def agree_with(self, ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
        """Two implementations agree with each other; the reference only says how large a rounding error is."""
        assert ours.shape == theirs.shape == self.truth.shape
        difference = float(np.abs(ours.astype(np.float64) - theirs).max())
        FIGURES.append((what, self.directory.name, difference, self.noise))
        assert difference <= K * self.noise, (
            f"{what}: differ by {difference:.2e}, three times the noise is {K * self.noise:.2e}"
        )

    def differ(self, logits: np.ndarray, what: str, least: float, most: float) -> None:
        difference = self.difference(logits)
        FIGURES.append((what, self.directory.name, difference, self.noise))
        assert least <= difference <= most, f"{what}: differs by {difference:.2e}, known are {least:.1e} to {most:.1e}"
