"""Nemotron-H, Gemma 3, gpt-oss and MLX's quantised formats against mlx-lm, on the files of the cases.

Known disagreements:

- nemotron_h, groups of experts: mlx-lm overwrites the scores of dropped groups with 0, which wins where the kept ones are
  negative; the model hides them. Without the limit on groups the two agree on the same file.
- nemotron_h: without attention and experts it looks for a layer that is not there; it has no biases on a mixer's projections,
  no tied head, and no model without a shared expert.
- gemma3: the factor sqrt(hidden) is rounded to bfloat16 whatever the dtype of the model. With the rounded factor in the
  reference the two agree. Layers are read from `sliding_window_pattern` alone, and rope settings from the old spelling alone.
- gpt_oss: `truncate: false` is ignored, the ramp of YaRN is always rounded. With `truncate: true` the two agree, on the
  published layout of the experts.
"""

from __future__ import annotations

import json
import math
import shutil
import types

import pytest
import torch

from harness import cases
from reference_models import gemma3
from suites.oracles.comparison import Comparison
from suites.oracles.mlx_lm_models import load, logits


@pytest.fixture
def changed(written, tmp_path):
    """`changed(id, field=value)`: a case's directory with other fields in its config, and tokens."""

    def change(id, seed=0, **fields):
        directory, tokens = written(id, seed)
        target = tmp_path / "changed"
        shutil.copytree(directory, target)
        file = target / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return target, tokens

    return change


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["mixed", "groups_1", "groups_8", "no_attention", "no_mamba", "latent", "long"])
def test_nemotron_h_agrees_on_the_same_files(written, name, seed):
    directory, tokens = written(f"nemotron_h/{name}", seed)
    Comparison(directory, tokens).agree(logits(load(directory), tokens), f"mlx-lm, {name}")


def test_mlx_lm_lets_a_dropped_group_win_over_negative_scores(written):
    directory, tokens = written("nemotron_h/limited_groups")
    theirs = logits(load(directory), tokens)
    Comparison(directory, tokens).differ(theirs, "mlx-lm zeroes dropped groups", 1.0, 40.0)  # measured: 7.0


def test_mlx_lm_agrees_where_no_group_is_dropped(changed):
    directory, tokens = changed("nemotron_h/limited_groups", topk_group=4)
    Comparison(directory, tokens).agree(logits(load(directory), tokens), "mlx-lm, every group kept")


@pytest.mark.parametrize(("name", "error"), [("time_steps", IndexError), ("biased", ValueError), ("listed", ValueError)])
def test_models_of_nemotron_h_that_mlx_lm_does_not_build(written, name, error):
    directory, tokens = written(f"nemotron_h/{name}")
    with pytest.raises(error):
        logits(load(directory), tokens)


@pytest.mark.parametrize("name", ["local_global", "scaled_global"])
def test_mlx_lm_rounds_the_factor_of_gemma3_s_embedding(changed, monkeypatch, name):
    directory, tokens = changed(f"gemma3/{name}", sliding_window_pattern=2)
    theirs = logits(load(directory), tokens)
    Comparison(directory, tokens).differ(theirs, "mlx-lm rounds sqrt(hidden)", 1e-3, 0.1)  # measured: 0.012, 0.005
    rounded = types.SimpleNamespace(**(vars(math) | {"sqrt": lambda n: float(torch.tensor(n).sqrt().bfloat16())}))
    monkeypatch.setattr(gemma3, "math", rounded)
    Comparison(directory, tokens).agree(theirs, f"mlx-lm, {name}, sqrt(hidden) rounded in the reference")


def test_mlx_lm_reads_the_new_spelling_of_gemma3_s_rope_as_its_defaults(changed):
    directory, tokens = changed("gemma3/new_spelling", sliding_window_pattern=2)
    theirs = logits(load(directory), tokens)
    Comparison(directory, tokens).differ(theirs, "mlx-lm ignores rope_parameters", 0.5, 20.0)  # measured: 4.3


def test_mlx_lm_rounds_the_ramp_of_gpt_oss_and_agrees_where_the_config_does(written, changed):
    directory, tokens = written("gpt_oss/mxfp4")
    theirs = logits(load(directory), tokens)
    Comparison(directory, tokens).differ(theirs, "mlx-lm ignores truncate: false", 0.2, 10.0)  # measured: 1.6
    rope = json.loads((directory / "config.json").read_text())["rope_scaling"] | {"truncate": True}
    directory, tokens = changed("gpt_oss/mxfp4", rope_scaling=rope)
    Comparison(directory, tokens).agree(logits(load(directory), tokens), "mlx-lm, published experts, truncate: true")
    Comparison(directory, tokens).agree(theirs, "mlx-lm, truncate: false read as true")


FORMATS = [case.id for case in cases.all_cases() if case.family == "llama" and case.stored.startswith(("affine", "mlx"))]


@pytest.mark.parametrize("id", FORMATS)
def test_files_of_our_encoders_are_what_mlx_lm_reads(written, id):
    directory, tokens = written(id)
    Comparison(directory, tokens).agree(logits(load(directory), tokens), f"mlx-lm, {id}")
