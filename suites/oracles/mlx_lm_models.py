"""Checkpoint directories in mlx-lm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs the mlx-lm extra")
utils = pytest.importorskip("mlx_lm.utils", reason="needs the mlx-lm extra")

__all__ = ["load", "logits", "mx"]


def load(directory: Path):
    """The model of a directory, strictly: every tensor of the file must have its place and the other way round."""
    return utils.load_model(Path(directory), lazy=False, strict=True)[0]


def logits(model, tokens: list[int]) -> np.ndarray:
    """float32 [T, vocab] of one full forward, no cache."""
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))
