"""Nemotron-H's config.json and checkpoints: spellings, bounds, refusals, names, what is set aside and what stays float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.checkpoint import load
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, EngineError, Refused
from engine.models import family
from engine.models.nemotron_h import Config, canonical, complete, parameters
from suites.engine.tiny_checkpoints import write_directory
from suites.engine.tiny_nemotron_h import RAW, config, expected_logits, tokens, weights

PATTERN = RAW["hybrid_override_pattern"]
NAMES = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
NEWER = NAMES | {"M": "linear_attention", "*": "full_attention"}
MINIMAL = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32, "hybrid_override_pattern": "M*"}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in RAW.items() if name not in names}


def listed(field: str, names: dict[str, str]) -> dict[str, Any]:
    return without("hybrid_override_pattern") | {field: [names[kind] for kind in PATTERN]}


@pytest.mark.parametrize("field", ["layers_block_type", "layer_types"])
@pytest.mark.parametrize("names", [NAMES, NEWER], ids=["older", "newer"])
def test_lists_of_names_spell_the_pattern(field: str, names: dict[str, str]):
    assert Config.from_dict(listed(field, names)) == Config.from_dict(RAW)
    assert Config.from_dict(RAW | listed(field, names)) == Config.from_dict(RAW)


@pytest.mark.parametrize("pattern", [f" {PATTERN}\n", PATTERN.replace("*", "A")])
def test_the_pattern_is_trimmed_and_knows_two_letters_for_attention(pattern: str):
    assert Config.from_dict(RAW | {"hybrid_override_pattern": pattern}).pattern == PATTERN


def test_the_number_of_layers_is_given_or_follows():
    assert Config.from_dict(RAW | {"num_hidden_layers": 6}) == Config.from_dict(RAW)
    for field in ("hybrid_override_pattern", "layers_block_type"):
        raw = RAW if field in RAW else listed(field, NAMES)
        with pytest.raises(ConfigError, match=r"num_hidden_layers must be the number of layers that are listed, 6 \(got 7\)"):
            Config.from_dict(raw | {"num_hidden_layers": 7})


@pytest.mark.parametrize("pattern", ["", "  ", "MXE", "M E", "mE", ["M"], 3, "M" * 5000, "M\x00"])
def test_parse_config_bad_pattern(pattern: Any):
    with pytest.raises(ConfigError, match="hybrid_override_pattern") as caught:
        Config.from_dict(RAW | {"hybrid_override_pattern": pattern})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_parse_config_without_any_pattern():
    with pytest.raises(ConfigError, match="hybrid_override_pattern must say the kind of each layer, or layers_block_type"):
        Config.from_dict(without("hybrid_override_pattern"))


@pytest.mark.parametrize("kinds", [[], "mamba", [["mamba"]], ["mamba", 1], ["mamba", "conv"], ["sliding_attention"] * 6])
def test_parse_config_bad_list(kinds: Any):
    with pytest.raises((ConfigError, Refused), match="layers_block_type"):
        Config.from_dict(without("hybrid_override_pattern") | {"layers_block_type": kinds})


def test_patterns_that_contradict_are_an_error():
    with pytest.raises(ConfigError, match="layers_block_type must list the same layers as hybrid_override_pattern"):
        Config.from_dict(RAW | {"layers_block_type": ["mamba"] * 6})


@pytest.mark.parametrize("wrapper", ["llm_config", "text_config"])
def test_parse_config_nested_wrapper(wrapper: str):
    """Nested fields replace the top level entirely, and errors say where they are."""
    raw = {"model_type": "NemotronH_Nano_Omni_Reasoning_V3", wrapper: RAW, "hidden_size": 999, "vision_config": {"x": 1}}
    parsed = Config.from_dict(raw)
    assert parsed.is_wrapped and parsed.hidden_size == RAW["hidden_size"]
    with pytest.raises(ConfigError, match=rf"{wrapper}\.hidden_size is missing"):
        Config.from_dict(raw | {wrapper: without("hidden_size")})
    with pytest.raises(ConfigError, match=rf"{wrapper} must be an object"):
        Config.from_dict(raw | {wrapper: [1]})


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_group", 3), ("n_groups", 4), ("num_key_value_heads", 3), ("n_group", 16)],
)
def test_parse_config_undivided_groups(field: str, value: int):
    with pytest.raises(ConfigError, match=rf"{field} must divide"):
        Config.from_dict(RAW | {field: value})


def test_defaults_are_the_published_ones():
    c = Config.from_dict(MINIMAL)
    assert (c.num_key_value_heads, c.head_dim, c.layer_norm_epsilon, c.max_position_embeddings) == (4, 16, 1e-5, 4096)
    m = c.mamba
    assert (m.conv_kernel, m.ssm_state_size, m.mamba_num_heads, m.mamba_head_dim, m.n_groups) == (4, 128, 128, 64, 1)
    assert m.time_step_limit == (0.0, math.inf) and c.use_conv_bias
    assert not (c.use_bias or c.mlp_bias or c.tie_word_embeddings or c.is_wrapped) and c.moe is None
    moe = Config.from_dict(without("topk_group", "routed_scaling_factor", "n_group")).moe
    assert moe is not None and (moe.n_group, moe.topk_group, moe.routed_scaling_factor, moe.norm_topk_prob) == (1, 1, 1.0, True)
    grouped = Config.from_dict(without("topk_group")).moe
    assert grouped is not None and grouped.topk_group == grouped.n_group == 4
    assert Config.from_dict(MINIMAL | {"rms_norm_eps": 1e-3}).layer_norm_epsilon == 1e-3
    assert Config.from_dict(MINIMAL | {"rms_norm_eps": 1e-3, "layer_norm_epsilon": 1e-6}).mamba.layer_norm_epsilon == 1e-6


def test_fields_that_change_nothing_are_ignored():
    unused = {"expand": 7, "chunk_size": 8, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "time_step_min": 0.5}
    unused |= {"mamba_ssm_cache_dtype": "bfloat16", "residual_in_fp32": True, "attention_bias": True, "mamba_proj_bias": True}
    assert Config.from_dict(RAW | unused) == Config.from_dict(RAW)


def test_older_spellings_mean_the_same_and_must_not_contradict():
    older = {"mamba_n_groups": 2, "mamba_d_conv": 4, "num_local_experts": 8}
    assert Config.from_dict(without("n_groups", "conv_kernel", "n_routed_experts") | older) == Config.from_dict(RAW)
    with pytest.raises(ConfigError, match="mamba_n_groups and n_groups 2 are one field and contradict"):
        Config.from_dict(RAW | {"mamba_n_groups": 3})


@pytest.mark.parametrize("infinity", [math.inf, {"__float__": "Infinity"}])
def test_time_step_limits_may_be_infinite(infinity: Any):
    assert Config.from_dict(RAW | {"time_step_limit": [0.001, infinity]}).mamba.time_step_limit == (0.001, math.inf)


BAD = [
    ("hidden_size", 0),
    ("hidden_size", None),
    ("hidden_size", "24"),
    ("vocab_size", 1 << 60),
    ("num_attention_heads", None),
    ("num_attention_heads", -1),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", True),
    ("head_dim", 0),
    ("head_dim", 1 << 30),
    ("intermediate_size", None),
    ("intermediate_size", 0),
    ("layer_norm_epsilon", 0),
    ("layer_norm_epsilon", math.inf),
    ("rms_norm_eps", -1),
    ("max_position_embeddings", 0),
    ("mamba_num_heads", 0),
    ("mamba_head_dim", 1 << 40),
    ("n_groups", 0),
    ("ssm_state_size", 0),
    ("ssm_state_size", 1 << 20),
    ("conv_kernel", 0),
    ("conv_kernel", 4096),
    ("chunk_size", 0),
    ("time_step_limit", 0.1),
    ("time_step_limit", [0.1]),
    ("time_step_limit", [0.5, 0.1]),
    ("time_step_limit", [-1.0, 1.0]),
    ("time_step_limit", [0.0, 0.0]),
    ("time_step_limit", ["0", "1"]),
    ("time_step_limit", [math.nan, 1.0]),
    ("time_step_limit", [math.inf, math.inf]),
    ("time_step_limit", [0.0, {"__float__": "NaN"}]),
    ("use_bias", 1),
    ("use_conv_bias", "yes"),
    ("mlp_bias", 0),
    ("attention_bias", "x"),
    ("tie_word_embeddings", "x"),
    ("n_routed_experts", None),
    ("n_routed_experts", 1 << 20),
    ("num_experts_per_tok", 0),
    ("num_experts_per_tok", 5),  # two groups of four are two experts each
    ("moe_intermediate_size", None),
    ("moe_shared_expert_intermediate_size", None),
    ("moe_latent_size", 0),
    ("n_shared_experts", -1),
    ("topk_group", 5),
    ("norm_topk_prob", 1),
    ("routed_scaling_factor", math.inf),
    ("num_nextn_predict_layers", -1),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_field_is_named_with_its_value(field: str, value: Any):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(RAW | {field: value})
    text = str(caught.value)
    assert field in text and "\n" not in text
    assert value is None or str(value) in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mlp_hidden_act", "silu"),
        ("mamba_hidden_act", "gelu"),
        ("sliding_window", 128),
        ("rope_scaling", {"type": "linear", "factor": 2}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any):
    with pytest.raises(Refused, match=field):
        Config.from_dict(RAW | {field: value})


def test_the_published_config_of_nano_is_read():
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    raw = {"hidden_size": 2688, "vocab_size": 131072, "num_hidden_layers": 52, "hybrid_override_pattern": pattern}
    raw |= {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "layer_norm_epsilon": 1e-5}
    raw |= {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
    raw |= {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856}
    raw |= {"moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
    c = Config.from_dict(raw | {"expand": 2, "rope_theta": 10000, "num_nextn_predict_layers": 0})
    shapes = parameters(c)
    assert shapes["backbone.layers.0.mixer.in_proj.weight"] == (10304, 2688)
    assert shapes["backbone.layers.0.mixer.conv1d.weight"] == (6144, 1, 4)
    assert shapes["backbone.layers.5.mixer.o_proj.weight"] == (2688, 4096)
    assert len(shapes) == 3 + 52 + 23 * 8 + 6 * 4 + 23 * (2 + 2 * 128 + 2)
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(31.6e9, rel=0.01)


RENAMED = [
    ("backbone.layers.0.norm.weight", "backbone.layers.0.norm.weight"),
    ("model.backbone.layers.0.norm.weight", "backbone.layers.0.norm.weight"),
    ("model.layers.0.norm.weight", "backbone.layers.0.norm.weight"),
    ("language_model.backbone.norm_f.weight", "backbone.norm_f.weight"),
    ("model.language_model.backbone.embeddings.weight", "backbone.embeddings.weight"),
    ("language_model.model.embeddings.weight", "backbone.embeddings.weight"),
    ("language_model.lm_head.weight", "lm_head.weight"),
    ("model.language_model.lm_head.weight", "lm_head.weight"),
    ("language_model.mtp.fc.weight", "mtp.fc.weight"),
    ("backbone.layers.1.mixer.experts.up_proj", "backbone.layers.1.mixer.experts.up_proj.weight"),
    ("vision_model.backbone.layers.0.weight", "vision_model.backbone.layers.0.weight"),
    ("model.visual.weight", "model.visual.weight"),
    ("xlanguage_model.lm_head.weight", "xlanguage_model.lm_head.weight"),
]


@pytest.mark.parametrize(("name", "expected"), RENAMED)
def test_published_prefixes_are_one_name(name: str, expected: str):
    assert canonical(name) == expected


IDS = tokens(20)


def arrays(raw: dict[str, Any] = RAW, optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    return weights(config(raw, optional))


def check(path: Path, raw: dict[str, Any] = RAW, optional: tuple[str, ...] = ()) -> Any:
    """The directory loads and computes what its weights say."""
    loaded = load(path, dtype="float32")
    engine = Engine(family(loaded.model_type).Model(loaded.config, loaded.weights))
    got = np.array(engine.prefill(engine.open(), IDS, all_logits=True))
    np.testing.assert_allclose(got, expected_logits(IDS, raw, optional=optional), atol=1e-4)
    return loaded


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "model.language_model."])
def test_a_saved_checkpoint_loads_under_every_prefix(tmp_path: Path, prefix: str):
    named = {f"{prefix}{name}" if name != "lm_head.weight" or "language" in prefix else name: w for name, w in arrays().items()}
    check(write_directory(tmp_path, RAW, named))


@pytest.mark.parametrize("model_type", ["nemotron_h_omni", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", None])
def test_a_multimodal_checkpoint_serves_its_language_model(tmp_path: Path, model_type: str | None):
    named = {f"language_model.{name}": w for name, w in arrays().items()}
    filler = np.zeros((2, 2), np.float32)
    named |= {f"vision_model.radio_model.model.blocks.{i}.norm1.weight": filler for i in range(3)}
    named |= {"mlp1.0.weight": filler, "sound_encoder.encoder.x": filler, "sound_projection.norm.weight": filler}
    raw = {"model_type": model_type, "llm_config": RAW, "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"]}
    loaded = check(write_directory(tmp_path, raw, named))
    assert loaded.eos_token_ids == {2} and loaded.model_type == "nemotron_h"
    assert any("6 tensors" in note and "'vision_model' 3" in note and "'mlp1' 1" in note for note in loaded.notes)


def test_towers_of_other_media_belong_to_multimodal_configs_only(tmp_path: Path):
    named = arrays() | {"mlp1.0.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match=r"mlp1\.0\.weight.*not part of the model"):
        load(write_directory(tmp_path, RAW, named))


def test_a_tied_checkpoint_has_no_head_or_brings_its_own(tmp_path: Path):
    raw = RAW | {"tie_word_embeddings": True}
    assert "lm_head.weight" not in arrays(raw)
    check(write_directory(tmp_path / "tied", raw, arrays(raw)), raw)
    head = ("lm_head.weight",)
    check(write_directory(tmp_path / "own", raw, arrays(raw, head)), raw, head)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*missing"):
        load(write_directory(tmp_path / "none", RAW, {n: w for n, w in arrays().items() if n != "lm_head.weight"}))


def test_biases_are_used_where_the_files_have_them(tmp_path: Path):
    optional = (
        "backbone.layers.0.mixer.in_proj.bias",
        "backbone.layers.3.mixer.q_proj.bias",
        "backbone.layers.3.mixer.o_proj.bias",
        "backbone.layers.4.mixer.up_proj.bias",
        "backbone.layers.1.mixer.shared_experts.down_proj.bias",
    )
    named = arrays(RAW, optional)
    assert set(optional) <= set(named)
    check(write_directory(tmp_path, RAW, named), RAW, optional)


def test_stacked_experts_are_the_single_ones_in_both_names(tmp_path: Path):
    for suffix in ("", ".weight"):
        named = {}
        for name, array in arrays().items():
            head, _, tail = name.partition(".experts.")
            if tail and not head.endswith("shared_experts") and tail.split(".")[0].isdigit():
                named.setdefault(f"{head}.experts.{tail.split('.')[1]}{suffix}", []).append(array)
            else:
                named[name] = array
        check(
            write_directory(
                tmp_path / f"x{suffix}", RAW, {n: np.stack(w) if isinstance(w, list) else w for n, w in named.items()}
            )
        )


def test_convolutions_of_either_layout_load(tmp_path: Path):
    named = {name: w.swapaxes(1, 2) if name.endswith("conv1d.weight") else w for name, w in arrays().items()}
    check(write_directory(tmp_path, RAW, named))


def test_shared_experts_that_the_config_does_not_count_are_used(tmp_path: Path):
    """Some writers leave the count at 0 and have them all the same."""
    raw = RAW | {"n_shared_experts": 0}
    optional = tuple(f"backbone.layers.1.mixer.shared_experts.{name}.weight" for name in ("up_proj", "down_proj"))
    check(write_directory(tmp_path, raw, arrays(raw, optional)), raw, optional)


@pytest.mark.parametrize(
    "name",
    [
        "backbone.layers.0.mixer.dt_bias",
        "backbone.layers.0.mixer.conv1d.bias",
        "backbone.layers.1.mixer.gate.e_score_correction_bias",
        "backbone.layers.1.mixer.experts.7.down_proj.weight",
        "backbone.layers.3.mixer.k_proj.weight",
        "backbone.layers.4.norm.weight",
        "backbone.norm_f.weight",
    ],
)
def test_a_missing_tensor_is_an_error_that_names_it(tmp_path: Path, name: str):
    with pytest.raises(CheckpointError, match=rf"{name}.*missing") as caught:
        load(write_directory(tmp_path, RAW, {n: w for n, w in arrays().items() if n != name}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "backbone.layers.6.norm.weight",
        "backbone.layers.0.mixer.q_proj.weight",
        "backbone.layers.0.mixer.norm.bias",
        "backbone.layers.1.mixer.experts.0.up_proj.bias",
        "backbone.layers.1.mixer.experts.8.up_proj.weight",
        "backbone.layers.1.mixer.fc1_latent_proj.weight",
        "backbone.layers.4.mixer.gate_proj.weight",
        "backbone.norm_f.bias",
        "lm_head.bias",
    ],
)
def test_any_other_tensor_is_an_error_that_names_it(tmp_path: Path, name: str):
    with pytest.raises(CheckpointError, match=rf"{name}.*not part of the model"):
        load(write_directory(tmp_path, RAW, arrays() | {name: np.zeros((2, 2), np.float32)}))


def test_two_spellings_of_one_tensor_are_an_error(tmp_path: Path):
    named = arrays() | {"model.layers.0.norm.weight": np.ones(24, np.float32)}
    with pytest.raises(CheckpointError, match="two spellings"):
        load(write_directory(tmp_path, RAW, named))


def test_router_convolution_and_recurrence_stay_float32_in_every_compute_dtype(tmp_path: Path):
    loaded = load(write_directory(tmp_path, RAW, arrays()), dtype="bfloat16")
    kept = {name.partition(".mixer.")[2] for name, array in loaded.weights.items() if array.dtype == mx.float32}
    assert kept == {"gate.weight", "gate.e_score_correction_bias", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias"}


def test_malformed_configs_are_one_line_errors():
    values = [None, -1, 0, 1 << 62, 1.5, math.inf, "", "x" * 10000, [], [1], {}, {"a": 1}, True]
    for field in RAW:
        for value in values:
            raw = RAW | {field: value}
            try:
                parsed = Config.from_dict(raw)
                assert len(parameters(complete(parsed, {}))) < 1 << 18
            except EngineError as error:
                assert "\n" not in str(error) and len(str(error)) < 600
