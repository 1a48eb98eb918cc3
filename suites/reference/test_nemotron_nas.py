"""Nemotron-NAS: widths, names, refusals, and its equations against numpy and against the llama reference."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from harness import cases
from reference_models import llama, nemotron_nas
from reference_models.recompute import ReferenceError


@pytest.mark.parametrize(
    ("mult", "width"), [(0.5, 2816), (1.0, 5632), (1.3125, 7168), (2.625, 14336), (3.28125, 17920), (5.25, 28672)]
)
def test_width_of_an_mlp_at_the_published_hidden_size(mult, width):
    assert nemotron_nas.intermediate_size(mult, 8192) == width


def test_width_is_cut_before_it_is_rounded_up():
    assert nemotron_nas.intermediate_size(8.0, 48) == 256  # exactly 256 stays
    assert nemotron_nas.intermediate_size(8.03, 48) == 256  # 256.96
    assert nemotron_nas.intermediate_size(8.04, 48) == 512  # 257.28


def test_names_and_shapes_of_the_first_layers_of_a_published_config():
    block = {
        "attention": {
            "n_heads_in_group": 8,
            "no_op": False,
            "replace_with_linear": False,
            "sparsify": None,
            "window_length": None,
        },
        "ffn": {"ffn_mult": 2.625, "no_op": False, "replace_with_linear": False, "sparsify": None},
    }
    skipped = {
        "attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
        "ffn": {"ffn_mult": None, "no_op": False, "replace_with_linear": True},
    }
    config = {
        "hidden_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "vocab_size": 128256,
        "block_configs": [block, skipped],
    }
    assert nemotron_nas.parameters(config) == {
        "model.embed_tokens.weight": (128256, 8192),
        "model.layers.0.input_layernorm.weight": (8192,),
        "model.layers.0.self_attn.q_proj.weight": (8192, 8192),
        "model.layers.0.self_attn.k_proj.weight": (1024, 8192),
        "model.layers.0.self_attn.v_proj.weight": (1024, 8192),
        "model.layers.0.self_attn.o_proj.weight": (8192, 8192),
        "model.layers.0.post_attention_layernorm.weight": (8192,),
        "model.layers.0.mlp.gate_proj.weight": (14336, 8192),
        "model.layers.0.mlp.up_proj.weight": (14336, 8192),
        "model.layers.0.mlp.down_proj.weight": (8192, 14336),
        "model.layers.1.post_attention_layernorm.weight": (8192,),
        "model.layers.1.mlp.linear_mlp.weight": (8192, 8192),
        "model.norm.weight": (8192,),
        "lm_head.weight": (128256, 8192),
    }


@pytest.mark.parametrize(
    ("half", "field", "value"),
    [
        ("attention", "window_length", 128),
        ("attention", "num_sink_tokens", 4),
        ("attention", "unshifted_sink", True),
        ("attention", "use_prefill_window_in_sink_attention", True),
        ("attention", "sparsify", ["q"]),
        ("ffn", "sparsify", ["up"]),
        ("ffn", "moe", {"experts": 4}),
    ],
)
def test_a_set_field_that_is_not_computed_is_refused_by_name(half, field, value):
    config = copy.deepcopy(dict(cases.find("nemotron_nas/mixed_gqa").config))
    config["block_configs"][2][half][field] = value
    with pytest.raises(ReferenceError, match=rf"block_configs\[2\]\.{half}\.{field}"):
        nemotron_nas.parameters(config)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": 5}, "block_configs"),
        ({"block_configs": None}, "block_configs"),
        ({"num_attention_heads": 5}, "hidden_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_a_config_that_is_not_this_family_is_refused(change, field):
    with pytest.raises(ReferenceError, match=field):
        nemotron_nas.parameters(dict(cases.find("nemotron_nas/mixed_gqa").config) | change)


def test_a_group_that_does_not_divide_the_heads_is_refused():
    config = copy.deepcopy(dict(cases.find("nemotron_nas/mixed_gqa").config))
    config["block_configs"][0]["attention"]["n_heads_in_group"] = 4
    with pytest.raises(ReferenceError, match="n_heads_in_group"):
        nemotron_nas.parameters(config)


def test_linear_replacements_equal_a_computation_by_hand(draw):
    """A checkpoint of replacements and MLPs only has no attention, so a row is a function of its own token: numpy can do it."""
    config, weights, tokens = draw("nemotron_nas/linear_between", length=9)
    config["block_configs"] = [config["block_configs"][1]]  # one layer: both halves are linear
    config["num_hidden_layers"] = 1
    w = {name.replace("layers.1.", "layers.0."): tensor.double().numpy() for name, tensor in weights.items()}

    def rms(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    x = w["model.embed_tokens.weight"][tokens]
    x = x + rms(x, "model.layers.0.input_layernorm") @ w["model.layers.0.self_attn.linear_attn.weight"].T
    x = x + rms(x, "model.layers.0.post_attention_layernorm") @ w["model.layers.0.mlp.linear_mlp.weight"].T
    by_hand = rms(x, "model.norm") @ w["lm_head.weight"].T
    renamed = {name: torch.from_numpy(array) for name, array in w.items()}
    np.testing.assert_allclose(nemotron_nas.logits(config, renamed, tokens).numpy(), by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["all_attention", "no_op_first", "mixed_gqa", "ffn_no_op"])
def test_equals_a_llama_with_key_heads_repeated_and_missing_halves_switched_off(draw, name):
    """A Llama with the most key heads computes the same: narrower layers repeat theirs, missing halves project to zero."""
    config, weights, tokens = draw(f"nemotron_nas/{name}")
    heads, head_dim, hidden, width = 6, 8, 48, 512
    emulated = {n: t for n, t in weights.items() if "layers" not in n}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        full = {n: torch.ones(hidden) for n in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        full |= {f"self_attn.{p}_proj.weight": torch.zeros(heads * head_dim, hidden) for p in "qkvo"}
        full |= {f"mlp.{p}_proj.weight": torch.zeros(width, hidden) for p in ("gate", "up")}
        full["mlp.down_proj.weight"] = torch.zeros(hidden, width)
        for part, tensor in own.items():
            if part.endswith(("k_proj.weight", "v_proj.weight")):
                kv = tensor.view(-1, head_dim, hidden)
                full[part] = kv.repeat_interleave(heads // len(kv), 0).reshape(-1, hidden)
            elif part.startswith("mlp"):
                full[part][: len(tensor), : tensor.shape[1]] = tensor
            else:
                full[part] = tensor
        emulated |= {prefix + part: tensor for part, tensor in full.items()}
    as_llama = {k: v for k, v in config.items() if k != "block_configs"}
    as_llama |= {"model_type": "llama", "num_key_value_heads": heads, "intermediate_size": width}
    theirs, ours = llama.logits(as_llama, emulated, tokens), nemotron_nas.logits(config, weights, tokens)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_both_spellings_of_the_rope_give_the_same(draw):
    config, weights, tokens = draw("nemotron_nas/all_attention")
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
    assert torch.equal(nemotron_nas.logits(new, weights, tokens), nemotron_nas.logits(config, weights, tokens))


def test_another_rope_type_is_refused(draw):
    config, weights, tokens = draw("nemotron_nas/all_attention")
    with pytest.raises(ReferenceError, match="yarn"):
        nemotron_nas.logits(config | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, weights, tokens)
