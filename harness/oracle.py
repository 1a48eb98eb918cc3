"""The oracle: the float64 recompute of a checkpoint, and the noise floor of the target's dtype. Never in a worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import reference_models
from harness.routing import Routing, compare
from harness.tokens import TokenStream, special_ids
from reference_models.loading import load
from reference_models.recompute import Recompute, ReferenceError

__all__ = ["Noise", "Oracle", "row_errors"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CALIBRATION = 48  # tokens; shorter histories take part of their noise level from a run of so many
BLOCK_BYTES = 32 << 20  # of float64 that a comparison of rows holds at a time


@dataclass(frozen=True)
class Noise:
    """Errors of the naive run against the oracle: by row [T], and their level over the sequence (root mean square).

    `routing`: what its rounding did to choices of experts; None where the family makes none.
    """

    rmse: np.ndarray
    max: np.ndarray
    level_rmse: float
    level_max: float
    routing: Routing | None = None


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
        self._exact: OrderedDict[tuple[int, ...], Recompute] = OrderedDict()
        self._noise: dict[tuple[tuple[int, ...], str], Noise] = {}

    def rows(self, tokens: Sequence[int]) -> np.ndarray:
        """float64 logits [T, vocab]."""
        return self.exact(tokens).logits.numpy()[: len(tokens)]

    def exact(self, tokens: Sequence[int]) -> Recompute:
        """The float64 recompute of a history or of a longer one that begins with it: references are causal."""
        wanted = tuple(tokens)
        for kept in reversed(self._exact):
            if kept[: len(wanted)] == wanted:
                self._exact.move_to_end(kept)
                return self._exact[kept]
        result = self._recompute(wanted, torch.float64)
        if not bool(result.logits.isfinite().all()):
            raise ValueError(
                f"the float64 recompute of {self.checkpoint.name} is not finite; the checkpoint's weights are at fault"
            )
        self._exact[wanted] = result
        while sum(kept.logits.nbytes for kept in self._exact.values()) > self.cache_bytes and len(self._exact) > 1:
            self._exact.popitem(last=False)
        return result

    def naive(self, tokens: Sequence[int], dtype: str) -> np.ndarray:
        """float32 logits [T, vocab] of the reference run in `dtype`; not kept."""
        return _logits(self._recompute(tuple(tokens), DTYPES[dtype]))

    def noise(self, tokens: Sequence[int], dtype: str) -> Noise:
        """The noise floor of a history. Exactly this history is run: a cell's numbers depend on no other cell."""
        key = (tuple(tokens), dtype)
        if key not in self._noise:
            self._noise[key] = self._measured(key[0], dtype, self._calibration(dtype) if len(key[0]) < CALIBRATION else None)
        return self._noise[key]

    def _measured(self, tokens: tuple[int, ...], dtype: str, usual: Noise | None) -> Noise:
        """`usual`: of the run that the levels are taken over too."""
        naive, exact = self._recompute(tokens, DTYPES[dtype]), self.exact(tokens)
        rmse, largest = row_errors(_logits(naive), exact.logits.numpy()[: len(tokens)])
        if not np.isfinite(largest).all():
            raise ValueError(
                f"the naive {dtype} run of {self.checkpoint.name} is not finite; {dtype} cannot hold this checkpoint"
            )
        all_rmse, all_largest = (
            (rmse, largest) if usual is None else (np.append(rmse, usual.rmse), np.append(largest, usual.max))
        )
        routing = compare(exact, naive, usual.routing if usual else None)
        return Noise(rmse, largest, _root_mean_square(all_rmse), _root_mean_square(all_largest), routing)

    def _calibration(self, dtype: str) -> Noise:
        tokens = TokenStream(0, self.vocab, special_ids(self.text)).tokens("calibration", 0, range(CALIBRATION))
        return self.noise(tokens, dtype)

    def _recompute(self, tokens: tuple[int, ...], dtype: torch.dtype) -> Recompute:
        if not tokens or not all(0 <= token < self.vocab for token in tokens):
            raise ValueError(f"a history must hold tokens of 0 to {self.vocab - 1} (got {list(tokens[:8])} of {len(tokens)})")
        with torch.inference_mode():
            return self.reference.recompute(self.config, self.weights, tokens, dtype=dtype)


def _logits(run: Recompute) -> np.ndarray:
    return run.logits.to(torch.float32).numpy()


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values * values)))
