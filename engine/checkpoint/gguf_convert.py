"""GGUF files to a config in Hugging Face's spelling and Hugging Face's tensor names; what all architectures share.

Keys and names: docs/gguf.md of ggml, and gguf-py's tensor mapping, both as published.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.checkpoint.bounded import shown
from engine.checkpoint.gguf_header import GgufHeader
from engine.checkpoint.tensors import TensorHeader
from engine.errors import ConfigError, Refused

__all__ = ["FIELDS", "SCALING", "TENSORS", "Converted", "basic_config", "convert", "renamed", "rope_scaling", "values"]

_MODULES = {  # general.architecture -> its module, with `convert(gguf)`
    "gemma3": "engine.checkpoint.gguf_gemma3",
    "llama": "engine.checkpoint.gguf_llama",
}

# names of tensors that architectures share
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z_]+)\.(weight|bias)\Z")

# metadata key (after the architecture) -> config.json field
FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "rope.freq_base": "rope_theta",
}
SCALING = {
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear",
}  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """`headers` by Hugging Face names; `arrange(name)`: how a tensor's values are put into the form of these checkpoints."""

    config: dict[str, Any]
    headers: dict[str, TensorHeader]
    arrange: Callable[[str], Callable[[mx.array], mx.array] | None]


def convert(gguf: GgufHeader) -> Converted:
    """Raises ConfigError (a key out of bounds), CheckpointError (damaged) or Refused (not supported), naming key or tensor."""
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _MODULES:
        raise Refused(f"general.architecture {shown(architecture)} is not supported in GGUF files ({', '.join(_MODULES)} are)")
    if gguf.metadata.get("split.count", 1) != 1:
        raise Refused(
            f"the GGUF file is one of {shown(gguf.metadata['split.count'])} parts; merge them (`llama-gguf-split --merge`)"
        )
    return importlib.import_module(_MODULES[architecture]).convert(gguf)


def renamed(name: str, names: Mapping[str, str]) -> str:
    """The Hugging Face name, or the name as it is, which the accounting then reports as no part of the model."""
    parts = _TENSOR.match(name)
    if parts is None or parts[2] not in names:
        return name
    layer = "" if parts[1] is None else f"model.layers.{int(parts[1])}."
    return f"{layer}{names[parts[2]]}.{parts[3]}"


def values(metadata: Mapping[str, Any], architecture: str, known: Collection[str]) -> dict[str, Any]:
    """The architecture's keys without its name. Raises Refused for one that is not `known`: the model would ignore it."""
    prefix = f"{architecture}."
    found = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key, value in found.items():
        if key not in known:
            raise Refused(f"GGUF key {prefix}{key[:80]} = {shown(value)} is not understood; use the safetensors checkpoint")
        if isinstance(value, list):
            raise Refused(f"GGUF key {prefix}{key[:80]} differs by layer, which is not supported")
    return found


def basic_config(
    metadata: Mapping[str, Any], headers: Mapping[str, TensorHeader], architecture: str, found: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that architectures share, from their keys `found`, the vocabulary, and which tensors there are."""
    config = {field: found[key] for key, field in FIELDS.items() if key in found}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        config.setdefault("vocab_size", len(tokens))
    if "rms_norm_eps" not in config:
        raise ConfigError(f"GGUF key {architecture}.attention.layer_norm_rms_epsilon is missing")
    for key in ("rope.dimension_count", "attention.key_length"):  # rotary positions span the whole head
        if key in found:
            config["head_dim"] = found[key]
    for key in ("rope.dimension_count", "attention.value_length"):
        if found.get(key, config.get("head_dim")) != config.get("head_dim"):
            raise Refused(
                f"GGUF key {architecture}.{key} {shown(found[key])} differs from the head's {shown(config.get('head_dim'))}"
            )
    config["tie_word_embeddings"] = "lm_head.weight" not in headers
    config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in headers
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in metadata:
            config[f"{name}_token_id"] = metadata[f"tokenizer.ggml.{name}_token_id"]
    return config


def rope_scaling(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json's `rope_scaling`; None where positions are not scaled."""
    kind = found.get("rope.scaling.type", "linear" if "rope.scale_linear" in found else "none")
    factor = found.get("rope.scaling.factor", found.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn") or found.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise Refused(f"rope scaling {shown(kind)} of this GGUF file is not supported (linear, yarn without attn_factor)")
    names = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    extra = {field: found[key] for field, key in names.items() if key in found} if kind == "yarn" else {}
    return {"rope_type": kind, "factor": factor, **extra}
