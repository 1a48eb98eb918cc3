"""Independent torch references, one self-contained file per family: full recompute in float64, no caches, no chunks."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from reference_models.recompute import Reference

__all__ = ["find", "model_type", "text_config"]

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
# published class names -> model type, for configs that give `architectures` alone
_CLASSES = {
    "DeciLMForCausalLM": "nemotron-nas",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "LongcatFlashForCausalLM": "longcat_flash",
    "LongcatFlashNgramForCausalLM": "longcat_flash_ngram",
    "NemotronHForCausalLM": "nemotron_h",
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h",
    "NemotronH_Nano_VL_V2": "nemotron_h",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says about the language model: `llm_config` or `text_config` of a wrapper, else the config itself."""
    for name in ("llm_config", "text_config"):
        if isinstance(config.get(name), Mapping):
            return config[name]
    return config


def model_type(config: Mapping[str, Any]) -> str:
    """A config's `model_type`, else that of the first class in its `architectures` that has one here; else ReferenceError."""
    from reference_models.recompute import ReferenceError

    given, classes = config.get("model_type"), config.get("architectures")
    if given is not None:
        return str(given)
    known = [name for name in classes if isinstance(name, str) and name in _CLASSES] if isinstance(classes, list) else []
    if not known:
        raise ReferenceError(
            f"the config names no family: it has no 'model_type', and 'architectures' ({classes!r:.80}) names no known class; "
            f"add a model_type (known classes: {', '.join(_CLASSES)})"
        )
    return _CLASSES[known[0]]


def find(model_type: str) -> Reference:
    """The reference of a family by its `model_type` (nemotron-nas -> nemotron_nas); ReferenceError where there is none."""
    from reference_models.recompute import ReferenceError

    name = model_type.replace("-", "_")
    name = _ALSO.get(name.lower(), name)
    known = re.fullmatch(r"[a-z][a-z0-9_]*", name) and name not in _SHARED
    if not known or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise ReferenceError(f"there is no reference for model_type {model_type!r}")
    return cast("Reference", importlib.import_module(f"{__name__}.{name}"))
