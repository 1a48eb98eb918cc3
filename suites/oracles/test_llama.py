"""The llama reference against transformers, on checkpoints that transformers saved itself.

Known disagreements: none. Runs in an environment with transformers (nox session `oracles`); skipped elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_models import llama
from reference_models.loading import load

transformers = pytest.importorskip("transformers", reason="an oracle of its own environment: pip install transformers")

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 20.0, "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 20.0, "factor": 4.0, "original_max_position_embeddings": 32}
CLOSE = (
    2e-4  # of the logits: transformers keeps rotary angles, cos and sin in float32 whatever the dtype; measured at most 5e-5
)
CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 20},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 20.0, "factor": 2.0}},
    "llama3": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}, "head_dim": 16},
    "llama3_default_length": {"rope_parameters": LLAMA3, "head_dim": 16, "max_position_embeddings": 40},
    "yarn": {"rope_parameters": YARN, "head_dim": 16},
    "yarn_betas": {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}, "head_dim": 16},
    "yarn_untruncated": {"rope_parameters": YARN | {"beta_fast": 4.0, "truncate": False}, "head_dim": 16},
    "yarn_mscale": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, "head_dim": 16},
    "yarn_attention_factor": {"rope_parameters": YARN | {"attention_factor": 1.3}, "head_dim": 16},
}


def saved(directory: Path, changes: dict[str, Any]) -> Any:
    """A random model of these settings, saved to the directory by transformers, in float64."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(BASE | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(
                1 + 0.3 * noise
                if "norm" in name
                else noise * (0.5 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5)
            )
    model.save_pretrained(directory)
    return model.double().eval()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_reference_equals_transformers_on_its_own_files(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, CONFIGS[name])
    config, weights = load(tmp_path)
    assert "rope_parameters" in config and "rope_scaling" not in config
    assert {tensor: tuple(value.shape) for tensor, value in weights.items()} == llama.parameters(config)
    tokens = torch.randint(0, 128, (70,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(tokens[None]).logits[0]
    ours = llama.logits(config, weights, tokens.tolist())
    assert (ours - theirs).abs().max() < CLOSE * theirs.std(), f"{(ours - theirs).abs().max():.2e}"


@pytest.mark.parametrize("name", ["gqa", "linear", "llama3", "yarn_betas"])
def test_old_spelling_of_a_saved_file_is_the_same_model(name: str, tmp_path: Path) -> None:
    saved(tmp_path, CONFIGS[name])
    config, weights = load(tmp_path)
    rope = dict(config.pop("rope_parameters"))
    old = config | {"rope_theta": rope.pop("rope_theta")}
    old["rope_scaling"] = {"type": rope.pop("rope_type"), **rope} if rope.get("factor") else None
    tokens = list(range(3, 73))
    (tmp_path / "config.json").write_text(json.dumps(old))
    ours = llama.logits(old, weights, tokens)
    with torch.no_grad():
        theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).double().eval()(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < CLOSE * theirs.std()
