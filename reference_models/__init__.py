"""Independent torch references, one self-contained file per family: full recompute in float64, no caches, no chunks."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from reference_models.recompute import Reference

__all__ = ["find"]

# modules here that are no families
_SHARED = frozenset({"checkpoints", "gguf_file", "loading", "recompute", "train", "training_text"})


def find(model_type: str) -> Reference:
    """The reference of a family by its `model_type` (nemotron-nas -> nemotron_nas); ReferenceError where there is none."""
    from reference_models.recompute import ReferenceError

    name = model_type.replace("-", "_")
    known = re.fullmatch(r"[a-z][a-z0-9_]*", name) and name not in _SHARED
    if not known or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise ReferenceError(f"there is no reference for model_type {model_type!r}")
    return cast("Reference", importlib.import_module(f"{__name__}.{name}"))
