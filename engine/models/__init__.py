"""Model families by the `model_type` of their config; a family's module is imported when it is first asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

from engine.errors import Refused

__all__ = ["ALIASES", "ARCHITECTURES", "FAMILIES", "family"]

FAMILIES: dict[str, str] = {  # model_type -> module
    "gemma3": "engine.models.gemma3",
    "gemma3_text": "engine.models.gemma3",
    "gpt_oss": "engine.models.gpt_oss",
    "llama": "engine.models.llama",
    "longcat_flash": "engine.models.longcat_flash",
    "longcat_flash_ngram": "engine.models.longcat_flash_ngram",
    "nemotron-nas": "engine.models.nemotron_nas",
    "nemotron_h": "engine.models.nemotron_h",
}

ALIASES: dict[str, str] = {  # other model_types of a family: multimodal checkpoints, of which the language model is served
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h",
    "NemotronH_Nano_VL_V2": "nemotron_h",
    "nemotron_h_omni": "nemotron_h",
}

ARCHITECTURES: dict[str, str] = {  # for configs without model_type: name in `architectures` -> model_type
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


def family(model_type: str) -> ModuleType:
    """The module of a family: `Config`, `parameters(config)`, `Model`. Raises Refused for an unknown model_type."""
    if model_type not in FAMILIES:
        raise Refused(f"model_type {str(model_type)[:80]!r} is not supported (supported: {', '.join(sorted(FAMILIES))})")
    return importlib.import_module(FAMILIES[model_type])
