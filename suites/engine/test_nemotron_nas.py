"""engine/models/nemotron_nas.py: config bounds, names and shapes, slots. Numbers are judged by the cells of its cases."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.engine import Engine
from engine.errors import ConfigError, Refused
from engine.models import nemotron_nas
from engine.state import SequenceStateLayout

ATTENTION = {
    "n_heads_in_group": 2,
    "no_op": False,
    "num_sink_tokens": None,
    "replace_with_linear": False,
    "sparsify": None,
    "unshifted_sink": False,
    "use_prefill_window_in_sink_attention": False,
    "window_length": None,
}
FFN = {"ffn_mult": 2.625, "no_op": False, "replace_with_linear": False, "sparsify": None}
LINEAR = {"replace_with_linear": True}
NO_OP = {"no_op": True}
NOTHING: Mapping[str, Any] = MappingProxyType({})


def block(attention: Mapping[str, Any] = NOTHING, ffn: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    return {"attention": {**ATTENTION, **attention}, "ffn": {**FFN, **ffn}}


RAW: dict[str, Any] = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "hidden_size": 32,
    "intermediate_size": None,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 61,
    "block_configs": [
        block(LINEAR),
        block(NO_OP, NO_OP),
        block({"n_heads_in_group": 4}),
        block(LINEAR, LINEAR),
        block({"n_heads_in_group": 1}, {"ffn_mult": 13.0}),
    ],
}


def changed(**changes: Any) -> dict[str, Any]:
    return RAW | changes


def with_field(half: str, **fields: Any) -> dict[str, Any]:
    """The config with fields of the third layer's attention or ffn changed."""
    raw = copy.deepcopy(RAW)
    raw["block_configs"][2][half] |= fields
    return raw


def model(raw: dict[str, Any] = RAW) -> nemotron_nas.Model:
    config = nemotron_nas.Config.from_dict(raw)
    rng = np.random.default_rng(0)
    shapes = nemotron_nas.parameters(config)
    weights = {
        name: mx.array((rng.normal(size=shape) * 0.2 + ("norm" in name)).astype(np.float32)) for name, shape in shapes.items()
    }
    return nemotron_nas.Model(config, weights)


@pytest.mark.parametrize(
    ("mult", "width"), [(0.5, 2816), (1.0, 5632), (1.3125, 7168), (2.625, 14336), (3.28125, 17920), (5.25, 28672)]
)
def test_ffn_mult_comes_to_the_published_widths(mult: float, width: int):
    assert nemotron_nas.intermediate_size(mult, 8192) == width


def test_each_kind_of_layer_has_exactly_its_weights():
    shapes = nemotron_nas.parameters(nemotron_nas.Config.from_dict(RAW))
    mlp = {"mlp.gate_proj.weight": (256, 32), "mlp.up_proj.weight": (256, 32), "mlp.down_proj.weight": (32, 256)}
    norms = {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}
    q_and_o = {"self_attn.q_proj.weight": (32, 32), "self_attn.o_proj.weight": (32, 32)}
    wide = {"mlp.gate_proj.weight": (512, 32), "mlp.up_proj.weight": (512, 32), "mlp.down_proj.weight": (32, 512)}
    expected = [
        norms | mlp | {"self_attn.linear_attn.weight": (32, 32)},
        {},
        norms | mlp | q_and_o | {"self_attn.k_proj.weight": (8, 32), "self_attn.v_proj.weight": (8, 32)},
        norms | {"self_attn.linear_attn.weight": (32, 32), "mlp.linear_mlp.weight": (32, 32)},
        norms | wide | q_and_o | {"self_attn.k_proj.weight": (32, 32), "self_attn.v_proj.weight": (32, 32)},
    ]
    whole = {"model.embed_tokens.weight": (61, 32), "model.norm.weight": (32,), "lm_head.weight": (61, 32)}
    layers = {f"model.layers.{i}.{name}": shape for i, layer in enumerate(expected) for name, shape in layer.items()}
    assert shapes == whole | layers


def test_only_real_attention_has_a_slot():
    assert len(model().make_slots()) == 2
    engine = Engine(model())
    sequence = engine.open()
    engine.prefill(sequence, [1, 2, 3])
    assert engine.counters["cache_growths"] == 2


