"""engine/models/llama.py: config bounds, and logits against float64 numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.engine import Engine
from engine.errors import ConfigError, Refused
from engine.layers import activations
from engine.layers.attention import attention
from engine.models import family, llama
from suites.engine.tiny import RAW, expected_logits, model, tokens

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "wide_heads": {"head_dim": 12},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_equations(name: str):
    ids = tokens(41)
    engine = Engine(model(**VARIANTS[name]))
    got = np.array(engine.prefill(engine.open(), ids, all_logits=True))
    np.testing.assert_allclose(got, expected_logits(ids, **VARIANTS[name]), atol=2e-4)


def test_logits_equal_the_equations_across_query_blocks_and_allocation_steps():
    ids = tokens(300)
    engine = Engine(model())
    sequence = engine.open()
    got = [np.array(engine.prefill(sequence, ids[:270], all_logits=True, chunk=131))]
    got += [np.array(engine.step({sequence: token})) for token in ids[270:]]
    np.testing.assert_allclose(np.concatenate(got), expected_logits(ids), atol=2e-4)


def test_rotary_scaling_reaches_the_logits():
    ids = tokens(20)
    scaled = model(rope_scaling={"type": "linear", "factor": 4.0})
    engine = Engine(scaled)
    got = np.array(engine.prefill(engine.open(), ids, all_logits=True))
    inv_freq = RAW["rope_theta"] ** (-np.arange(0, 8, 2) / 8) / 4
    np.testing.assert_allclose(got, expected_logits(ids, inv_freq=inv_freq), atol=2e-4)
    assert np.abs(got - expected_logits(ids)).max() > 1e-2


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_logits_in_half_precision_have_its_dtype_and_are_close(dtype: mx.Dtype):
    ids = tokens(20)
    engine = Engine(model(dtype=dtype))
    got = engine.prefill(engine.open(), ids, all_logits=True)
    assert got.dtype == dtype
    expected = expected_logits(ids)
    assert np.abs(np.array(got.astype(mx.float32)) - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("elements", [0, 1 << 40])
@pytest.mark.parametrize(("n", "length"), [(1, 1), (1, 300), (7, 7), (130, 300)])
def test_attention_is_the_same_composed_and_fused(monkeypatch: pytest.MonkeyPatch, elements: int, n: int, length: int):
    monkeypatch.setattr(activations, "HOST_ELEMENTS", elements)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, h, m, d)) for h, m, d in ((4, n, 8), (2, length, 8), (2, length, 6)))
    scores = q @ np.repeat(k, 2, axis=1).transpose(0, 1, 3, 2) * 0.3
    scores = np.where(np.arange(length) <= np.arange(length - n, length)[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    expected = (p / p.sum(-1, keepdims=True)) @ np.repeat(v, 2, axis=1)
    got = attention(*(mx.array(a.astype(np.float32)) for a in (q, k, v)), scale=0.3)
    np.testing.assert_allclose(np.array(got), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", 0),
        ("hidden_size", 1 << 40),
        ("hidden_size", "32"),
        ("hidden_size", True),
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 7),
        ("head_dim", 0),
        ("head_dim", 1 << 30),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("intermediate_size", 0),
        ("vocab_size", 0),
        ("vocab_size", 1 << 40),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-5),
        ("attention_bias", "yes"),
        ("tie_word_embeddings", 1),
        ("hidden_act", 3),
    ],
)
def test_a_bad_field_is_named_with_its_value(field: str, value: Any):
    with pytest.raises(ConfigError) as caught:
        llama.Config.from_dict(RAW | {field: value})
    text = str(caught.value)
    assert field in text and "\n" not in text
    assert value is None or str(value) in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("layer_types", "full_attention"),
        ("sliding_window", 128),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any):
    with pytest.raises(Refused, match=field):
        llama.Config.from_dict(RAW | {field: value})


def test_published_spellings_of_the_plain_case_are_accepted():
    plain = llama.Config.from_dict(RAW)
    spelled = {"layer_types": ["full_attention"] * 3, "sliding_window": None, "head_dim": None, "hidden_act": "silu"}
    assert llama.Config.from_dict(RAW | spelled) == plain
    assert plain.head_dim == 8
    assert llama.Config.from_dict({k: v for k, v in RAW.items() if k != "num_key_value_heads"}).num_key_value_heads == 4


def test_parameters_follow_the_flags():
    plain = llama.parameters(llama.Config.from_dict(RAW))
    assert plain["model.layers.2.self_attn.k_proj.weight"] == (16, 32) and plain["lm_head.weight"] == (61, 32)
    assert len(plain) == 2 + 3 * 9 + 1 and not any(name.endswith("bias") for name in plain)
    full = llama.parameters(
        llama.Config.from_dict(RAW | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    )
    assert "lm_head.weight" not in full
    assert sorted(
        name.split(".")[-2] for name in full if name.startswith("model.layers.0") and name.endswith("bias")
    ) == sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])


def test_only_a_head_dim_that_was_not_given_is_explained_by_what_it_follows_from():
    with pytest.raises(ConfigError, match=r"must be even for rotary positions \(got 15\)"):
        llama.Config.from_dict(RAW | {"head_dim": 15})
    with pytest.raises(ConfigError, match=r"hidden_size 28 / num_attention_heads 4 is 7"):
        llama.Config.from_dict(RAW | {"hidden_size": 28, "head_dim": None})


def test_families_are_found_by_model_type_and_unknown_ones_refused():
    assert family("llama") is llama
    with pytest.raises(Refused, match="'gpt5' is not supported"):
        family("gpt5")
