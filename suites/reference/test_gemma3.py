"""Gemma 3: names, defaults, spellings and refusals; the window and the two rotary bases, each by what they must not see."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness import cases
from reference_models import find, gemma3
from reference_models.recompute import ReferenceError


def plain(name: str = "local_global") -> dict:
    return dict(cases.find(f"gemma3/{name}").config)


def test_fields_that_a_published_config_leaves_out_have_their_defaults():
    """gemma-3-4b-it says little in its text_config."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    shapes = gemma3.parameters(config)
    assert shapes["model.embed_tokens.weight"] == (262_208, 2560) and "lm_head.weight" not in shapes
    assert shapes["model.layers.33.self_attn.q_proj.weight"] == (2048, 2560)
    assert shapes["model.layers.33.self_attn.k_proj.weight"] == (1024, 2560)
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (256,)
    assert len(shapes) == 34 * 13 + 2
    s = gemma3._shape(config)
    assert s.scale == 256**-0.5 and [i for i, local in enumerate(s.local) if not local] == [5, 11, 17, 23, 29]
    ropes = gemma3._ropes(config, 256, torch.float64)
    assert float(ropes[True][1]) == pytest.approx(10_000 ** (-2 / 256))
    assert float(ropes[False][1]) == pytest.approx(1_000_000 ** (-2 / 256) / 8)
    assert find("gemma3_text") is find("gemma3") is gemma3


def test_both_spellings_of_rope_are_one_model(draw):
    config, weights, tokens = draw("gemma3/new_spelling")
    old = {k: v for k, v in config.items() if k != "rope_parameters"} | {
        "rope_theta": 100.0,
        "rope_local_base_freq": 10.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    assert torch.equal(gemma3.logits(old, weights, tokens), gemma3.logits(config, weights, tokens))
    with pytest.raises(ReferenceError, match="disagree on 'factor'"):
        gemma3.logits(config | {"rope_scaling": {"factor": 2.0}}, weights, tokens)


@pytest.mark.parametrize("field", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_the_pattern_is_the_list_of_layers(field):
    config = plain("pattern")
    listed = {k: v for k, v in config.items() if k != "sliding_window_pattern"}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert (
        gemma3._shape(listed | {field: 2}).local == gemma3._shape(listed | {"layer_types": kinds}).local == [True, False, True]
    )


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", "language_model."])
def test_every_published_prefix_names_the_same_tensors(draw, prefix):
    config, weights, _ = draw("gemma3/scaled_global")
    head = "language_model.lm_head.weight" if "language" in prefix else "lm_head.weight"
    other = {name.replace("model.", prefix, 1).replace("lm_head.weight", head): t for name, t in weights.items()}
    other["vision_tower.vision_model.post_layernorm.weight"] = torch.zeros(3)
    found = gemma3.renamed(config, other)
    assert found.keys() == weights.keys() | {"vision_tower.vision_model.post_layernorm.weight"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_activation", "silu"),
        ("use_bidirectional_attention", True),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["chunked_attention"] * 3),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("sliding_window", 0),
        ("query_pre_attn_scalar", -1),
        ("rms_norm_eps", "1e-6"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_field(field, value):
    with pytest.raises(ReferenceError, match=field):
        gemma3.parameters(plain() | {field: value})


@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_a_local_layer_sees_its_window_and_nothing_before(draw, window):
    config, weights, tokens = draw("gemma3/all_local", length=24)
    config = config | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": window}
    last = gemma3.logits(config, weights, tokens)[-1]
    for back, seen in ((window - 1, True), (window, False)):
        changed = [*tokens]
        changed[-1 - back] = 5 if tokens[-1 - back] != 5 else 6
        moved = float((gemma3.logits(config, weights, changed)[-1] - last).abs().max())
        assert (moved > 1e-3) is seen and (seen or moved == 0)


def test_scaling_turns_global_layers_and_no_others(draw):
    config, weights, tokens = draw("gemma3/local_global")
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    local = {"layer_types": ["sliding_attention"] * 3}
    assert torch.equal(gemma3.logits(config | local, weights, tokens), gemma3.logits(config | local | scaled, weights, tokens))
    assert (gemma3.logits(config, weights, tokens) - gemma3.logits(config | scaled, weights, tokens)).abs().max() > 0.1


def test_a_layer_by_hand_on_one_token(draw):
    """With one token attention is the identity on the values."""
    config, weights, tokens = draw("gemma3/scaled_global", length=1)
    config = config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    w = {n: t.double().numpy() for n, t in weights.items()}
    layer = "model.layers.0"

    def rms(x, name):
        return x / np.sqrt((x**2).mean() + 1e-2) * (1 + w[f"{name}.weight"])

    x = w["model.embed_tokens.weight"][tokens[0]] * math.sqrt(40)
    h = rms(x, f"{layer}.input_layernorm")
    values = (w[f"{layer}.self_attn.v_proj.weight"] @ h).reshape(2, 12).repeat(2, 0).reshape(-1)
    x = x + rms(w[f"{layer}.self_attn.o_proj.weight"] @ values, f"{layer}.post_attention_layernorm")
    h = rms(x, f"{layer}.pre_feedforward_layernorm")
    gate = w[f"{layer}.mlp.gate_proj.weight"] @ h
    gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    out = w[f"{layer}.mlp.down_proj.weight"] @ (gate * (w[f"{layer}.mlp.up_proj.weight"] @ h))
    x = x + rms(out, f"{layer}.post_feedforward_layernorm")
    expected = w["lm_head.weight"] @ rms(x, "model.norm")
    np.testing.assert_allclose(gemma3.logits(config, weights, tokens)[0].numpy(), expected, rtol=0, atol=1e-12)


def test_soft_caps_bound_what_they_cap(draw):
    config, weights, tokens = draw("gemma3/local_global")
    free = gemma3.logits(config, weights, tokens)
    capped = gemma3.logits(config | {"final_logit_softcapping": 2.0}, weights, tokens)
    torch.testing.assert_close(capped, 2 * (free / 2).tanh(), rtol=0, atol=1e-12)
    assert (gemma3.logits(config | {"attn_logit_softcapping": 1.0}, weights, tokens) - free).abs().max() > 0.05
