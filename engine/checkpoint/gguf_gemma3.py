"""GGUF files of architecture `gemma3`: norms hold 1 + w, and what all Gemma 3 models share is not in the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from engine.checkpoint.bounded import shown
from engine.checkpoint.gguf_convert import FIELDS, SCALING, TENSORS, Converted, basic_config, renamed, rope_scaling, values
from engine.checkpoint.gguf_header import GgufHeader
from engine.errors import ConfigError

__all__ = ["convert"]

_NAMES = TENSORS | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_CHECKED_OR_HARMLESS = {
    "attention.value_length",
    "rope.dimension_count",
    "attention.scale",
}  # read, or no part of the computation
LAYERS_OF_27B = 62  # of the one published model whose queries are not scaled by head_dim^-0.5


def convert(gguf: GgufHeader) -> Converted:
    """Raises as gguf_convert.convert does."""
    found = values(gguf.metadata, "gemma3", FIELDS.keys() | _FIELDS.keys() | SCALING | _CHECKED_OR_HARMLESS)
    headers = {renamed(name, _NAMES): header for name, header in gguf.tensors.items()}
    config: dict[str, Any] = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    config |= basic_config(gguf.metadata, headers, "gemma3", found)
    config |= {field: found[key] for key, field in _FIELDS.items() if key in found}
    for name in ("head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size"):  # Config has defaults for these
        if name not in config:
            raise ConfigError(f"GGUF file: nothing says the model's {name}")
    config["query_pre_attn_scalar"] = _query_scalar(found, config)
    scaling = rope_scaling(found)
    return Converted(config | ({"rope_scaling": scaling} if scaling else {}), headers, _arrange)


def _query_scalar(found: dict[str, Any], config: dict[str, Any]) -> Any:
    """As llama.cpp has it: head_dim, in the 27B model hidden_size / heads, or what the file says of the scale."""
    scale = found.get("attention.scale")
    if scale is not None:
        if not isinstance(scale, float) or not 1e-4 <= scale <= 1e3:
            raise ConfigError(f"GGUF key gemma3.attention.scale {shown(scale)} must be a number from 1e-4 to 1e3")
        return scale**-2
    hidden, heads = config.get("hidden_size"), config["num_attention_heads"]
    if config.get("num_hidden_layers") == LAYERS_OF_27B and type(hidden) is int and type(heads) is int and heads > 0:
        return hidden / heads
    return config["head_dim"]


def _arrange(name: str) -> Callable[[mx.array], mx.array] | None:
    return (lambda array: array - 1.0) if name.endswith("norm.weight") else None
