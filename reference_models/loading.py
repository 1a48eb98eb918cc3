"""Checkpoints for the references: a directory of config.json and safetensors, or one GGUF file, into torch tensors.

A path of its own, so that a fault in the engine's loader shows: safetensors and GGUF are read, dequantised and renamed here
with the formats' own packages. GGUF facts: llama's q and k rows are stored in pairs for interleaved rotation and are put
back into halves here; `rope_freqs.weight` holds llama3 rope scaling as one divisor for each frequency.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import reference_models
from reference_models import gguf_file, quantised
from reference_models.recompute import ReferenceError

__all__ = ["load"]

MAX_CONFIG_BYTES = 4 << 20


def load(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the tensors under the names of the family's `parameters`; ReferenceError names file and field.

    Tensors have the file's dtype (safetensors), float64 (what was quantised there) or float32 (GGUF).
    """
    path = Path(path)
    try:
        return _gguf(path) if path.is_file() else _directory(path)
    except (OSError, SafetensorError) as error:
        raise ReferenceError(f"cannot read checkpoint {path.name}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ReferenceError(f"{path.name} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ReferenceError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ReferenceError(f"{path.name} must hold an object (got {type(value).__name__})")
    return value


def _directory(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = _json(path / "config.json")
    weights: dict[str, torch.Tensor] = {}
    for name in _files(path):
        weights.update(load_file(path / name))
    weights = quantised.decoded(config, weights)
    renamed = getattr(_reference(config), "renamed", None)
    return config, weights if renamed is None else renamed(config, weights)


def _reference(config: dict[str, Any]) -> object:
    try:
        return reference_models.find(str(config.get("model_type")))
    except ReferenceError:  # the names of an unknown family are as they are; whoever recomputes it is told
        return None


def _files(path: Path) -> list[str]:
    """The one file of a checkpoint goes before an index, which may be left over; a single file may have any name."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not index.is_file():
        found = sorted(file.name for file in path.glob("*.safetensors"))
        if len(found) != 1:
            raise ReferenceError(f"{path.name} has {len(found)} safetensors files and no {index.name}")
        return found
    shards = _json(index).get("weight_map")
    names = list(shards.values()) if isinstance(shards, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ReferenceError(f"{index.name}: 'weight_map' must map to file names beside it (got {shards!r:.80})")
    return sorted(set(names))


_GGUF_NAMES = {
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


def _checkpoint_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.([0-9]+)\.)?([a-z_]+)\.(weight|bias)", name)
    if not match or match[2] not in _GGUF_NAMES:
        raise ReferenceError(f"GGUF tensor {name!r} is not one of llama's")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_GGUF_NAMES[match[2]]}.{match[3]}"


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads * head_dim, ...] from pairs (2i, 2i + 1) to halves (i, i + head_dim / 2)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _gguf(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    metadata, arrays = gguf_file.read(path)
    divisors = arrays.pop("rope_freqs.weight", None)
    named = {_checkpoint_name(name): array for name, array in arrays.items()}
    config = _gguf_config(metadata, named)
    if divisors is not None:
        config["rope_scaling"] = _llama3_scaling(divisors, config)
    for name, array in named.items():
        if ".self_attn.q_proj." in name or ".self_attn.k_proj." in name:
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            named[name] = _halves(array, heads)
    return config, {name: torch.from_numpy(np.array(array, np.float32)) for name, array in named.items()}


def _gguf_config(metadata: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ReferenceError(f"GGUF field 'general.architecture' must be 'llama' (got {architecture!r})")

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{name}", default)
        if value is None:
            raise ReferenceError(f"GGUF field 'llama.{name}' is missing")
        return value

    if "model.embed_tokens.weight" not in arrays:
        raise ReferenceError("GGUF tensor 'token_embd.weight' is missing")
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // heads)
    if field("rope.dimension_count", head_dim) != head_dim:
        raise ReferenceError(f"GGUF field 'llama.rope.dimension_count' must be the head size {head_dim}")
    config = {
        "model_type": "llama",
        "vocab_size": arrays["model.embed_tokens.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in arrays,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in arrays,
        "tie_word_embeddings": "lm_head.weight" not in arrays,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind != "none":
        config["rope_scaling"] = {"rope_type": kind, "factor": field("rope.scaling.factor")}
        if "llama.rope.scaling.original_context_length" in metadata:
            config["rope_scaling"]["original_max_position_embeddings"] = field("rope.scaling.original_context_length")
    return config


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