@pytest.mark.parametrize("layout", list(SequenceStateLayout), ids=str)
def test_a_model_without_any_attention_runs(layout: SequenceStateLayout):
    engine = Engine(model(changed(num_hidden_layers=2, block_configs=[block(LINEAR), block(NO_OP)])), layout=layout)
    sequence = engine.open()
    assert engine.prefill(sequence, [1, 2, 3], chunk=2).shape == (1, 61)
    assert engine.step({sequence: 4}).shape == (1, 61)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (changed(block_configs=None), "block_configs must be a list of num_hidden_layers = 5 objects"),
        (changed(block_configs=RAW["block_configs"][:4]), "num_hidden_layers = 5 objects, here 4 entries"),
        (changed(block_configs=[*RAW["block_configs"][:4], 7]), "entry 4 is int"),
        (changed(block_configs=[{"ffn": FFN}] * 5), r"block_configs\[0\].attention is missing"),
        (changed(block_configs=[{"attention": [], "ffn": FFN}] * 5), r"block_configs\[0\].attention must be an object"),
        (changed(intermediate_size=64), "intermediate_size must be null"),
        (changed(num_key_value_heads=2), "num_key_value_heads must be null"),
        (changed(num_attention_heads=5), "num_attention_heads must divide hidden_size 32"),
        (changed(head_dim=7), "head_dim must be even"),
        (changed(hidden_size=1 << 30), "hidden_size must be from 1"),
        (changed(num_hidden_layers=10**9), "num_hidden_layers must be from 1"),
        (changed(vocab_size=True), "vocab_size must be an integer"),
        (changed(rms_norm_eps=None), "rms_norm_eps is missing"),
        (changed(rms_norm_eps=float("nan")), "rms_norm_eps must be from"),
        (with_field("attention", n_heads_in_group=3), r"block_configs\[2\].attention.n_heads_in_group must divide"),
        (with_field("attention", n_heads_in_group=None), r"block_configs\[2\].attention.n_heads_in_group must divide"),
        (with_field("attention", n_heads_in_group=0), r"attention.n_heads_in_group must be from 1"),
        (with_field("attention", n_heads_in_group=8), r"attention.n_heads_in_group must divide num_attention_heads 4"),
        (with_field("attention", no_op=1), r"attention.no_op must be true or false"),
        (with_field("attention", no_op=True, replace_with_linear=True), "must not both be true"),
        (with_field("ffn", no_op=True, replace_with_linear=True), "must not both be true"),
        (with_field("ffn", ffn_mult=None), r"block_configs\[2\].ffn.ffn_mult must give"),
        (with_field("ffn", ffn_mult=0.01), "at least one unit"),
        (with_field("ffn", ffn_mult=-1), "ffn_mult must be from"),
        (with_field("ffn", ffn_mult=float("inf")), "ffn_mult must be from"),
        (with_field("ffn", ffn_mult="2"), "ffn_mult must be a number"),
    ],
)
def test_a_config_out_of_bounds_names_field_and_value(raw: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        nemotron_nas.Config.from_dict(raw)


@pytest.mark.parametrize(
    ("half", "name", "value"),
    [
        ("attention", "sparsify", ["q"]),
        ("attention", "window_length", 8192),
        ("attention", "num_sink_tokens", 0),
        ("attention", "unshifted_sink", True),
        ("attention", "use_prefill_window_in_sink_attention", True),
        ("attention", "llama4", {"a": 1}),
        ("ffn", "sparsify", ["gate"]),
        ("ffn", "moe", {"num_experts": 2}),
        ("ffn", "window_length", 4),
    ],
)
def test_what_is_not_computed_is_refused_by_name(half: str, name: str, value: Any):
    with pytest.raises(Refused, match=rf"block_configs\[2\].{half}.{name} = .* is not supported"):
        nemotron_nas.Config.from_dict(with_field(half, **{name: value}))


def test_an_unknown_key_of_a_block_is_refused_unless_it_is_null():
    raw = copy.deepcopy(RAW)
    raw["block_configs"][1]["parallel_blocks"] = None
    nemotron_nas.Config.from_dict(raw)
    raw["block_configs"][1]["parallel_blocks"] = [{}]
    with pytest.raises(Refused, match=r"block_configs\[1\].parallel_blocks"):
        nemotron_nas.Config.from_dict(raw)


def test_no_other_activation_is_taken_for_silu():
    with pytest.raises(Refused, match="hidden_act"):
        nemotron_nas.Config.from_dict(changed(hidden_act="gelu"))
