"""Nemotron-NAS against mlx-lm on the same files.

Known disagreement: names of linear replacements. Checkpoints say `self_attn.linear_attn` and `mlp.linear_mlp`, mlx-lm says
`.linear` for both, so a published file with replacements does not load there; renamed, it computes the same.
"""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file

from suites.oracles.comparison import Comparison
from suites.oracles.mlx_lm_models import load, logits


def renamed(directory, target):
    """A copy under mlx-lm's names of the linear replacements."""
    weights = load_file(directory / "model.safetensors")
    names = {n: n.replace(".linear_attn.", ".linear.").replace(".linear_mlp.", ".linear.") for n in weights}
    shutil.copytree(directory, target)
    save_file({names[n]: t for n, t in weights.items()}, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["all_attention", "no_op_first", "mixed_gqa", "ffn_no_op"])
def test_reference_agrees_on_the_same_files(written, name, seed):
    directory, tokens = written(f"nemotron_nas/{name}", seed)
    Comparison(directory, tokens).agree(logits(load(directory), tokens), f"mlx-lm, {name}")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["linear_first", "linear_between"])
def test_reference_agrees_where_linear_replacements_are_renamed(written, tmp_path, name, seed):
    directory, tokens = written(f"nemotron_nas/{name}", seed)
    theirs = logits(load(renamed(directory, tmp_path / "renamed")), tokens)
    Comparison(directory, tokens).agree(theirs, f"mlx-lm, {name} renamed")


@pytest.mark.parametrize("name", ["linear_first", "linear_between"])
def test_mlx_lm_does_not_know_the_published_names_of_linear_replacements(written, name):
    directory, _ = written(f"nemotron_nas/{name}")
    with pytest.raises(ValueError, match="linear_attn"):
        load(directory)
