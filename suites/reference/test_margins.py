"""Choices of experts never hang by a thread, for any seed: rounding in bfloat16 does not come near any margin."""

from __future__ import annotations

import pytest
import torch

import reference_models
from harness import cases
from harness.cases import build
from harness.oracle import Oracle
from harness.tokens import TokenStream, special_ids
from harness.tolerance import tolerance

ROUTED = [
    case
    for case in cases.all_cases()
    if "moe_topk" in case.config
    or case.family == "gpt_oss"
    or "E" in case.config.get("hybrid_override_pattern", "")
    or "moe" in case.config.get("layers_block_type", ())
]
HEADROOM = 5  # a margin over what bfloat16 moves it by; least measured over 30 seeds, two sequences of 120 tokens: 8.7
LEAST = 0.01  # measured: 0.0146, where float32 moves a margin by less than 1e-6
# a margin over what an engine's rounding may move it by; least measured: 2.9e5 and 26
ABOVE_ROUNDING = {"float32": 1e4, "bfloat16": 8}
SEEDS = {True: 20, False: 4}  # by whether the case runs in bfloat16: where it does not, margins need not outlast its rounding


@pytest.mark.parametrize("case", ROUTED, ids=lambda case: case.id)
def test_margins_are_wide_for_every_seed(case):
    reference = reference_models.find(case.config["model_type"])
    rounds = "bfloat16" in case.dtypes
    for seed in range(100, 100 + SEEDS[rounds]):
        weights = build.drawn(case, seed)
        stream = TokenStream(seed, case.text["vocab_size"], special_ids(case.text), planted=case.planted)
        tokens = stream.tokens("b", 1, range(64))
        exact = reference.recompute(case.config, weights, tokens).margins
        assert exact is not None
        assert exact.min() >= LEAST, f"seed {seed}: least margin {exact.min():.4f}"
        if not rounds:
            continue
        rounded = reference.recompute(case.config, weights, tokens, dtype=torch.bfloat16).margins
        assert rounded is not None
        headroom = (exact / (rounded - exact).abs()).min()
        assert headroom >= HEADROOM, f"seed {seed}: bfloat16 moves a margin by 1/{headroom:.1f} of itself"


@pytest.mark.parametrize("case", cases.all_cases(), ids=lambda case: case.id)
def test_no_rounding_that_the_bounds_allow_chooses_another_expert_in_a_case(case, tmp_path):
    oracle = Oracle(build.build(case, 0, tmp_path))
    stream = TokenStream(0, oracle.vocab, special_ids(oracle.text), planted=case.planted)
    tokens = stream.tokens("a", 0, range(case.prompt))
    for dtype in case.dtypes:
        routing = oracle.noise(tokens, dtype).routing
        assert (routing is not None) == (case in ROUTED)
        if routing is not None:
            assert not routing.flipped.any()
            headroom = routing.margins.min() / (tolerance(dtype).k * routing.level)
            assert headroom >= ABOVE_ROUNDING[dtype], f"{dtype} may move a margin by 1/{headroom:.1f} of itself"


@pytest.mark.parametrize("name", ["plain", "no_zero_experts", "router_bias"])
def test_the_correction_bias_changes_choices_and_every_expert_is_chosen(draw, name):
    config, weights, tokens = draw(f"longcat_flash/{name}", length=200)
    reference = reference_models.find("longcat_flash")
    bias = "model.layers.0.mlp.router.e_score_correction_bias"
    one = config | {"num_layers": 1}
    with_bias = reference.recompute(one, weights, tokens).logits
    without = reference.recompute(one, weights | {bias: torch.zeros_like(weights[bias])}, tokens).logits
    changed = (with_bias != without).any(-1).double().mean()
    assert 0.2 < changed < 0.8
    for expert in range(config["n_routed_experts"]):
        down = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        silenced = reference.recompute(one, weights | {down: torch.zeros_like(weights[down])}, tokens).logits
        assert (silenced != with_bias).any(), f"expert {expert} is never chosen"


def test_choices_depend_on_the_token_and_weights_on_the_context(draw):
    config, weights, _ = draw("longcat_flash/plain")
    margins = reference_models.find("longcat_flash").recompute(config, weights, [9, 4, 9, 50, 60, 9, 9]).margins
    assert margins is not None
    own = margins[[0, 2, 5, 6]]
    assert 1e-4 < own.max() - own.min() < 0.1
