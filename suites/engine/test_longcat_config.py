"""LongCat's config.json and checkpoints: bounds, spellings, refusals, names, what is set aside and what stays float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.checkpoint import load
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, Refused
from engine.models import family, longcat_flash, longcat_flash_ngram
from suites.engine.tiny_checkpoints import write_directory
from suites.engine.tiny_longcat import NGRAM, RAW, expected_logits, tokens, weights

FIELDS = [
    ("hidden_size", 0),
    ("hidden_size", None),
    ("hidden_size", "24"),
    ("ffn_hidden_size", 0),
    ("expert_ffn_hidden_size", 1 << 30),
    ("num_layers", 0),
    ("num_layers", None),
    ("num_layers", 10**9),
    ("num_hidden_layers", 3),
    ("num_hidden_layers", 8),
    ("num_attention_heads", -1),
    ("q_lora_rank", 0),
    ("kv_lora_rank", None),
    ("kv_lora_rank", 1 << 40),
    ("qk_nope_head_dim", 0),
    ("qk_rope_head_dim", 5),
    ("v_head_dim", 2.5),
    ("n_routed_experts", 0),
    ("n_routed_experts", 65536),
    ("zero_expert_num", -1),
    ("zero_expert_num", 1 << 30),
    ("moe_topk", 0),
    ("moe_topk", 7),
    ("routed_scaling_factor", None),
    ("routed_scaling_factor", float("inf")),
    ("norm_topk_prob", "no"),
    ("router_bias", 1),
    ("mla_scale_q_lora", "true"),
    ("mla_scale_kv_lora", 0),
    ("attention_bias", 1),
    ("tie_word_embeddings", "x"),
    ("vocab_size", 0),
    ("vocab_size", 1 << 60),
    ("rms_norm_eps", 0),
    ("rope_theta", -1.0),
]
NGRAM_FIELDS = [
    ("emb_neighbor_num", None),
    ("emb_neighbor_num", 1),
    ("emb_neighbor_num", 17),
    ("emb_split_num", 0),
    ("emb_split_num", 5),
    ("ngram_vocab_size_ratio", 0),
    ("ngram_vocab_size_ratio", "78"),
    ("ngram_vocab_size_ratio", 1e300),
    ("eos_token_id", 61),
    ("eos_token_id", [2, 3]),
    ("eos_token_id", -1),
]


@pytest.mark.parametrize(("field", "value"), [*FIELDS, *NGRAM_FIELDS])
def test_a_bad_field_is_named_with_its_value(field: str, value: Any):
    with pytest.raises(ConfigError) as caught:
        longcat_flash_ngram.Config.from_dict(NGRAM | {field: value})
    text = str(caught.value)
    assert field in text and "\n" not in text
    assert value is None or str(value) in text


def test_tables_beyond_32_bit_rows_are_a_bad_field():
    with pytest.raises(ConfigError, match=r"ngram_vocab_size_ratio times vocab_size 131072 must stay below .* \(got 20000\)"):
        longcat_flash_ngram.Config.from_dict(NGRAM | {"vocab_size": 131072, "ngram_vocab_size_ratio": 20000})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_method", "GQA"),
        ("zero_expert_type", "copy"),
        ("hidden_act", "gelu"),
        ("use_longcat_dsa", True),
        ("index_topk", 2048),
        ("index_n_heads", 32),
        ("indexer_rope_interleave", True),
        ("sparse_attention", {"block": 64}),
        ("oe_ignored_token_ids", [1]),
        ("ngram_exclude_sp_token", True),
        ("ngram_fix_normalize_factor", True),
        ("ngram_fused_mode", "concat"),
        ("special_token_scope", [0, 10]),
        ("use_oe_embedding", True),
        ("rope_scaling", {"type": "deepseek_yarn", "factor": 120}),
    ],
)
@pytest.mark.parametrize("raw", [RAW, NGRAM], ids=["flash", "ngram"])
def test_what_is_not_supported_is_refused_by_name(raw: dict[str, Any], field: str, value: Any):
    with pytest.raises(Refused, match=field):
        family(raw["model_type"]).Config.from_dict(raw | {field: value})


def test_unset_fields_of_sibling_architectures_do_not_matter():
    unset = {"use_longcat_dsa": False, "index_topk": None, "ngram_exclude_sp_token": False, "oe_ignored_token_ids": None}
    assert longcat_flash_ngram.Config.from_dict(NGRAM | unset) == longcat_flash_ngram.Config.from_dict(NGRAM)


def test_ngram_fields_in_a_plain_config_are_refused_and_not_ignored():
    with pytest.raises(Refused, match=r"emb_neighbor_num = 4 .*longcat_flash_ngram"):
        longcat_flash.Config.from_dict(NGRAM)


def test_older_spellings_of_the_ngram_fields_mean_the_same():
    older = {
        "emb_neighbor_num": "oe_neighbor_num",
        "emb_split_num": "oe_split_num",
        "ngram_vocab_size_ratio": "oe_vocab_size_ratio",
    }
    spelled = {older.get(name, name): value for name, value in NGRAM.items()}
    plain = longcat_flash_ngram.Config.from_dict(NGRAM)
    assert longcat_flash_ngram.Config.from_dict(spelled) == plain
    assert longcat_flash_ngram.Config.from_dict(NGRAM | spelled) == plain
    with pytest.raises(ConfigError, match=r"emb_split_num and oe_split_num .* contradict"):
        longcat_flash_ngram.Config.from_dict(NGRAM | {"oe_split_num": 4})


def test_published_configs_of_both_sizes_are_read():
    chat = {"hidden_size": 6144, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "num_layers": 28}
    chat |= {
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
    }
    chat |= {"v_head_dim": 128, "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12, "routed_scaling_factor": 6.0}
    chat |= {"vocab_size": 131072, "rope_theta": 10000000.0, "attention_method": "MLA", "zero_expert_type": "identity"}
    config = longcat_flash.Config.from_dict(chat)
    assert config.attention.rope.rope_theta == 1e7 and config.rms_norm_eps == 1e-5 and config.attention.mla_scale_q_lora
    assert len(longcat_flash.parameters(config)) == 28 * (512 * 3 + 2 * 12 + 2) + 3
    lite = chat | {"hidden_size": 3072, "ffn_hidden_size": 6144, "expert_ffn_hidden_size": 1024, "num_attention_heads": 32}
    lite |= {"num_layers": 14, "num_hidden_layers": 28, "n_routed_experts": 256, "zero_expert_num": 128, "rope_theta": None}
    lite |= {"emb_neighbor_num": 4, "emb_split_num": 4, "ngram_vocab_size_ratio": 78, "eos_token_id": 2}
    lite |= {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 10,
            "original_max_position_embeddings": 32768,
            "mscale_all_dim": 1,
            "mscale": 1,
        }
    }
    ngram = longcat_flash_ngram.Config.from_dict(lite)
    shapes = longcat_flash_ngram.parameters(ngram)
    assert len(shapes) == 11143
    assert shapes["model.ngram_embeddings.embedders.11.weight"] == (10223616 + 23, 256)
    assert shapes["model.ngram_embeddings.post_projs.0.weight"] == (3072, 256)
    assert shapes["model.layers.13.mlp.router.classifier.weight"] == (384, 3072)
    assert shapes["model.layers.0.self_attn.1.kv_a_proj_with_mqa.weight"] == (576, 3072)
    assert ngram.attention.rope.attention_factor == 1.0
    assert ngram.attention.softmax_scale == pytest.approx(192**-0.5 * (0.1 * np.log(10) + 1) ** 2)


def arrays(raw: dict[str, Any]) -> dict[str, np.ndarray]:
    module = family(raw["model_type"])
    return weights(module.Config.from_dict(raw), module)


IDS = tokens(20, eos=(6, 13))


def check(path: Path, raw: dict[str, Any]) -> Any:
    """The directory loads and computes what its weights say."""
    loaded = load(path, dtype="float32")
    engine = Engine(family(loaded.model_type).Model(loaded.config, loaded.weights))
    got = np.array(engine.prefill(engine.open(), IDS, all_logits=True))
    np.testing.assert_allclose(got, expected_logits(IDS, raw), atol=5e-5)
    return loaded


@pytest.mark.parametrize("raw", [RAW, NGRAM], ids=["flash", "ngram"])
def test_a_saved_checkpoint_loads_and_computes(tmp_path: Path, raw: dict[str, Any]):
    check(write_directory(tmp_path, raw, arrays(raw)), raw)


@pytest.mark.parametrize(
    ("raw", "architecture"), [(RAW, "LongcatFlashForCausalLM"), (NGRAM, "LongcatFlashNgramForCausalLM")], ids=["flash", "ngram"]
)
def test_architectures_stand_in_for_a_missing_model_type(tmp_path: Path, raw: dict[str, Any], architecture: str):
    unnamed = {name: value for name, value in raw.items() if name != "model_type"} | {"architectures": [architecture]}
    assert check(write_directory(tmp_path, unnamed, arrays(raw)), raw).model_type == raw["model_type"]


def test_unknown_architectures_do_not(tmp_path: Path):
    unnamed = {name: value for name, value in RAW.items() if name != "model_type"} | {
        "architectures": ["LongcatFlashSparse", 3]
    }
    with pytest.raises(ConfigError, match="model_type must name a family"):
        load(write_directory(tmp_path, unnamed, arrays(RAW)))


def older_name(name: str) -> str:
    part = name.split(".")
    if part[1] != "ngram_embeddings":
        return name
    return f"model.oe_embed_{'tokens' if part[2] == 'embedders' else 'proj'}{part[3]}.weight"


def test_older_names_of_the_ngram_weights_load_the_same(tmp_path: Path):
    check(write_directory(tmp_path, NGRAM, {older_name(name): w for name, w in arrays(NGRAM).items()}), NGRAM)


def test_both_names_of_one_weight_are_an_error(tmp_path: Path):
    drawn = arrays(NGRAM)
    drawn["model.oe_embed_proj1.weight"] = drawn["model.ngram_embeddings.post_projs.1.weight"]
    with pytest.raises(CheckpointError, match=r"oe_embed_proj1.*two spellings"):
        load(write_directory(tmp_path, NGRAM, drawn))


def test_draft_layers_copies_and_rows_of_zero_experts_are_set_aside(tmp_path: Path):
    drawn, filler = arrays(NGRAM), np.zeros((10, 24), np.float32)
    drawn["model.mtp.embed_tokens.weight"] = filler
    drawn["model.mtp.layers.0.eh_proj.weight"] = filler
    drawn["model.layers.1.mlp.experts.5.gate_proj.weight"] = filler
    drawn["model.ngram_embeddings.word_embeddings.weight"] = drawn["model.embed_tokens.weight"]
    assert any("4 tensors" in note for note in check(write_directory(tmp_path, NGRAM, drawn), NGRAM).notes)


@pytest.mark.parametrize(
    "name",
    [
        "model.mtpx.weight",
        "model.layers.0.mtp.weight",
        "model.layers.0.mlp.experts.6.gate_proj.weight",
        "model.layers.0.mlp.experts.4.down_proj.weight",
        "model.layers.0.self_attn.2.o_proj.weight",
        "model.oe_embed_tokens6.weight",
    ],
)
def test_any_other_tensor_is_an_error_that_names_it(tmp_path: Path, name: str):
    with pytest.raises(CheckpointError, match="not part of the model"):
        load(write_directory(tmp_path, NGRAM, arrays(NGRAM) | {name: np.zeros((2, 2), np.float32)}))


def test_the_router_stays_float32_in_every_compute_dtype(tmp_path: Path):
    raw = RAW | {"router_bias": True}
    loaded = load(write_directory(tmp_path, raw, arrays(raw)), dtype="bfloat16")
    kept = {name for name, array in loaded.weights.items() if array.dtype == mx.float32}
    names = ("classifier.weight", "classifier.bias", "e_score_correction_bias")
    assert kept == {f"model.layers.{i}.mlp.router.{name}" for i in range(2) for name in names}
    np.testing.assert_array_equal(
        np.array(loaded.weights["model.layers.0.mlp.router.classifier.weight"]),
        arrays(raw)["model.layers.0.mlp.router.classifier.weight"],
    )
