"""LongCat-Flash against transformers, on files that transformers saved.

Known disagreements, each because transformers leaves something out (its config class has no such field):

- `norm_topk_prob`: it never normalises.
- `router_bias`: the classifier has the parameter, and the router does not add it.
- `mla_scale_q_lora`, `mla_scale_kv_lora`: it always scales.
- `q_lora_rank: null`: it always builds the latent.
- zero experts: it wants gate and up rows for them, which published files lack; they are never used.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import reference_models
from suites.oracles.comparison import Comparison

transformers = pytest.importorskip("transformers", minversion="5.24", reason="needs the transformers extra")


def padded(directory, target, value=0.0, changes=None):
    """A copy with rows for the zero experts, and with the rope width under the name that transformers reads."""
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    real, zero = config["n_routed_experts"], config["zero_expert_num"]
    for layer in range(config["num_layers"]):
        for expert in range(real, real + zero):
            for part in ("gate", "up"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                weights[name] = torch.full((config["expert_ffn_hidden_size"], config["hidden_size"]), value)
    shutil.copytree(directory, target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {"head_dim": config["qk_rope_head_dim"]} | (changes or {})))
    return target


def model(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def logits(loaded, tokens) -> np.ndarray:
    with torch.inference_mode():
        return loaded(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


@pytest.fixture
def saved(written, tmp_path):
    """`saved(id)`: the directory that transformers saved after it read the case's checkpoint, the model, tokens."""

    def save(id, seed=0, changes=None):
        directory, tokens = written(id, seed)
        loaded = model(padded(directory, tmp_path / "padded", changes=changes))
        loaded.save_pretrained(tmp_path / "saved")
        return tmp_path / "saved", model(tmp_path / "saved"), tokens

    return save


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["plain", "no_zero_experts", "yarn"])
def test_reference_agrees_on_the_files_that_transformers_saved(saved, name, seed):
    directory, loaded, tokens = saved(f"longcat_flash/{name}", seed)
    assert "rope_parameters" in json.loads((directory / "config.json").read_text())
    Comparison(directory, tokens).agree(logits(loaded, tokens), f"transformers, {name}")


def test_saved_files_hold_the_reference_s_parameters_and_rows_of_zero_experts(saved):
    directory, _, _ = saved("longcat_flash/plain")
    config = json.loads((directory / "config.json").read_text())
    names = load_file(directory / "model.safetensors").keys() if (directory / "model.safetensors").exists() else set()
    expected = reference_models.find("longcat_flash").parameters(config)
    extra = {name for name in names if name not in expected}
    assert set(expected) <= set(names)
    assert extra and all(".mlp.experts." in name and int(name.split(".")[5]) >= config["n_routed_experts"] for name in extra)


def test_rows_of_zero_experts_change_nothing(written, tmp_path):
    directory, tokens = written("longcat_flash/plain")
    zeros, ones = (logits(model(padded(directory, tmp_path / str(v), v)), tokens) for v in (0.0, 1.0))
    assert np.array_equal(zeros, ones)


def test_transformers_refuses_a_file_without_rows_of_zero_experts(written):
    directory, _ = written("longcat_flash/plain")
    with pytest.raises(RuntimeError):
        model(directory)


@pytest.mark.parametrize(
    ("name", "field", "asked", "least", "most"),
    [  # measured: 0.73, 2.4, 4.7, 8.2
        ("norm_topk", "norm_topk_prob", True, 0.1, 2.5),
        ("router_bias", "router_bias", True, 0.6, 15.0),
        ("plain", "mla_scale_q_lora", False, 0.8, 20.0),
        ("plain", "mla_scale_kv_lora", False, 1.5, 40.0),
    ],
)
def test_a_switch_that_transformers_ignores(saved, name, field, asked, least, most):
    """It computes the published setting whatever the config says: with that setting the reference agrees."""
    directory, loaded, tokens = saved(f"longcat_flash/{name}", changes={field: asked})
    theirs = logits(loaded, tokens)
    assert json.loads((directory / "config.json").read_text())[field] is asked
    Comparison(directory, tokens).differ(theirs, f"transformers ignores {field}", least, most)
    Comparison(directory, tokens, {field: not asked}).agree(theirs, f"transformers, {field} as it computes it")


def test_transformers_cannot_build_queries_without_a_latent(written, tmp_path):
    directory, _ = written("longcat_flash/q_lora_null")
    with pytest.raises(Exception, match=r"q_lora_rank|NoneType"):
        model(padded(directory, tmp_path / "padded"))
