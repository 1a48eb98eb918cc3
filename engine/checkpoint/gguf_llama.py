"""GGUF files of architecture `llama`: rows of q and k in another order, llama3 rope scaling as a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from engine.checkpoint.bounded import shown
from engine.checkpoint.gguf_convert import FIELDS, SCALING, TENSORS, Converted, basic_config, renamed, rope_scaling, values
from engine.checkpoint.gguf_header import GgufHeader
from engine.checkpoint.read import read_tensor
from engine.checkpoint.tensors import TensorHeader
from engine.errors import CheckpointError, ConfigError, Refused

__all__ = ["convert"]

_NAMES = TENSORS | {"ffn_norm": "post_attention_layernorm"}
_CHECKED_OR_HARMLESS = {  # read, or no part of the computation
    "attention.value_length", "rope.dimension_count", "expert_count", "expert_used_count", "tensor_data_layout",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"


def convert(gguf: GgufHeader) -> Converted:
    """Raises as gguf_convert.convert does."""
    headers = {renamed(name, _NAMES): header for name, header in gguf.tensors.items() if name != ROPE_FACTORS}
    config = _config(gguf.metadata, headers)
    if ROPE_FACTORS in gguf.tensors:
        config["rope_scaling"] = _llama3_scaling(gguf.tensors[ROPE_FACTORS], config)

    def arrange(name: str) -> Callable[[mx.array], mx.array] | None:
        if ".q_proj." in name:
            return lambda array: _half_split(array, config["num_attention_heads"])
        if ".k_proj." in name:
            return lambda array: _half_split(array, config.get("num_key_value_heads", config["num_attention_heads"]))
        return None

    return Converted(config, headers, arrange)


def _config(metadata: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Any]:
    found = values(metadata, "llama", FIELDS.keys() | SCALING | _CHECKED_OR_HARMLESS)
    if found.get("expert_count"):
        raise Refused(f"llama.expert_count {shown(found['expert_count'])}: mixtures of experts are not supported in GGUF files")
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config |= basic_config(metadata, headers, "llama", found)
    config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in headers
    scaling = rope_scaling(found)
    return config | ({"rope_scaling": scaling} if scaling else {})


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
