"""gpt-oss against transformers, on files that transformers saved: the reference, and our engine beside it.

Known disagreement: a config whose `rope_scaling` is null means no scaling; transformers puts its default YaRN in its place.
"""

from __future__ import annotations

import json

import pytest

from reference_models import gpt_oss
from reference_models.loading import load
from suites.oracles import engine_models
from suites.oracles.comparison import Comparison
from suites.oracles.saved_models import logits, save

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
BASE = {
    "model_type": "gpt_oss",
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0,
    "rope_parameters": YARN,
}
CONFIGS = {
    "untruncated": {},
    "truncated": {"rope_parameters": YARN | {"truncate": True}},
    "plain_rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "low_limit": {"swiglu_limit": 0.7},
    "no_biases": {"attention_bias": False},
    "all_full": {"layer_types": ["full_attention"] * 4},
    "every_expert": {"num_experts_per_tok": 4},
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_reference_and_engine_agree_on_the_files_that_transformers_saved(tmp_path, name, seed):
    model, tokens = save(tmp_path, BASE | CONFIGS[name], seed)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {n: tuple(t.shape) for n, t in load(tmp_path)[1].items()} == gpt_oss.parameters(saved)
    theirs = logits(model, tokens)
    comparison = Comparison(tmp_path, tokens)
    comparison.agree(theirs, f"transformers, {name}")
    comparison.agree_with(engine_models.logits(tmp_path, tokens), theirs, f"engine and transformers, {name}")


@pytest.mark.parametrize("name", ["untruncated", "truncated"])
def test_engine_decodes_what_transformers_computes(tmp_path, name):
    model, tokens = save(tmp_path, BASE | CONFIGS[name], seed=2)
    theirs = logits(model, tokens)
    comparison = Comparison(tmp_path, tokens)
    comparison.agree_with(engine_models.stepped(tmp_path, tokens, 7), theirs, f"engine in steps and transformers, {name}")
    comparison.agree_with(engine_models.chunked(tmp_path, tokens, 9), theirs, f"engine in pieces and transformers, {name}")


def test_truncation_makes_a_difference(tmp_path):
    model, tokens = save(tmp_path, BASE)
    other = {"rope_parameters": YARN | {"truncate": True}}
    Comparison(tmp_path, tokens, other).differ(logits(model, tokens), "the ramp rounded in the reference", 0.05, 20.0)
