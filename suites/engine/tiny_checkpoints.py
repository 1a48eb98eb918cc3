"""Tiny llama checkpoints on disk for the tests of loading, and the means to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.models.llama import Config, parameters

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
NUMPY = {"F32": np.float32, "F16": np.float16}


def tensors(config: Mapping[str, Any] = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 arrays that are exact in float16 and bfloat16, by parameter name."""
    random = np.random.default_rng(seed)
    shapes = parameters(Config.from_dict(dict(config)))
    return {name: (random.integers(-64, 64, shape) / 64).astype(np.float32) for name, shape in shapes.items()}


def header_and_data(arrays: Mapping[str, np.ndarray], dtype: str = "F32") -> tuple[dict[str, Any], bytes]:
    header, parts, position = {}, [], 0
    for name, array in arrays.items():
        # bfloat16 is the upper half of float32
        data = (array.astype("<f4").view("<u4") >> 16).astype("<u2") if dtype == "BF16" else array.astype(NUMPY[dtype])
        parts.append(data.tobytes())
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [position, position + len(parts[-1])]}
        position += len(parts[-1])
    return header, b"".join(parts)


def write_safetensors(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def write_directory(
    path: Path,
    config: Mapping[str, Any] = CONFIG,
    arrays: Mapping[str, np.ndarray] | None = None,
    dtype: str = "F32",
    edit: Callable[[dict[str, Any]], Any] = lambda header: None,
) -> Path:
    """config.json and model.safetensors; `edit` changes the header in place before it is written."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    header, data = header_and_data(tensors() if arrays is None else arrays, dtype)
    edit(header)
    write_safetensors(path / "model.safetensors", header, data)
    return path


def write_shards(path: Path, count: int = 3) -> dict[str, str]:
    """The tiny checkpoint in `count` shards with an index; returns the weight_map."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    arrays, weight_map = tensors(), {}
    for index in range(count):
        shard = f"model-{index + 1:05}-of-{count:05}.safetensors"
        part = {name: array for place, (name, array) in enumerate(arrays.items()) if place % count == index}
        write_safetensors(path / shard, *header_and_data(part))
        weight_map |= dict.fromkeys(part, shard)
    write_index(path, weight_map)
    return weight_map


def write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as GGUF files have them: pair (i, i + d/2) of a head side by side."""
    rows = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "he", "Ġt", "Ġthe", *(str(i) for i in range(10))]


def write_gguf(
    path: Path,
    arrays: Mapping[str, np.ndarray] | None = None,
    quantisation: Callable[[str, np.ndarray], gguf.GGMLQuantizationType] = lambda name, array: gguf.GGMLQuantizationType.F32,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    skip: str = "",
    vocabulary: bool = True,
) -> Path:
    """The tiny checkpoint as a GGUF file; `edit` adds or replaces keys, `skip` leaves out one key."""
    writer = gguf.GGUFWriter(path, "llama")
    keys: dict[str, tuple[Any, gguf.GGUFValueType]] = {
        "llama.block_count": (CONFIG["num_hidden_layers"], gguf.GGUFValueType.UINT32),
        "llama.context_length": (256, gguf.GGUFValueType.UINT32),
        "llama.embedding_length": (CONFIG["hidden_size"], gguf.GGUFValueType.UINT32),
        "llama.feed_forward_length": (CONFIG["intermediate_size"], gguf.GGUFValueType.UINT32),
        "llama.attention.head_count": (CONFIG["num_attention_heads"], gguf.GGUFValueType.UINT32),
        "llama.attention.head_count_kv": (CONFIG["num_key_value_heads"], gguf.GGUFValueType.UINT32),
        "llama.attention.layer_norm_rms_epsilon": (CONFIG["rms_norm_eps"], gguf.GGUFValueType.FLOAT32),
        "llama.rope.freq_base": (CONFIG["rope_theta"], gguf.GGUFValueType.FLOAT32),
        "llama.vocab_size": (CONFIG["vocab_size"], gguf.GGUFValueType.UINT32),
    }
    for key, (value, kind) in keys.items():
        if key != skip:
            writer.add_key_value(key, value, kind)
    if vocabulary:
        tokens = TOKENS + [f"<pad{i}>" for i in range(CONFIG["vocab_size"] - len(TOKENS))]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token.startswith("<") else 1 for token in tokens])
        writer.add_token_merges(["h e", "Ġ t", "Ġt he"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if skip != "tokenizer.ggml.pre":
            writer.add_tokenizer_pre("gpt-2")
    edit(writer)
    for name, array in (tensors() if arrays is None else arrays).items():
        stem, _, kind = name.rpartition(".")
        layer = ""
        if stem.startswith("model.layers."):
            number, stem = stem.removeprefix("model.layers.").split(".", 1)
            layer = f"blk.{number}."
        heads = {"self_attn.q_proj": CONFIG["num_attention_heads"], "self_attn.k_proj": CONFIG["num_key_value_heads"]}.get(stem)
        stored = array if heads is None else interleaved(array, heads)
        chosen = quantisation(name, array)
        data = gguf.quantize(stored, chosen)
        writer.add_tensor(f"{layer}{GGUF_NAMES.get(stem, stem)}.{kind}", data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
