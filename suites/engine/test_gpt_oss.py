"""engine/models/gpt_oss.py: spellings of a config, choices of experts, and logits against the float64 reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from engine.checkpoint import load
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, Refused
from engine.layers.activations import clamped_swiglu
from engine.layers.quantised import QuantisedTensor
from engine.layers.weights import Weights
from engine.models import gpt_oss
from reference_models import gpt_oss as reference
from suites.engine.tiny_checkpoints import write_directory, write_safetensors

W = 6
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 24,
}
RAW: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "intermediate_size": 32,  # as large as hidden_size: a matrix that lies the wrong way round has the right shape
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "sliding_window": W,
    "swiglu_limit": 1.5,
    "rope_theta": 50.0,
    "rope_scaling": YARN,
    "tie_word_embeddings": False,
}
NEW_SPELLING = {"rope_theta": None, "rope_scaling": None, "rope_parameters": YARN | {"rope_theta": 50.0}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "new_spelling": NEW_SPELLING,
    "rounded_yarn": {"rope_scaling": YARN | {"truncate": True}},
    "no_scaling": {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "unbiased": {"attention_bias": False},
    "tied": {"tie_word_embeddings": True},
    "all_sliding": {"layer_types": ["sliding_attention"] * 4},
    "all_full": {"layer_types": ["full_attention"] * 4, "sliding_window": None},
    "one_expert": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "every_expert": {"num_experts_per_tok": 5},
    "steep": {"swiglu_alpha": 3.0, "swiglu_limit": 7.0},
}


def weights(raw: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = gpt_oss.parameters(gpt_oss.Config.from_dict(raw))

    def scale(name: str, shape: tuple[int, ...]) -> float:
        if len(shape) == 1 or name.endswith("_bias"):
            return 0.5
        return 1.5 * shape[-2 if gpt_oss.inputs_first(name) else -1] ** -0.5

    return {
        name: (rng.normal(size=shape) * scale(name, shape) + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def model(raw: dict[str, Any], dtype: mx.Dtype = mx.float32) -> gpt_oss.Model:
    held = {name: mx.array(w).astype(mx.float32 if gpt_oss.keep_float32(name) else dtype) for name, w in weights(raw).items()}
    return gpt_oss.Model(gpt_oss.Config.from_dict(raw), held)


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


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_logits_in_half_precision_have_its_dtype_and_are_close(dtype: mx.Dtype):
    raw = RAW | VARIANTS["every_expert"]  # a choice of experts may differ in a narrower dtype
    ids, engine = tokens(20), Engine(model(raw, dtype))
    got = engine.prefill(engine.open(), ids, all_logits=True)
    truth = expected(raw, ids)
    assert got.dtype == dtype
    assert np.abs(np.array(got.astype(mx.float32)) - truth).max() < 0.1 * np.abs(truth).max()


def test_sinks_and_every_bias_reach_the_logits():
    ids, truth = tokens(12), rows(RAW, tokens(12))
    for name in weights(RAW):
        if name.endswith(("sinks", "bias")) and ".layers.2." in name:
            changed = model(RAW)
            held = {other: mx.array(w) for other, w in weights(RAW).items()} | {name: mx.array(weights(RAW)[name]) * 0}
            changed = gpt_oss.Model(gpt_oss.Config.from_dict(RAW), held)
            engine = Engine(changed)
            got = np.array(engine.prefill(engine.open(), ids, all_logits=True))
            moved = np.abs(got - truth).max()
            # a bias of keys adds the same to every score of a query before rotation only, so it is not without effect either
            assert moved > 1e-3, name


@pytest.mark.parametrize("count", [1, 2, 33])
def test_of_experts_with_equal_logits_the_first_are_chosen_in_any_batch(count: int):
    held = {"weight": mx.zeros((7, 4)), "bias": mx.array([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.5])}
    router = gpt_oss.Router(Weights(held), 4)
    ids, shares = router(mx.ones((count, 4)))
    assert ids.tolist() == [[1, 3, 2, 4]] * count
    e = np.exp([0.0, 0.0, -1.0, -1.0])
    np.testing.assert_allclose(np.array(shares), np.tile(e / e.sum(), (count, 1)), rtol=1e-6)


@pytest.mark.parametrize("count", [1, 3000])
def test_the_gate_is_clamped_above_and_the_up_on_both_sides(count: int):
    values = np.array([-1e4, -88.0, -7.5, -7.0, -1.0, 0.0, 0.3, 6.9, 7.0, 7.5, 1e4], np.float32)
    gate, up = (np.tile(a, (count, 1)) for a in (values, values[::-1]))
    wide = np.minimum(gate.astype(np.float64), 7.0)
    with np.errstate(over="ignore"):
        truth = wide / (1 + np.exp(-1.702 * wide)) * (np.clip(up, -7.0, 7.0) + 1.0)
    got = clamped_swiglu(mx.array(gate), mx.array(up), 1.702, 7.0)
    np.testing.assert_allclose(np.array(got), truth, rtol=1e-5, atol=1e-30)
    assert clamped_swiglu(mx.array(gate).astype(mx.float16), mx.array(up).astype(mx.float16), 1.702, 7.0).dtype == mx.float16


def test_both_spellings_of_rope_are_one_config_and_layers_take_turns_by_default():
    config = gpt_oss.Config.from_dict(RAW)
    assert gpt_oss.Config.from_dict(RAW | NEW_SPELLING) == config
    assert config.layer_types == ("sliding_attention", "full_attention") * 2
    assert config.rope.attention_factor == pytest.approx(0.1 * np.log(8.0) + 1.0) and not config.rope.truncate


def test_a_config_without_any_rope_settings_is_refused_rather_than_guessed():
    with pytest.raises(ConfigError, match="rope_scaling"):
        gpt_oss.Config.from_dict(RAW | {"rope_scaling": None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("num_attention_heads", 3),
        ("head_dim", 5),
        ("num_local_experts", 0),
        ("num_local_experts", None),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", 6),
        ("num_experts_per_tok", True),
        ("sliding_window", None),
        ("sliding_window", 0),
        ("layer_types", ["sliding_attention"] * 3),
        ("swiglu_limit", 0),
        ("swiglu_limit", float("nan")),
        ("swiglu_alpha", -1),
        ("attention_bias", "yes"),
        ("rope_theta", 0.0),
        ("rope_scaling", YARN | {"factor": 0.0}),
        ("rope_scaling", YARN | {"truncate": 1}),
    ],
)
def test_a_bad_field_is_named(field: str, value: Any):
    with pytest.raises(ConfigError) as caught:
        gpt_oss.Config.from_dict(RAW | {field: value})
    text = str(caught.value)
    assert ("num_key_value_heads" if field == "num_attention_heads" else field) in text and "\n" not in text


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_act", "gelu"), ("layer_types", ["sliding_attention", "full_attention", "linear_attention", "x"])],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any):
    with pytest.raises(Refused, match=field):
        gpt_oss.Config.from_dict(RAW | {field: value})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.1.self_attn.sinks", "missing"),
        ("model.layers.2.mlp.experts.gate_up_proj_bias", "missing"),
        ("model.layers.0.mlp.experts.down_proj", "shape"),
        ("model.layers.3.mlp.router.bias", "shape"),
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


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-value for value in E2M1]


def packed(raw: dict[str, Any], seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tensors of a published file, experts as MXFP4 blocks, and the plain ones that they are by the format's table."""
    rng, plain = np.random.default_rng(seed), weights(raw)
    stored: dict[str, np.ndarray] = {}
    for name, array in list(plain.items()):
        if not gpt_oss.inputs_first(name):
            stored[name] = array
            continue
        experts, inputs, outputs = array.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = rng.integers(123, 126, (experts, outputs, inputs // 32)).astype(np.uint8)
        values = np.zeros((experts, outputs, inputs), np.float32)
        for (e, o, g, b), byte in np.ndenumerate(blocks):
            for half, code in enumerate((byte & 15, byte >> 4)):  # the low half comes first
                values[e, o, 32 * g + 2 * b + half] = E2M1[code] * 2.0 ** (int(scales[e, o, g]) - 127)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        plain[name] = values.swapaxes(1, 2)
    return stored, plain


def write_packed(path: Path, raw: dict[str, Any], stored: dict[str, np.ndarray]) -> Path:
    path.mkdir()
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]  # as published
    quantised = raw | {"quantization_config": {"modules_to_not_convert": plain, "quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(quantised))
    header, data = {}, b""
    for name, array in stored.items():
        dtype = "U8" if array.dtype == np.uint8 else "F32"
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    write_safetensors(path / "model.safetensors", header, data)
    return path


@pytest.mark.parametrize("quantised", ["packed", "unpacked"])
def test_published_mxfp4_experts_are_what_the_table_of_the_format_says(tmp_path: Path, quantised: str):
    raw = RAW | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    stored, plain = packed(raw)
    loaded = load(write_packed(tmp_path / "m", raw, stored), dtype="float32", quantised=quantised)
    for name, array in plain.items():
        weight = loaded.weights[name]
        if isinstance(weight, QuantisedTensor):
            assert quantised == "packed"
            weight = weight.dequantise().swapaxes(1, 2)
        np.testing.assert_array_equal(np.array(weight), array, err_msg=name)
    ids = tokens(20)
    truth = reference.logits(raw, {name: torch.from_numpy(w) for name, w in plain.items()}, ids).numpy()
    engine = Engine(gpt_oss.Model(loaded.config, loaded.weights))
    sequence = engine.open()
    got = [np.array(engine.prefill(sequence, ids[:15], all_logits=True))]
    got += [np.array(engine.step({sequence: token})) for token in ids[15:]]
    np.testing.assert_allclose(np.concatenate(got), truth, atol=1e-4 * np.abs(truth).max())


def test_experts_as_mlx_lm_names_them_are_the_same_model(tmp_path: Path):
    arrays = weights(RAW)
    for name in [name for name in arrays if ".experts." in name]:
        array, stem = arrays.pop(name), name.removesuffix("_bias")
        end = "bias" if name.endswith("_bias") else "weight"
        outputs_first = array if end == "bias" else array.swapaxes(1, 2)
        if "gate_up" in stem:
            for part, start in (("gate_proj", 0), ("up_proj", 1)):
                arrays[f"{stem.replace('gate_up_proj', part)}.{end}"] = outputs_first[:, start::2]
        else:
            arrays[f"{stem}.{end}"] = outputs_first
    loaded, ids = load(write_directory(tmp_path / "m", RAW, arrays), dtype="float32"), tokens(20)
    assert loaded.config.separate_experts
    engine = Engine(gpt_oss.Model(loaded.config, loaded.weights))
    got = np.array(engine.prefill(engine.open(), ids, all_logits=True, chunk=13))
    np.testing.assert_allclose(got, expected(RAW, ids), atol=1e-4)


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_damaged_blocks_are_a_one_line_error(tmp_path: Path, change: str):
    stored, _ = packed(RAW)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    if change == "missing":
        del stored[name]
    else:
        stored[name] = stored[name][..., :-1, :] if change == "shape" else stored[name].astype(np.float32)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj") as caught:
        load(write_packed(tmp_path / "m", RAW, stored))
    assert "\n" not in str(caught.value)
