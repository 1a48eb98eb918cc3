"""Independent torch references, one self-contained file per family: full recompute in float64, no caches, no chunks."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from reference_models.recompute import Reference

__all__ = ["find", "text_config"]

# modules here that are no families
_SHARED = frozenset(
    {"checkpoints", "gguf_checkpoint", "gguf_file", "loading", "quantised", "recompute", "train", "training_text"}
)
# model types of a family's text part or wrapper, in lower case
_ALSO = {
    "gemma3_text": "gemma3",
    "nemotronh_nano_omni_reasoning_v3": "nemotron_h",
    "nemotronh_nano_vl_v2": "nemotron_h",
    "nemotron_h_omni": "nemotron_h",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says about the language model: `llm_config` or `text_config` of a wrapper, else the config itself."""
    for name in ("llm_config", "text_config"):
        if isinstance(config.get(name), Mapping):
            return config[name]
    return config


def find(model_type: str) -> Reference:
    """The reference of a family by its `model_type` (nemotron-nas -> nemotron_nas); ReferenceError where there is none."""
    from reference_models.recompute import ReferenceError

    name = model_type.replace("-", "_")
    name = _ALSO.get(name.lower(), name)
    known = re.fullmatch(r"[a-z][a-z0-9_]*", name) and name not in _SHARED
    if not known or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise ReferenceError(f"there is no reference for model_type {model_type!r}")
    return cast("Reference", importlib.import_module(f"{__name__}.{name}"))
