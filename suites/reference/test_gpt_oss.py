"""gpt-oss: names, spellings and refusals; sinks, windows, YaRN's ramp and the clamped experts, each by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness import cases
from reference_models import gpt_oss
from reference_models.recompute import ReferenceError

PUBLISHED = {  # of gpt-oss-20b, two layers
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "vocab_size": 201088,
}


def test_names_and_shapes_of_published_layers():
    shapes = gpt_oss.parameters(PUBLISHED)
    layer = {n.removeprefix("model.layers.1."): s for n, s in shapes.items() if n.startswith("model.layers.1.")}
    assert layer == {
        **{f"self_attn.{part}_proj.weight": (rows, 2880) for part, rows in (("q", 4096), ("k", 512), ("v", 512))},
        **{f"self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", 4096), ("k", 512), ("v", 512))},
        "self_attn.o_proj.weight": (2880, 4096),
        "self_attn.o_proj.bias": (2880,),
        "self_attn.sinks": (64,),
        "input_layernorm.weight": (2880,),
        "post_attention_layernorm.weight": (2880,),
        "mlp.router.weight": (32, 2880),
        "mlp.router.bias": (32,),
        "mlp.experts.gate_up_proj": (32, 2880, 5760),
        "mlp.experts.gate_up_proj_bias": (32, 5760),
        "mlp.experts.down_proj": (32, 2880, 2880),
        "mlp.experts.down_proj_bias": (32, 2880),
    }
    assert gpt_oss._shape(PUBLISHED).local == [True, False]
    assert gpt_oss._shape(PUBLISHED).topk == 4


def test_yarn_that_is_not_rounded_ramps_between_whole_pairs():
    frequency, magnitude = gpt_oss._rope(PUBLISHED, 64, torch.float64)
    plain = 150000 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    first = 64 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(150000))
    last = 64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(150000))
    slow = ((torch.arange(32, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    torch.testing.assert_close(frequency, plain * (slow / 32 + 1 - slow), rtol=1e-14, atol=0)
    assert magnitude == pytest.approx(0.1 * math.log(32) + 1)
    rounded, _ = gpt_oss._rope(PUBLISHED | {"rope_scaling": PUBLISHED["rope_scaling"] | {"truncate": True}}, 64, torch.float64)
    slow = ((torch.arange(32, dtype=torch.float64) - math.floor(first)) / (math.ceil(last) - math.floor(first))).clamp(0, 1)
    torch.testing.assert_close(rounded, plain * (slow / 32 + 1 - slow), rtol=1e-14, atol=0)


def test_both_spellings_of_rope_are_one_model(draw):
    config, weights, tokens = draw("gpt_oss/new_spelling")
    rope = dict(config["rope_parameters"])
    old = {k: v for k, v in config.items() if k != "rope_parameters"} | {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
    }
    assert torch.equal(gpt_oss.logits(old, weights, tokens), gpt_oss.logits(config, weights, tokens))
    with pytest.raises(ReferenceError, match="disagree on 'factor'"):
        gpt_oss.logits(config | {"rope_scaling": {"factor": 2.0}}, weights, tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("layer_types", ["full_attention"]),
        ("num_key_value_heads", 3),
        ("num_experts_per_tok", 6),
        ("head_dim", 7),
        ("swiglu_limit", 0),
        ("num_local_experts", "5"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"rope_type": "yarn", "original_max_position_embeddings": 24}),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_field(draw, field, value):
    config, weights, tokens = draw("gpt_oss/sinks", length=2)
    with pytest.raises(ReferenceError, match="factor|rope_type" if field == "rope_scaling" else field):
        gpt_oss.logits(config | {field: value}, weights, tokens)


@pytest.mark.parametrize("window", [1, 8, 20])
def test_a_sliding_layer_sees_its_window_and_nothing_before(draw, window):
    config, weights, tokens = draw("gpt_oss/sinks", length=24)
    config = config | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": window}
    last = gpt_oss.logits(config, weights, tokens)[-1]
    for back, seen in ((window - 1, True), (window, False)):
        changed = [*tokens]
        changed[-1 - back] = 5 if tokens[-1 - back] != 5 else 6
        moved = float((gpt_oss.logits(config, weights, changed)[-1] - last).abs().max())
        assert (moved > 1e-3) is seen and (seen or moved == 0)


@pytest.mark.parametrize("name", ["sinks", "clamped"])
def test_a_layer_by_hand_on_one_token(draw, name):
    """With one token the head gives its value, less the share of the sink."""
    config, weights, tokens = draw(f"gpt_oss/{name}", length=1)
    config = config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    w = {n: t.double().numpy() for n, t in weights.items()}
    layer = "model.layers.0"

    def rms(x, name):
        return x / np.sqrt((x**2).mean() + 1e-2) * w[f"{name}.weight"]

    def linear(x, name):
        return w[f"{layer}.{name}.weight"] @ x + w[f"{layer}.{name}.bias"]

    x = w["model.embed_tokens.weight"][tokens[0]]
    h = rms(x, f"{layer}.input_layernorm")
    q, k, v = (linear(h, f"self_attn.{p}_proj").reshape(-1, 12) for p in "qkv")
    magnitude = 0.1 * math.log(8) + 1  # at position 0 rotation is this factor on queries and keys
    heads = []
    for head in range(4):
        score = math.exp(q[head] @ k[head // 2] * magnitude**2 / math.sqrt(12))
        heads.append(v[head // 2] * score / (score + math.exp(w[f"{layer}.self_attn.sinks"][head])))
    x = x + linear(np.concatenate(heads), "self_attn.o_proj")
    h = rms(x, f"{layer}.post_attention_layernorm")
    logits = linear(h, "mlp.router")
    chosen = np.argsort(-logits)[:2]
    share = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
    clamped = 0
    for expert, weight in zip(chosen, share, strict=True):
        experts = {
            p: w[f"{layer}.mlp.experts.{p}"][expert]
            for p in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        }
        both = h @ experts["gate_up_proj"] + experts["gate_up_proj_bias"]
        gate, up = np.minimum(both[::2], 7), np.clip(both[1::2], -7, 7)
        clamped += int((both[::2] > 7).sum() + (np.abs(both[1::2]) > 7).sum())
        x = x + weight * (((up + 1) * gate / (1 + np.exp(-1.702 * gate))) @ experts["down_proj"] + experts["down_proj_bias"])
    result = gpt_oss.recompute(config, weights, tokens)
    np.testing.assert_allclose(result.logits[0].numpy(), w["lm_head.weight"] @ rms(x, "model.norm"), rtol=0, atol=1e-12)
    assert result.margins is not None and result.choices is not None
    assert result.choices[0].tolist() == sorted(chosen)
    assert float(result.margins[0]) == pytest.approx(np.sort(logits)[-2] - np.sort(logits)[-3], abs=1e-13)
    assert (clamped > 0) == (name == "clamped")


def test_the_clamp_cuts_on_both_sides_in_its_case_and_nowhere_else(draw):
    config, weights, tokens = draw("gpt_oss/clamped")
    free = gpt_oss.logits(config | {"swiglu_limit": 1e6}, weights, tokens)
    assert (free - gpt_oss.logits(config, weights, tokens)).abs().max() > 0.1
    config, weights, tokens = draw("gpt_oss/sinks")
    assert torch.equal(gpt_oss.logits(config | {"swiglu_limit": 1e6}, weights, tokens), gpt_oss.logits(config, weights, tokens))


def test_fields_that_are_left_out_have_their_published_defaults():
    config = {k: v for k, v in cases.find("gpt_oss/sinks").config.items() if not k.startswith("rope")}
    default, _ = gpt_oss._rope(config, 64, torch.float64)
    spelled, _ = gpt_oss._rope(PUBLISHED, 64, torch.float64)
    assert torch.equal(default, spelled)
