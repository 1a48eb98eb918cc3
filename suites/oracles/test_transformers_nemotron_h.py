"""Nemotron-H against transformers, on files that transformers saved: the reference, and our engine beside it.

Known disagreements:

- time steps: transformers clamps them at `time_step_min` (0.001 by default) where it computes a prompt, not where it decodes
  from its cache, and ignores `time_step_limit`; published models have no limit. With `time_step_min` at 1e-30 the two agree; at
  its default they differ as soon as a time step is below it, and agree again where the reference is told that limit.
- `attention_bias`: transformers ignores it and has no biases there; we take those that are in the file.
- `n_shared_experts`: transformers builds and saves shared experts also where it is 0; we use those that are in the file.
- `tie_word_embeddings`: transformers ignores it and saves a head of its own, which we use because it is there.
"""

from __future__ import annotations

import json

import pytest
import torch

from reference_models import nemotron_h
from reference_models.loading import load
from suites.oracles import engine_models
from suites.oracles.comparison import Comparison
from suites.oracles.saved_models import logits, save

BASE = {
    "model_type": "nemotron_h",
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 96,
    "hybrid_override_pattern": "MEM*-ME*",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-3,
    "max_position_embeddings": 256,
    "mlp_hidden_act": "relu2",
    "time_step_min": 1e-30,
}
CONFIGS = {
    "plain": {},
    "groups": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2},
    "latent": {"moe_latent_size": 24},
    "group_a_head": {"n_groups": 8, "conv_kernel": 2},
    "one_group": {"n_groups": 1, "use_conv_bias": False},
    "biased": {"use_bias": True, "mlp_bias": True, "moe_latent_size": 24},
    "tied": {"tie_word_embeddings": True, "norm_topk_prob": False},
    "no_attention": {"hybrid_override_pattern": "MEM-"},
    "no_mamba": {"hybrid_override_pattern": "*E-*"},
    "all_biases_asked_for": {"attention_bias": True, "use_bias": True, "mlp_bias": True},
    "shared_experts_not_counted": {"n_shared_experts": 0},
    "listed": {"layers_block_type": ["linear_attention", "full_attention", "moe"], "hybrid_override_pattern": None},
}


def config(name):
    return {k: v for k, v in (BASE | CONFIGS[name]).items() if v is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_reference_and_engine_agree_on_the_files_that_transformers_saved(tmp_path, name):
    model, tokens = save(tmp_path, config(name))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "layers_block_type" in saved and "hybrid_override_pattern" not in saved
    own_head = {"lm_head.weight": (128, 64)}  # also where the config ties it
    shared = nemotron_h.parameters(saved | {"n_shared_experts": 1})  # also where the config counts none
    assert {n: tuple(t.shape) for n, t in load(tmp_path)[1].items()} == shared | own_head
    theirs = logits(model, tokens)
    comparison = Comparison(tmp_path, tokens)
    comparison.agree(theirs, f"transformers, {name}")
    comparison.agree_with(engine_models.logits(tmp_path, tokens), theirs, f"engine and transformers, {name}")


@pytest.mark.parametrize("name", ["plain", "groups", "latent"])
def test_engine_decodes_what_transformers_computes(tmp_path, name):
    model, tokens = save(tmp_path, config(name), seed=1)
    theirs = logits(model, tokens)
    comparison = Comparison(tmp_path, tokens)
    comparison.agree_with(engine_models.stepped(tmp_path, tokens, 17), theirs, f"engine in steps and transformers, {name}")
    comparison.agree_with(engine_models.chunked(tmp_path, tokens, 7), theirs, f"engine in pieces and transformers, {name}")


# measured: 2.4, 2.4 and 5.6, where logits have a standard deviation of 1.5
def test_time_steps_that_transformers_clamps_though_the_model_does_not(tmp_path):
    model, tokens = save(tmp_path, BASE | {"time_step_min": 0.001}, time_step=-7.0)
    theirs = logits(model, tokens)
    Comparison(tmp_path, tokens).differ(theirs, "transformers clamps time steps at 0.001", 0.2, 15.0)
    limit = {"time_step_limit": [0.001, {"__float__": "Infinity"}]}
    Comparison(tmp_path, tokens, limit).agree(theirs, "transformers, the limit that it computes with")


def test_transformers_own_cache_disagrees_with_its_prompt_on_clamped_time_steps(tmp_path):
    model, tokens = save(tmp_path, BASE | {"time_step_min": 0.001}, time_step=-7.0)
    comparison = Comparison(tmp_path, tokens)
    with torch.inference_mode():
        first = model(torch.tensor([tokens[:1]]), use_cache=True)
        rows, cache = [first.logits[0]], first.cache
        for token in tokens[1:]:
            step = model(torch.tensor([[token]]), cache=cache, use_cache=True)
            rows.append(step.logits[0])
            cache = step.cache
    theirs = torch.cat(rows).numpy()
    comparison.differ(theirs - logits(model, tokens) + comparison.truth, "transformers, cached and not", 0.2, 15.0)


def test_transformers_ignores_a_limit_of_time_steps(tmp_path):
    model, tokens = save(tmp_path, BASE | {"time_step_limit": [0.2, 0.6]})
    theirs = logits(model, tokens)
    Comparison(tmp_path, tokens).differ(theirs, "transformers ignores time_step_limit", 0.5, 40.0)
    Comparison(tmp_path, tokens, {"time_step_limit": None}).agree(theirs, "transformers, without the limit")
