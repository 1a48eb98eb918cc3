"""GGUF files of architecture `llama`: metadata to a config in Hugging Face's spelling, tensor names, and the order of rows.

Keys and names: docs/gguf.md of ggml, and gguf-py's tensor mapping, both as published.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.checkpoint.bounded import shown
from engine.checkpoint.gguf_header import GgufHeader
from engine.checkpoint.read import read_tensor
from engine.checkpoint.tensors import TensorHeader
from engine.errors import CheckpointError, ConfigError, Refused

__all__ = ["convert"]

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z_]+)\.(weight|bias)\Z")
ROPE_FACTORS = "rope_freqs.weight"

# metadata key (after "llama.") -> config.json field
_FIELDS = {
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
_CHECKED_OR_HARMLESS = {  # read below, or no part of the computation
    "attention.value_length", "rope.dimension_count", "expert_count", "expert_used_count", "tensor_data_layout",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear",
}  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """`headers` by Hugging Face names; `arrange(name)`: how a tensor's rows are put into the order of these checkpoints."""

    config: dict[str, Any]
    headers: dict[str, TensorHeader]
    arrange: Callable[[str], Callable[[mx.array], mx.array] | None]


def convert(gguf: GgufHeader) -> Converted:
    """Raises ConfigError (a key out of bounds), CheckpointError (damaged) or Refused (not supported), naming key or tensor."""
    metadata = gguf.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise Refused(f"general.architecture {shown(architecture)} is not supported in GGUF files (llama is)")
    if metadata.get("split.count", 1) != 1:
        raise Refused(
            f"the GGUF file is one of {shown(metadata['split.count'])} parts; merge them (`llama-gguf-split --merge`)"
        )
    headers = {_name(name): header for name, header in gguf.tensors.items() if name != ROPE_FACTORS}
    config = _config(metadata, headers)
    if ROPE_FACTORS in gguf.tensors:
        config["rope_scaling"] = _llama3_scaling(gguf.tensors[ROPE_FACTORS], config)

    def arrange(name: str) -> Callable[[mx.array], mx.array] | None:
        if ".q_proj." in name:
            return lambda array: _half_split(array, config["num_attention_heads"])
        if ".k_proj." in name:
            return lambda array: _half_split(array, config.get("num_key_value_heads", config["num_attention_heads"]))
        return None

    return Converted(config, headers, arrange)


def _name(name: str) -> str:
    """The Hugging Face name, or the name as it is, which the accounting then reports as no part of the model."""
    parts = _TENSOR.match(name)
    if parts is None or parts[2] not in _NAMES:
        return name
    layer = "" if parts[1] is None else f"model.layers.{int(parts[1])}."
    return f"{layer}{_NAMES[parts[2]]}.{parts[3]}"


def _config(metadata: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Any]:
    values = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    for key, value in values.items():
        if key not in _FIELDS and key not in _CHECKED_OR_HARMLESS:
            raise Refused(f"GGUF key llama.{key[:80]} = {shown(value)} is not understood; use the safetensors checkpoint")
        if isinstance(value, list):
            raise Refused(f"GGUF key llama.{key[:80]} differs by layer, which is not supported")
    if values.get("expert_count"):
        raise Refused(
            f"llama.expert_count {shown(values['expert_count'])}: mixtures of experts are not supported in GGUF files"
        )
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config |= {field: values[key] for key, field in _FIELDS.items() if key in values}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        config.setdefault("vocab_size", len(tokens))
    if "rms_norm_eps" not in config:
        raise ConfigError("GGUF key llama.attention.layer_norm_rms_epsilon is missing")
    for key in ("rope.dimension_count", "attention.key_length"):  # rotary positions span the whole head
        if key in values:
            config["head_dim"] = values[key]
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, config.get("head_dim")) != config.get("head_dim"):
            raise Refused(f"GGUF key llama.{key} {shown(values[key])} differs from the head's {shown(config.get('head_dim'))}")
    config["tie_word_embeddings"] = "lm_head.weight" not in headers
    config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in headers
    config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in headers
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in metadata:
            config[f"{name}_token_id"] = metadata[f"tokenizer.ggml.{name}_token_id"]
    scaling = _scaling(values)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _scaling(values: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn") or values.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise Refused(f"rope scaling {shown(kind)} of this GGUF file is not supported (linear, yarn without attn_factor)")
    names = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    extra = {field: values[key] for field, key in names.items() if key in values} if kind == "yarn" else {}
    return {"rope_type": kind, "factor": factor, **extra}


def _llama3_scaling(header: TensorHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """The llama3 rope scaling that `rope_freqs.weight` (divisors of the frequencies, [head_dim / 2]) was made from.

    GGUF keeps the divisors and drops the parameters. Published checkpoints differ in the factor only (8 or 32), which is the
    largest divisor; divisors that do not follow from it are refused.
    """
    head_dim, theta = config.get("head_dim"), config.get("rope_theta", 10000.0)
    if not isinstance(theta, float) or not 1 < theta < 1e12:
        raise ConfigError(f"GGUF key llama.rope.freq_base {shown(theta)} must be a number from 1 to 1e12")
    if type(head_dim) is not int or header.shape != (head_dim // 2,) or header.dtype != "F32":
        raise CheckpointError(
            f"tensor {ROPE_FACTORS} must be F32 of shape [head_dim / 2] (got {header.dtype} {list(header.shape)})"
        )
    divisors = np.array(read_tensor(header, "float32"), np.float64)
    factor = float(divisors.max())
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * math.pi * theta ** (2 * np.arange(head_dim // 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(divisors, expected, rtol=1e-5, atol=0):
        raise Refused(f"tensor {ROPE_FACTORS} does not follow from llama3 rope scaling; use the safetensors checkpoint")
    return scaling


def _half_split(array: mx.array, heads: int) -> mx.array:
    """Rows of a q or k projection (or its bias) from pairs side by side (GGUF) to the two halves of a head (Hugging Face)."""
    rows, *columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, *columns).swapaxes(1, 2).reshape(rows, *columns)
