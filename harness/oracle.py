"""The oracle: the float64 recompute of a checkpoint, and the noise floor of the target's dtype. Never in a worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import reference_models
from harness.tokens import TokenStream, special_ids
from reference_models.loading import load
from reference_models.recompute import ReferenceError

__all__ = ["Noise", "Oracle", "row_errors"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CALIBRATION = 48  # tokens; shorter histories take part of their noise level from a run of so many
BLOCK_BYTES = 32 << 20  # of float64 that a comparison of rows holds at a time


@dataclass(frozen=True)
class Noise:
    """Errors of the naive run against the oracle: by row [T], and their level over the sequence (root mean square)."""

    rmse: np.ndarray
    max: np.ndarray
    level_rmse: float
    level_max: float


def row_errors(rows: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """RMSE and max of |rows - truth| by row, both [T, vocab]; in blocks, so that a large vocabulary needs little memory."""
    count, vocab = truth.shape
    rmse, largest = np.empty(count), np.empty(count)
    block = max(1, BLOCK_BYTES // (8 * vocab))
    for start in range(0, count, block):
        part = slice(start, start + block)
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf; the caller looks for rows that are not finite
            error = np.abs(rows[part].astype(np.float64) - truth[part])
            rmse[part], largest[part] = np.sqrt(np.mean(error * error, axis=1)), error.max(axis=1)
    return rmse, largest


class Oracle:
    """Recomputes of one checkpoint, kept in memory up to `cache_bytes` (the least recently used goes first)."""

    def __init__(self, checkpoint: Path, *, cache_bytes: int = 512 << 20) -> None:
        self.checkpoint = Path(checkpoint)
        self.config, self.weights = load(self.checkpoint)
        self.reference = reference_models.find(reference_models.model_type(self.config))
        for name, shape in self.reference.parameters(self.config).items():
            found = self.weights.get(name)
            if found is None or tuple(found.shape) != tuple(shape):
                got = "none" if found is None else list(found.shape)
                raise ReferenceError(f"{self.checkpoint.name}: tensor {name!r} of shape {list(shape)} is needed (got {got})")
        self.text = reference_models.text_config(self.config)
        self.vocab = int(self.text["vocab_size"])
        self.cache_bytes = cache_bytes
        self._rows: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()
        self._margins: dict[tuple[int, ...], np.ndarray] = {}
        self._noise: dict[tuple[tuple[int, ...], str], Noise] = {}

    def rows(self, tokens: Sequence[int]) -> np.ndarray:
        """float64 logits [T, vocab]. A kept recompute of a longer history serves its prefixes: references are causal."""
        wanted = tuple(tokens)
        for kept in reversed(self._rows):
            if kept[: len(wanted)] == wanted:
                self._rows.move_to_end(kept)
                return self._rows[kept][: len(wanted)]
        result = self._recompute(wanted, torch.float64)
        rows = result.logits.numpy()
        if not np.isfinite(rows).all():
            raise ValueError(
                f"the float64 recompute of {self.checkpoint.name} is not finite; the checkpoint's weights are at fault"
            )
        self._rows[wanted] = rows
        if result.margins is not None:
            self._margins[wanted] = result.margins.numpy().astype(np.float64)
        while sum(kept.nbytes for kept in self._rows.values()) > self.cache_bytes and len(self._rows) > 1:
            gone, _ = self._rows.popitem(last=False)
            self._margins.pop(gone, None)
        return rows

    def margins(self, tokens: Sequence[int]) -> np.ndarray | None:
        """The least gap [T] of any discrete choice (expert routing) by token; None where the family makes none."""
        wanted = tuple(tokens)
        self.rows(wanted)
        for kept, margins in self._margins.items():
            if kept[: len(wanted)] == wanted:
                return margins[: len(wanted)]
        return None

    def naive(self, tokens: Sequence[int], dtype: str) -> np.ndarray:
        """float32 logits [T, vocab] of the reference run in `dtype`; not kept."""
        return self._recompute(tuple(tokens), DTYPES[dtype]).logits.to(torch.float32).numpy()

    def noise(self, tokens: Sequence[int], dtype: str) -> Noise:
        """The noise floor of a history. Exactly this history is run: a cell's numbers depend on no other cell."""
        key = (tuple(tokens), dtype)
        if key not in self._noise:
            rmse, largest = self._naive_errors(key[0], dtype)
            all_rmse, all_largest = rmse, largest
            if len(key[0]) < CALIBRATION:
                usual = self._calibration(dtype)
                all_rmse, all_largest = np.concatenate([rmse, usual[0]]), np.concatenate([largest, usual[1]])
            self._noise[key] = Noise(rmse, largest, _root_mean_square(all_rmse), _root_mean_square(all_largest))
        return self._noise[key]

    def _naive_errors(self, tokens: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
        rmse, largest = row_errors(self.naive(tokens, dtype), self.rows(tokens))
        if not np.isfinite(largest).all():
            raise ValueError(
                f"the naive {dtype} run of {self.checkpoint.name} is not finite; {dtype} cannot hold this checkpoint"
            )
        return rmse, largest

    def _calibration(self, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = TokenStream(0, self.vocab, special_ids(self.text)).tokens("calibration", 0, range(CALIBRATION))
        kept = self.noise(tokens, dtype)
        return kept.rmse, kept.max

    def _recompute(self, tokens: tuple[int, ...], dtype: torch.dtype) -> reference_models.recompute.Recompute:
        if not tokens or not all(0 <= token < self.vocab for token in tokens):
            raise ValueError(f"a history must hold tokens of 0 to {self.vocab - 1} (got {list(tokens[:8])} of {len(tokens)})")
        with torch.inference_mode():
            return self.reference.recompute(self.config, self.weights, tokens, dtype=dtype)


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values * values)))
