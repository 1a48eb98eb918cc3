"""Nemotron-H: names, spellings and refusals; the recurrence against its closed form, routing and the MTP head by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness import cases
from reference_models import find, nemotron_h, text_config
from reference_models.recompute import ReferenceError

NANO = {  # of the published 30B-A3B, two layers of each kind
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "vocab_size": 131072,
    "hybrid_override_pattern": "ME*M",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}


def plain(id: str) -> dict:
    return dict(cases.find(id).config)


def test_names_and_shapes_of_published_layers():
    shapes = nemotron_h.parameters(NANO)
    mamba = {n.removeprefix("backbone.layers.0."): s for n, s in shapes.items() if n.startswith("backbone.layers.0.")}
    assert mamba == {
        "norm.weight": (2688,),
        "mixer.in_proj.weight": (10304, 2688),
        "mixer.out_proj.weight": (2688, 4096),
        "mixer.conv1d.weight": (6144, 1, 4),
        "mixer.conv1d.bias": (6144,),
        "mixer.A_log": (64,),
        "mixer.D": (64,),
        "mixer.dt_bias": (64,),
        "mixer.norm.weight": (4096,),
    }
    assert shapes["backbone.layers.1.mixer.gate.weight"] == (128, 2688)
    assert shapes["backbone.layers.1.mixer.experts.127.up_proj.weight"] == (1856, 2688)
    assert shapes["backbone.layers.1.mixer.shared_experts.down_proj.weight"] == (2688, 3712)
    assert shapes["backbone.layers.2.mixer.o_proj.weight"] == (2688, 4096)
    assert shapes["backbone.embeddings.weight"] == shapes["lm_head.weight"] == (131072, 2688)
    # norm and mixer: 8 + 1 for M, 128 experts of 2, gate, bias and shared for E, 4 for attention; embedding, last norm, head
    assert len(shapes) == 2 * 9 + (1 + 2 * 128 + 2 + 2) + 5 + 3


@pytest.mark.parametrize("field", ["hybrid_override_pattern", "layers_block_type", "layer_types"])
@pytest.mark.parametrize(
    "value", ["ME*-", ["mamba", "moe", "attention", "mlp"], ["linear_attention", "E", "full_attention", "-"]]
)
def test_every_spelling_of_the_pattern_is_one_model(field, value):
    config = plain("nemotron_h/mixed")
    base = {k: v for k, v in config.items() if k != "hybrid_override_pattern"}
    assert nemotron_h.parameters(base | {field: value}) == nemotron_h.parameters(config | {"hybrid_override_pattern": " MEA- "})


def test_a_wrapper_s_language_model_replaces_the_top_level():
    inner = plain("nemotron_h/mixed")
    for name in ("llm_config", "text_config"):
        outer = {"model_type": "NemotronH_Nano_VL_V2", "hidden_size": 9, name: inner}
        assert nemotron_h.parameters(outer) == nemotron_h.parameters(inner)
        assert text_config(outer) is inner
        assert find(outer["model_type"]) is nemotron_h


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hybrid_override_pattern", "MX"),
        ("hybrid_override_pattern", ""),
        ("mlp_hidden_act", "silu"),
        ("n_groups", 3),
        ("num_key_value_heads", 3),
        ("n_group", 4),
        ("topk_group", 2),
        ("num_experts_per_tok", 7),
        ("time_step_limit", [0.2]),
        ("time_step_limit", [0.5, 0.1]),
        ("time_step_limit", ["a", 1]),
        ("sliding_window", 128),
        ("ssm_state_size", "16"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_field(field, value):
    with pytest.raises(ReferenceError, match=field):
        nemotron_h.parameters(plain("nemotron_h/mixed") | {field: value})


@pytest.mark.parametrize("limit", [None, [0.0, math.inf], [0, {"__float__": "Infinity"}], (0.0, 1e9)])
def test_time_steps_have_no_limit_by_default(draw, limit):
    config, weights, tokens = draw("nemotron_h/time_steps", length=12)
    free = {k: v for k, v in config.items() if k != "time_step_limit"} | {"time_step_min": 0.5}
    expected = nemotron_h.logits(free, weights, tokens)
    assert torch.equal(nemotron_h.logits(free | {"time_step_limit": limit}, weights, tokens), expected)
    assert (nemotron_h.logits(config, weights, tokens) - expected).abs().max() > 0.1  # its limit of 0.2 to 0.6 shows


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
@pytest.mark.parametrize("body", ["backbone.", "model.backbone.", "model."])
def test_every_published_prefix_names_the_same_tensors(draw, prefix, body):
    config, weights, _ = draw("nemotron_h/mixed")
    renamed = {prefix + name.replace("backbone.", body): tensor for name, tensor in weights.items()}
    found = nemotron_h.renamed(config, renamed)
    assert found.keys() == weights.keys() and all(torch.equal(found[n], weights[n]) for n in found)


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts_and_other_axes_of_the_convolution_are_the_same_model(draw, suffix):
    config, weights, _ = draw("nemotron_h/mixed")
    stacked = {n: t for n, t in weights.items() if ".experts." not in n}
    for part in ("up_proj", "down_proj"):
        name = f"backbone.layers.2.mixer.experts.{{}}.{part}.weight"
        whole = torch.stack([weights[name.format(e)] for e in range(config["n_routed_experts"])])
        stacked[f"backbone.layers.2.mixer.experts.{part}{suffix}"] = whole
    conv = "backbone.layers.0.mixer.conv1d.weight"
    stacked[conv] = stacked[conv].transpose(1, 2)  # [channels, taps, 1]
    found = nemotron_h.renamed(config, stacked)
    assert found.keys() == weights.keys() and all(torch.equal(found[n], weights[n]) for n in found)


@pytest.mark.parametrize("name", ["groups_1", "groups_8", "time_steps"])
def test_the_recurrence_equals_its_closed_form(draw, name):
    """y_t = sum over s <= t of (C_t . B_s) exp(-A (dt_(s+1) + ... + dt_t)) dt_s x_s + D x_t, in one matrix a head."""
    config, weights, _ = draw(f"nemotron_h/{name}", length=33)
    s = nemotron_h._shape(config)
    w = {n.removeprefix("backbone.layers.0.mixer."): t.double() for n, t in weights.items()}
    h = torch.randn(33, s.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z, xbc, dt = (h @ w["in_proj.weight"].T).split([s.inner, s.conv, s.mamba_heads], -1)
    bias = w.get("conv1d.bias", torch.zeros(s.conv, dtype=torch.float64))
    mixed = F.silu(F.conv1d(xbc.T[None], w["conv1d.weight"], bias, groups=s.conv, padding=s.kernel - 1)[0, :, :33].T)
    x, b, c = mixed.split([s.inner, s.groups * s.state, s.groups * s.state], -1)
    dt = torch.logaddexp(dt + w["dt_bias"], torch.zeros(())).clamp(s.least, s.most)  # [T, heads]
    past = (-w["A_log"].exp() * dt).cumsum(0)
    rows = []
    for head in range(s.mamba_heads):
        group = head // (s.mamba_heads // s.groups)
        states = slice(group * s.state, (group + 1) * s.state)
        kernel = (c[:, states] @ b[:, states].T) * (past[:, head][:, None] - past[:, head]).exp().tril()
        own = x[:, head * s.mamba_dim : (head + 1) * s.mamba_dim]
        rows.append(kernel @ (dt[:, head, None] * own) + w["D"][head] * own)
    gated = (torch.cat(rows, -1) * F.silu(z)).unflatten(-1, (s.groups, -1))
    normed = gated / (gated.square().mean(-1, keepdim=True) + s.eps).sqrt()
    expected = (normed.flatten(-2) * w["norm.weight"]) @ w["out_proj.weight"].T
    layers = nemotron_h._Layers(s, weights, 33, torch.float64, 1.0, True)
    torch.testing.assert_close(layers.mamba(h, "backbone.layers.0.mixer"), expected, rtol=0, atol=1e-11)


def test_a_large_time_step_does_not_overflow(draw):
    config, weights, tokens = draw("nemotron_h/groups_1", length=6)
    name = "backbone.layers.0.mixer.dt_bias"
    for dtype in (torch.float32, torch.float64):
        assert bool(nemotron_h.logits(config, weights | {name: weights[name] + 200}, tokens, dtype=dtype).isfinite().all())


def test_a_hidden_group_is_never_chosen_however_low_the_scores(draw):
    """All corrected scores are below zero, so that a group that is zeroed rather than hidden would win."""
    config, weights, tokens = draw("nemotron_h/limited_groups")
    s = nemotron_h._shape(config)
    gate = "backbone.layers.1.mixer.gate"
    layers = nemotron_h._Layers(s, weights, len(tokens), torch.float64, 1.0, False)
    h = nemotron_h._rms(
        torch.randn(len(tokens), s.hidden, dtype=torch.float64), weights["backbone.layers.1.norm.weight"], s.eps
    )
    weight = layers.route(h, gate)
    scores = (h @ weights[f"{gate}.weight"].double().T).sigmoid()
    corrected = (scores + weights[f"{gate}.e_score_correction_bias"].double()).numpy()
    assert corrected.max() < 0
    differs = 0
    (choices,) = layers.choices
    for row, chosen, score, choice in zip(corrected, weight.numpy(), scores.numpy(), choices.tolist(), strict=True):
        groups = row.reshape(4, 2)
        kept = np.argsort(-groups.sum(1))[:2]
        allowed = [expert for expert in range(8) if expert // 2 in kept]
        best = sorted(allowed, key=lambda expert: -row[expert])[:3]
        assert set(np.flatnonzero(chosen)) == set(best) and choice == sorted(best)
        np.testing.assert_allclose(chosen[best], score[best], atol=1e-14)
        differs += set(best) != set(np.argsort(-row)[:3])
    assert differs > 5  # the limit has something to say


def test_a_head_in_the_file_goes_before_the_embedding_that_the_config_ties_it_to(draw):
    config, weights, tokens = draw("nemotron_h/listed", length=5)
    assert config["tie_word_embeddings"] and "lm_head.weight" not in nemotron_h.parameters(config)
    head = torch.randn(config["vocab_size"], config["hidden_size"], generator=torch.Generator().manual_seed(5))
    hidden = nemotron_h.hidden_states(config, weights, tokens)
    for found, expected in ((weights, weights["backbone.embeddings.weight"]), (weights | {"lm_head.weight": head}, head)):
        torch.testing.assert_close(nemotron_h.logits(config, found, tokens), hidden @ expected.double().T, rtol=0, atol=1e-12)


def test_attention_has_no_positions(draw):
    """Tokens before the last may come in any order."""
    config, weights, tokens = draw("nemotron_h/no_mamba", length=12)
    config = config | {"hybrid_override_pattern": "*"}
    last = nemotron_h.logits(config, weights, tokens)[-1]
    other = nemotron_h.logits(config, weights, [*tokens[-2::-1], tokens[-1]])[-1]
    torch.testing.assert_close(last, other, rtol=0, atol=1e-12)


MTP = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}


def with_head(draw, changes=MTP):
    config, weights, tokens = draw("nemotron_h/mixed", length=17)
    config = config | changes
    generator = torch.Generator().manual_seed(3)
    head = {
        name: torch.randn(shape, generator=generator) * 0.4 / math.sqrt(shape[-1]) + (len(shape) == 1)
        for name, shape in nemotron_h.mtp_parameters(config).items()
    }
    return config, weights | head, tokens


def test_names_of_the_mtp_head(draw):
    config, _, _ = with_head(draw)
    names = nemotron_h.mtp_parameters(config)
    assert {n for n in names if ".mixer." not in n} == {
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.norm.weight",
        "mtp.layers.1.norm.weight",
        "mtp.layers.1.final_layernorm.weight",
    }
    assert names["mtp.layers.0.eh_proj.weight"] == (48, 96)
    assert "mtp.layers.1.mixer.experts.5.down_proj.weight" in names and "mtp.layers.0.mixer.q_proj.weight" in names
    assert (
        nemotron_h.mtp_parameters(config | {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": ["attention", "moe"]})
        == names
    )
    assert nemotron_h.mtp_parameters(config | {"num_nextn_predict_layers": 0}) == {}


def test_the_mtp_head_by_hand_on_one_token(draw):
    config, weights, tokens = with_head(draw, MTP | {"mtp_hybrid_override_pattern": "-"})
    w = {n: t.double().numpy() for n, t in weights.items()}

    def rms(x, name):
        return x / np.sqrt((x**2).mean() + 1e-2) * w[f"{name}.weight"]

    hidden = nemotron_h.hidden_states(config, weights, tokens[:1])
    embedding = w["backbone.embeddings.weight"][tokens[1]]
    both = np.concatenate([rms(embedding, "mtp.layers.0.enorm"), rms(hidden[0].numpy(), "mtp.layers.0.hnorm")])
    x = w["mtp.layers.0.eh_proj.weight"] @ both
    h = rms(x, "mtp.layers.0.norm")
    up = np.maximum(w["mtp.layers.0.mixer.up_proj.weight"] @ h, 0) ** 2
    out = rms(x + w["mtp.layers.0.mixer.down_proj.weight"] @ up, "mtp.layers.0.final_layernorm")
    guess = nemotron_h.mtp(config, weights, hidden, tokens[1:2])
    np.testing.assert_allclose(guess.hidden[0].numpy(), out, atol=1e-12)
    np.testing.assert_allclose(guess.logits[0].numpy(), w["lm_head.weight"] @ out, atol=1e-11)


def test_the_mtp_head_is_causal_and_every_parameter_of_it_counts(draw):
    config, weights, tokens = with_head(draw)
    leaves = {n: t.double().requires_grad_() for n, t in weights.items()}
    hidden = nemotron_h.hidden_states(config, leaves, tokens[:-1])
    guess = nemotron_h.mtp(config, leaves, hidden, tokens[1:])
    part = nemotron_h.mtp(config, leaves, hidden[:5], tokens[1:6])
    torch.testing.assert_close(part.logits, guess.logits[:5], rtol=0, atol=1e-12)
    guess.logits.log_softmax(-1).square().mean().backward()
    without = {n for n in nemotron_h.mtp_parameters(config) if leaves[n].grad is None or not leaves[n].grad.any()}
    assert {n for n in without if ".experts." not in n and "e_score" not in n} == set()


def test_other_names_of_the_mtp_head_are_the_same_head(draw):
    config, weights, _ = with_head(draw)
    other = {}
    for name, tensor in weights.items():
        for old, new in (
            ("mtp.layers.0.enorm", "mtp.pre_fc_norm_embedding"),
            ("mtp.layers.0.hnorm", "mtp.pre_fc_norm_hidden"),
            ("mtp.layers.0.eh_proj", "mtp.fc"),
            ("mtp.layers.1.final_layernorm", "mtp.shared_head.norm"),
            ("mtp.layers.1.", "mtp.layers.2."),
            ("mtp.layers.0.", "mtp.layers.1."),
        ):
            if name.startswith(old):
                name = name.replace(old, new)
                break
        other[f"language_model.{name}"] = tensor
    found = nemotron_h.renamed(config, other)
    assert found.keys() == weights.keys() and all(torch.equal(found[n], weights[n]) for n in found)


def test_a_checkpoint_without_an_mtp_head_says_so(draw):
    config, weights, tokens = draw("nemotron_h/mixed", length=4)
    with pytest.raises(ReferenceError, match="num_nextn_predict_layers"):
        nemotron_h.mtp(config, weights, torch.zeros(3, 48, dtype=torch.float64), tokens[1:])
    with pytest.raises(ReferenceError, match="mtp_hybrid_override_pattern"):
        nemotron_h.mtp_parameters(config | MTP | {"mtp_hybrid_override_pattern": "M"})
