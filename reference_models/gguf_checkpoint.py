"""A GGUF file as a checkpoint: its metadata as a config, its tensors under checkpoint names and in their order and form.

llama: q and k rows are stored in pairs for interleaved rotation and are put back into halves here; `rope_freqs.weight` holds
llama3 rope scaling as one divisor for each frequency. gemma3: norms are stored as 1 + w; the pattern of layers, the rotary base
of local ones and the scale of queries are not stored, they are those of the published models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reference_models import gguf_file
from reference_models.recompute import ReferenceError

__all__ = ["load"]

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    **_NAMES,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_27B_LAYERS = 62


def load(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the tensors, float32; raises ReferenceError, which names the field or tensor."""
    metadata, arrays = gguf_file.read(path)
    architecture = metadata.get("general.architecture")
    if architecture == "llama":
        config, named = _llama(metadata, arrays)
    elif architecture == "gemma3":
        config, named = _gemma3(metadata, arrays)
    else:
        raise ReferenceError(f"GGUF field 'general.architecture' must be 'llama' or 'gemma3' (got {architecture!r})")
    return config, {name: torch.from_numpy(np.array(array, np.float32)) for name, array in named.items()}


class _Fields:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata, self._architecture = metadata, architecture

    def __contains__(self, name: str) -> bool:
        return f"{self._architecture}.{name}" in self._metadata

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._architecture}.{name}", default)
        if value is None:
            raise ReferenceError(f"GGUF field '{self._architecture}.{name}' is missing")
        return value


def _named(arrays: Mapping[str, np.ndarray], names: Mapping[str, str], architecture: str) -> dict[str, np.ndarray]:
    named = {}
    for name, array in arrays.items():
        match = re.fullmatch(r"(?:blk\.([0-9]+)\.)?([a-z_]+)\.(weight|bias)", name)
        if not match or match[2] not in names:
            raise ReferenceError(f"GGUF tensor {name!r} is not one of {architecture}'s")
        layer = f"model.layers.{match[1]}." if match[1] else ""
        named[f"{layer}{names[match[2]]}.{match[3]}"] = array
    if "model.embed_tokens.weight" not in named:
        raise ReferenceError("GGUF tensor 'token_embd.weight' is missing")
    return named


def _config(metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray], field: _Fields) -> dict[str, Any]:
    """The fields that architectures share."""
    heads = field("attention.head_count")
    head_dim = field("attention.key_length", field("embedding_length") // heads)
    if field("rope.dimension_count", head_dim) != head_dim:
        raise ReferenceError(f"GGUF field 'rope.dimension_count' must be the head size {head_dim}")
    config = {
        "vocab_size": arrays["model.embed_tokens.weight"].shape[0],
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in arrays,
        "tie_word_embeddings": "lm_head.weight" not in arrays,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if "rope.scaling.type" in field and field("rope.scaling.type") != "none":
        scaling = {"rope_type": field("rope.scaling.type"), "factor": field("rope.scaling.factor")}
        if "rope.scaling.original_context_length" in field:
            scaling["original_max_position_embeddings"] = field("rope.scaling.original_context_length")
        config["rope_scaling"] = scaling
    return config


def _llama(metadata: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    divisors = arrays.pop("rope_freqs.weight", None)
    named = _named(arrays, _NAMES, "llama")
    config = {"model_type": "llama", **_config(metadata, named, _Fields(metadata, "llama"))}
    config["mlp_bias"] = "model.layers.0.mlp.down_proj.bias" in named
    if divisors is not None:
        config["rope_scaling"] = _llama3_scaling(divisors, config)
    for name, array in named.items():
        if ".self_attn.q_proj." in name or ".self_attn.k_proj." in name:
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            named[name] = _halves(array, heads)
    return config, named


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads * head_dim, ...] from pairs (2i, 2i + 1) to halves (i, i + head_dim / 2)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _gemma3(metadata: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    field = _Fields(metadata, "gemma3")
    named = _named(arrays, _GEMMA_NAMES, "gemma3")
    config = {"model_type": "gemma3_text", **_config(metadata, named, field)}
    is_27b = config["num_hidden_layers"] == _GEMMA_27B_LAYERS
    config |= {
        "sliding_window": field("attention.sliding_window"),
        "sliding_window_pattern": field("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": field("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"] if is_27b else config["head_dim"],
    }
    if "rope.freq_base" not in field:
        config["rope_theta"] = 1e6
    if "final_logit_softcapping" in field:
        config["final_logit_softcapping"] = field("final_logit_softcapping")
    return config, {name: array - 1 if name.endswith("norm.weight") else array for name, array in named.items()}


def _llama3_scaling(divisors: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """The llama3 scaling that `rope_freqs.weight` was made from.

    The file has the divisors only. All published checkpoints have bands 1 and 4 and length 8192; the tensor must follow from
    these and its largest divisor, else the file is refused.
    """
    original, low, high = 8192, 1.0, 4.0
    factor = float(divisors.max())
    frequency = config["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
    kept = np.clip((original * frequency / (2 * np.pi) - low) / (high - low), 0, 1)
    if divisors.shape != kept.shape or not np.allclose(divisors, 1 / (kept + (1 - kept) / factor), rtol=1e-5):
        raise ReferenceError("GGUF tensor 'rope_freqs.weight' is not llama3 rope scaling with bands 1 and 4 over 8192 tokens")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
