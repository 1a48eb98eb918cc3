"""LongCat-Flash: names, refusals, and what its attention, router and experts mean, each against a computation by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness import cases
from reference_models import longcat_flash
from reference_models.recompute import ReferenceError


def test_tensor_count_of_the_published_trunk_shape():
    config = dict(cases.find("longcat_flash/plain").config) | {
        "num_layers": 14,
        "n_routed_experts": 256,
        "zero_expert_num": 128,
    }
    # per layer: experts, two sub-layers of 12 tensors, router weight and correction bias; embedding, norm, head
    assert len(longcat_flash.parameters(config)) == 14 * (256 * 3 + 2 * 12 + 2) + 3


def test_names_and_shapes_of_a_layer():
    shapes = longcat_flash.parameters(cases.find("longcat_flash/router_bias").config)
    layer = {
        name.removeprefix("model.layers.0."): shape for name, shape in shapes.items() if name.startswith("model.layers.0.")
    }
    expected = {}
    for i in (0, 1):
        expected |= {
            f"input_layernorm.{i}.weight": (48,),
            f"post_attention_layernorm.{i}.weight": (48,),
            f"self_attn.{i}.q_a_proj.weight": (16, 48),
            f"self_attn.{i}.q_a_layernorm.weight": (16,),
            f"self_attn.{i}.q_b_proj.weight": (64, 16),
            f"self_attn.{i}.kv_a_proj_with_mqa.weight": (20, 48),
            f"self_attn.{i}.kv_a_layernorm.weight": (12,),
            f"self_attn.{i}.kv_b_proj.weight": (80, 12),
            f"self_attn.{i}.o_proj.weight": (48, 48),
            f"mlps.{i}.gate_proj.weight": (64, 48),
            f"mlps.{i}.up_proj.weight": (64, 48),
            f"mlps.{i}.down_proj.weight": (48, 64),
        }
    for e in range(5):
        expected |= {f"mlp.experts.{e}.{p}_proj.weight": (20, 48) for p in ("gate", "up")}
        expected[f"mlp.experts.{e}.down_proj.weight"] = (48, 20)
    expected["mlp.router.classifier.weight"] = (8, 48)
    expected["mlp.router.classifier.bias"] = (8,)
    expected["mlp.router.e_score_correction_bias"] = (8,)
    assert layer == expected


def test_queries_without_a_latent_have_one_projection():
    shapes = longcat_flash.parameters(cases.find("longcat_flash/q_lora_null").config)
    assert shapes["model.layers.0.self_attn.0.q_proj.weight"] == (64, 48)
    assert not [name for name in shapes if "q_a_" in name or "q_b_" in name]


def test_multi_token_prediction_is_set_aside_by_name():
    assert longcat_flash.ignored("model.mtp.layers.0.eh_proj.weight")
    assert not longcat_flash.ignored("model.layers.0.mtp.weight")
    assert not any(map(longcat_flash.ignored, longcat_flash.parameters(cases.find("longcat_flash/plain").config)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_method", "MHA"),
        ("zero_expert_type", "copy"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("qk_rope_head_dim", 7),
        ("moe_topk", 9),
        ("kv_lora_rank", None),
        ("n_routed_experts", "5"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_field(field, value):
    with pytest.raises(ReferenceError, match=field):
        longcat_flash.parameters(dict(cases.find("longcat_flash/plain").config) | {field: value})


def test_layers_may_be_counted_as_sub_layers():
    config = dict(cases.find("longcat_flash/plain").config)
    counted = {k: v for k, v in config.items() if k != "num_layers"} | {"num_hidden_layers": 4}
    assert longcat_flash.parameters(counted) == longcat_flash.parameters(config)


@pytest.mark.parametrize("name", ["plain", "norm_topk", "router_bias", "no_zero_experts"])
def test_routing_by_hand_on_the_first_token(draw, name):
    """With one token attention is the identity on the values, so that a whole layer can be written down in numpy."""
    config, weights, tokens = draw(f"longcat_flash/{name}", length=1)
    config = config | {"num_layers": 1}
    w = {n: t.double().numpy() for n, t in weights.items()}
    experts, topk = config["n_routed_experts"], config["moe_topk"]

    def rms(x, name, eps=config["rms_norm_eps"]):
        return x / np.sqrt((x**2).mean() + eps) * w[f"{name}.weight"]

    def mlp(x, name):
        gate = w[f"{name}.gate_proj.weight"] @ x
        return w[f"{name}.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (w[f"{name}.up_proj.weight"] @ x))

    def attend(x, name):
        rank = config["kv_lora_rank"]
        latent = rms((w[f"{name}.kv_a_proj_with_mqa.weight"] @ x)[:rank], f"{name}.kv_a_layernorm", 1e-6) * math.sqrt(48 / rank)
        values = (w[f"{name}.kv_b_proj.weight"] @ latent).reshape(4, 8 + 12)[:, 8:]
        return w[f"{name}.o_proj.weight"] @ values.reshape(-1)

    def moe(p, name):
        logits = w[f"{name}.router.classifier.weight"] @ p + w.get(f"{name}.router.classifier.bias", 0.0)
        scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        corrected = scores + w[f"{name}.router.e_score_correction_bias"]
        order = np.argsort(-corrected)
        share = scores[order[:topk]] / (scores[order[:topk]].sum() if config["norm_topk_prob"] else 1.0)
        out = sum(
            2.5 * weight * (mlp(p, f"{name}.experts.{e}") if e < experts else p)
            for e, weight in zip(order, share, strict=False)
        )
        return out, corrected[order[topk - 1]] - corrected[order[topk]], sorted(order[:topk])

    layer = "model.layers.0"
    x = w["model.embed_tokens.weight"][tokens[0]]
    h = x + attend(rms(x, f"{layer}.input_layernorm.0"), f"{layer}.self_attn.0")
    p = rms(h, f"{layer}.post_attention_layernorm.0")
    shortcut, margin, chosen = moe(p, f"{layer}.mlp")
    h = h + mlp(p, f"{layer}.mlps.0")
    h = h + attend(rms(h, f"{layer}.input_layernorm.1"), f"{layer}.self_attn.1")
    h = h + mlp(rms(h, f"{layer}.post_attention_layernorm.1"), f"{layer}.mlps.1") + shortcut
    result = longcat_flash.recompute(config, weights, tokens)
    np.testing.assert_allclose(result.logits[0].numpy(), w["lm_head.weight"] @ rms(h, "model.norm"), rtol=0, atol=1e-12)
    assert result.margins is not None and result.choices is not None
    assert float(result.margins[0]) == pytest.approx(margin, abs=1e-13)
    assert result.choices[0].tolist() == chosen


def test_no_choice_has_an_infinite_margin(draw):
    config, weights, tokens = draw("longcat_flash/plain")
    margins = longcat_flash.recompute(config | {"moe_topk": 8}, weights, tokens).margins
    assert margins is not None and bool(margins.isinf().all())


def test_attention_depends_on_distances_only(draw):
    """Rotary positions: a repeated token sees the same keys at the same distances wherever the repetition starts."""
    config, weights, _ = draw("longcat_flash/plain")
    rows = longcat_flash.logits(config, weights, [7] * 30)
    torch.testing.assert_close(rows, rows[:1].expand(30, -1), rtol=0, atol=1e-11)


def test_yarn_scales_frequencies_and_the_softmax(draw):
    config, _, _ = draw("longcat_flash/yarn")
    frequency, cos_factor, scale_factor = longcat_flash._rotary(config, 8, torch.float64)
    plain = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    # the pair that makes 4 turns in 24 tokens has index < 0, the one that makes 1 turn has index 1.16: the ramp is 0, 1/2, 1, 1
    torch.testing.assert_close(frequency, plain * torch.tensor([1, 0.55, 0.1, 0.1]).double(), rtol=1e-7, atol=0)
    assert cos_factor == 1.0
    assert scale_factor == pytest.approx((0.1 * math.log(10) + 1) ** 2)


def test_yarn_settings_that_are_not_computed_are_refused(draw):
    config, weights, tokens = draw("longcat_flash/yarn")
    for name, value in (("truncate", False), ("attention_factor", 1.5)):
        with pytest.raises(ReferenceError, match=name):
            longcat_flash.logits(config | {"rope_scaling": config["rope_scaling"] | {name: value}}, weights, tokens)
    with pytest.raises(ReferenceError, match="original_max_position_embeddings"):
        longcat_flash.logits(config | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, weights, tokens)


@pytest.mark.parametrize("part", ["classifier.weight", "e_score_correction_bias"])
def test_the_router_stays_in_float32_in_low_precision(draw, part):
    """A change too small for bfloat16 beside the parameter still moves the scores."""
    config, weights, tokens = draw("longcat_flash/plain")
    name = f"model.layers.0.mlp.router.{part}"
    sign = torch.arange(len(weights[name])).sub(3.5).view(-1, *[1] * (weights[name].ndim - 1))
    nudged = weights[name] * (1 + 2.0**-12 * sign.sign())
    assert torch.equal(nudged.to(torch.bfloat16).float(), weights[name])
    changed, one = weights | {name: nudged}, config | {"num_layers": 1}
    before, after = (longcat_flash.recompute(one, w, tokens, dtype=torch.bfloat16).margins for w in (weights, changed))
    assert before is not None and after is not None and before.dtype == torch.float32
    assert int((before != after).sum()) > 24
