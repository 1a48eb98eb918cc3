"""engine/models/gemma3.py: every spelling of a config and of names, and logits against the float64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from engine.checkpoint import load
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, Refused
from engine.models import gemma3
from engine.state import Span
from reference_models import gemma3 as reference
from suites.engine.tiny_checkpoints import write_directory

W = 6
RAW: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 10,
    "rope_theta": 100.0,
    "rope_local_base_freq": 10.0,
    "sliding_window": W,
    "sliding_window_pattern": 3,
    "tie_word_embeddings": False,
}
SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
NEW_SPELLING = {
    "rope_theta": None,
    "rope_local_base_freq": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": SCALED,
    "new_spelling": NEW_SPELLING,
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "all_sliding": {"layer_types": ["sliding_attention"] * 4},
    "all_full": {"layer_types": ["full_attention"] * 4, "sliding_window": None},
    "window_of_one": {"sliding_window": 1},
    "capped": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "mqa": {"num_key_value_heads": 1},
}


def weights(raw: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = gemma3.parameters(gemma3.Config.from_dict(raw))
    return {
        name: (rng.normal(size=shape) * (0.3 if "norm" in name or "bias" in name else shape[-1] ** -0.5)).astype(np.float32)
        for name, shape in shapes.items()
    }


def model(raw: dict[str, Any], dtype: mx.Dtype = mx.float32) -> gemma3.Model:
    held = {name: mx.array(w).astype(mx.float32 if gemma3.keep_float32(name) else dtype) for name, w in weights(raw).items()}
    return gemma3.Model(gemma3.Config.from_dict(raw), held)


def tokens(n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(1).integers(0, RAW["vocab_size"], n)]


def expected(raw: dict[str, Any], ids: list[int]) -> np.ndarray:
    tensors = {name: torch.from_numpy(w) for name, w in weights(raw).items()}
    return reference.logits({k: v for k, v in raw.items() if v is not None}, tensors, ids).numpy()


def rows(raw: dict[str, Any], ids: list[int], chunk: int | None = None) -> np.ndarray:
    engine = Engine(model(raw))
    return np.array(engine.prefill(engine.open(), ids, all_logits=True, chunk=chunk))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_equations(name: str):
    raw, ids = RAW | VARIANTS[name], tokens(4 * W + 3)
    np.testing.assert_allclose(rows(raw, ids), expected(raw, ids), atol=1e-4)


@pytest.mark.parametrize("chunk", [1, W - 1, W, W + 1, 3 * W + 1])
def test_chunks_across_the_window_are_one_piece(chunk: int):
    ids = tokens(5 * W)
    np.testing.assert_allclose(rows(RAW, ids, chunk), expected(RAW, ids), atol=1e-4)


@pytest.mark.parametrize("first", [1, W - 1, W, W + 1, 2 * W])
def test_steps_after_a_prompt_of_any_length_are_one_piece(first: int):
    ids, engine = tokens(2 * W + 9), Engine(model(RAW))
    sequence = engine.open()
    got = [np.array(engine.prefill(sequence, ids[:first], all_logits=True))]
    got += [np.array(engine.step({sequence: token})) for token in ids[first:]]
    np.testing.assert_allclose(np.concatenate(got), expected(RAW, ids), atol=1e-4)


def test_a_long_text_of_sliding_layers_takes_no_more_memory():
    raw = RAW | VARIANTS["all_sliding"]
    engine = Engine(model(raw))
    sequence, sizes = engine.open(), set()
    engine.prefill(sequence, tokens(W))
    for token in tokens(40):
        engine.step({sequence: token})
        sizes.add(engine.nbytes(sequence))
    assert len(sizes) == 1


def test_a_scale_of_positions_is_not_that_of_sliding_layers():
    ids, sliding = tokens(20), VARIANTS["all_sliding"]
    np.testing.assert_array_equal(rows(RAW | sliding | SCALED, ids), rows(RAW | sliding, ids))
    assert np.abs(rows(RAW | SCALED, ids) - rows(RAW, ids)).max() > 1e-2


def test_both_spellings_of_rope_are_one_config():
    old = gemma3.Config.from_dict(RAW | SCALED)
    assert gemma3.Config.from_dict(RAW | NEW_SPELLING) == old
    both = RAW | NEW_SPELLING | {"rope_theta": 100.0}
    assert gemma3.Config.from_dict(both | SCALED) == old
    with pytest.raises(ConfigError, match="contradict"):
        gemma3.Config.from_dict(both | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})


def test_layer_types_go_before_a_pattern_and_a_pattern_is_every_sixth_layer_by_default():
    def full(**changes: Any) -> list[int]:
        config = gemma3.Config.from_dict(RAW | {"num_hidden_layers": 12} | changes)
        return [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]

    assert full() == [2, 5, 8, 11]
    assert full(sliding_window_pattern=None) == [5, 11]
    assert full(sliding_window_pattern=None, _sliding_window_pattern=4) == [3, 7, 11]
    assert full(layer_types=["full_attention"] + ["sliding_attention"] * 11) == [0]


def test_the_config_of_a_published_model_with_vision_says_only_what_differs():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = gemma3.Config.from_dict({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.query_pre_attn_scalar, config.tie_word_embeddings, config.multimodal) == (256.0, True, True)
    ropes = dict(config.rope)
    assert (ropes["full_attention"].rope_theta, ropes["full_attention"].factor) == (1e6, 8.0)
    assert (ropes["sliding_attention"].rope_theta, ropes["sliding_attention"].rope_type) == (1e4, "default")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_checkpoint_with_vision_is_loaded_and_the_rest_set_aside(tmp_path: Path, prefix: str):
    raw = RAW | {"tie_word_embeddings": True}
    arrays = {prefix + name.removeprefix("model."): array for name, array in weights(raw).items()}
    tower = prefix.replace("language_model.model.", "").replace("language_model.", "")
    arrays[f"{tower}vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = np.ones((2, 2), np.float32)
    arrays[f"{tower}multi_modal_projector.mm_input_projection_weight"] = np.ones((2, 2), np.float32)
    text = {name: value for name, value in raw.items() if name != "tie_word_embeddings"}
    wrapped = {"model_type": "gemma3", "text_config": text | {"eos_token_id": 7}}
    loaded = load(write_directory(tmp_path / "vision", wrapped, arrays), dtype="float32")
    assert {name: np.array(w).tolist() for name, w in loaded.weights.items()} == {
        name: w.tolist() for name, w in weights(raw).items()
    }
    assert any("2 tensors" in note for note in loaded.notes) and loaded.eos_token_ids == {7}
    with pytest.raises(CheckpointError, match="not part of the model"):
        load(write_directory(tmp_path / "text", raw, arrays))


def test_norms_stay_float32_in_every_compute_dtype_and_rows_have_the_dtype(tmp_path: Path):
    checkpoint = load(write_directory(tmp_path / "m", RAW, weights(RAW)), dtype="bfloat16")
    norm = checkpoint.weights["model.layers.0.self_attn.q_norm.weight"]
    assert norm.dtype == mx.float32 and checkpoint.weights["lm_head.weight"].dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(norm), weights(RAW)["model.layers.0.self_attn.q_norm.weight"])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_logits_in_half_precision_have_its_dtype_and_are_close(dtype: mx.Dtype):
    ids, engine = tokens(20), Engine(model(RAW, dtype))
    got = engine.prefill(engine.open(), ids, all_logits=True)
    truth = expected(RAW, ids)
    assert got.dtype == dtype
    assert np.abs(np.array(got.astype(mx.float32)) - truth).max() < 0.1 * np.abs(truth).max()


def test_the_factor_of_embeddings_is_rounded_to_the_compute_dtype():
    raw = RAW | {"hidden_size": 40, "layer_types": ["full_attention"] * 4}  # 40 ** 0.5 is 0.2 % above its bfloat16

    class Layer:
        layer_type = "full_attention"

        def __call__(self, x: mx.array, *_: Any) -> mx.array:
            self.seen = x
            return x

    served: Any = model(raw, mx.bfloat16)
    layer = Layer()
    served.layers = [layer]
    served.forward(mx.array(tokens(5)), [Span(0, 5, 0, served.make_slots())], None)
    words = served.embed_tokens(mx.array(tokens(5)))
    assert layer.seen.dtype == mx.bfloat16
    assert mx.array_equal(layer.seen, words * mx.array(6.3125, mx.bfloat16)).item()


def test_a_residual_beyond_what_float16_holds_is_no_trouble_in_float16():
    raw, loud = RAW | {"tie_word_embeddings": True}, "model.layers.0.post_feedforward_layernorm.weight"
    large = {name: w + (name == loud) * np.float32(40000) for name, w in weights(raw).items()}
    config, rows = gemma3.Config.from_dict(raw), {}
    for dtype in (mx.float32, mx.float16):
        held = {name: mx.array(w).astype(mx.float32 if gemma3.keep_float32(name) else dtype) for name, w in large.items()}
        engine = Engine(gemma3.Model(config, held))
        rows[dtype] = np.array(engine.prefill(engine.open(), tokens(20), all_logits=True).astype(mx.float32))
    assert np.abs(rows[mx.float16] - rows[mx.float32]).max() < 0.02 * np.abs(rows[mx.float32]).max()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", 0),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 7),
        ("head_dim", 1 << 20),
        ("num_hidden_layers", 1 << 20),
        ("sliding_window", None),
        ("sliding_window", 0),
        ("sliding_window", -8),
        ("sliding_window", 1 << 40),
        ("sliding_window", "8"),
        ("sliding_window_pattern", 0),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", "sliding_attention"),
        ("query_pre_attn_scalar", 0),
        ("query_pre_attn_scalar", float("inf")),
        ("rope_local_base_freq", 0.5),
        ("rope_local_base_freq", "x"),
        ("rope_theta", float("nan")),
        ("rope_parameters", {"rope_theta": 100.0}),
        ("rope_parameters", {"full_attention": {"rope_theta": 100.0}}),
        ("rope_parameters", {"full_attention": 3, "sliding_attention": 3}),
        ("final_logit_softcapping", -1.0),
        ("tie_word_embeddings", "no"),
        ("text_config", 3),
    ],
)
def test_a_bad_field_is_named(field: str, value: Any):
    with pytest.raises(ConfigError) as caught:
        gemma3.Config.from_dict(RAW | {field: value})
    text = str(caught.value)
    assert ("num_key_value_heads" if field == "num_attention_heads" else field) in text and "\n" not in text


def test_a_bad_field_within_text_config_is_named_with_its_section():
    with pytest.raises(ConfigError, match=r"text_config\.head_dim"):
        gemma3.Config.from_dict({"model_type": "gemma3", "text_config": RAW | {"head_dim": 0}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_bidirectional_attention", True),
        ("hidden_activation", "silu"),
        ("layer_types", ["full_attention", "full_attention", "chunked_attention", "full_attention"]),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any):
    with pytest.raises(Refused, match="rope_type" if field == "rope_scaling" else field):
        gemma3.Config.from_dict(RAW | {field: value})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.1.self_attn.q_norm.weight", "missing"),
        ("model.layers.2.pre_feedforward_layernorm.weight", "missing"),
        ("model.layers.0.self_attn.k_norm.weight", "shape"),
        ("model.layers.3.self_attn.o_proj.weight", "shape"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_a_one_line_error(tmp_path: Path, name: str, change: str):
    arrays = weights(RAW)
    if change == "missing":
        del arrays[name]
    else:
        arrays[name] = arrays[name][..., :-1]
    with pytest.raises(CheckpointError) as caught:
        load(write_directory(tmp_path / "m", RAW, arrays))
    assert name in str(caught.value) and "\n" not in str(caught.value)
