"""What holds for the reference of every family of the cases."""

from __future__ import annotations

import pytest
import torch

import reference_models
from harness import cases

IDS = [case.id for case in cases.all_cases() if case.family != "llama" and not case.stored]
FORGETFUL = {"gemma3/all_local"}  # no layer sees more than its window


@pytest.mark.parametrize("id", IDS)
def test_rows_do_not_depend_on_later_tokens(draw, id):
    config, weights, tokens = draw(id)
    reference = reference_models.find(config["model_type"])
    whole = reference.recompute(config, weights, tokens)
    for length in (1, 2, 3, 17, 33):
        prefix = reference.recompute(config, weights, tokens[:length])
        torch.testing.assert_close(prefix.logits, whole.logits[:length], rtol=0, atol=1e-11)
        if whole.margins is not None:
            torch.testing.assert_close(prefix.margins, whole.margins[:length], rtol=0, atol=1e-12)
        if whole.choices is not None:
            torch.testing.assert_close(prefix.choices, whole.choices[:length], rtol=0, atol=0)


@pytest.mark.parametrize("id", [id for id in IDS if id not in FORGETFUL])
def test_rows_depend_on_every_earlier_token(draw, id):
    config, weights, tokens = draw(id, length=20)
    reference = reference_models.find(config["model_type"])
    last = reference.recompute(config, weights, tokens).logits[-1]
    for position in (0, 1, 10, 19):
        changed = [*tokens]
        changed[position] = 5 if tokens[position] != 5 else 6
        moved = (reference.recompute(config, weights, changed).logits[-1] - last).abs().max()
        assert moved > 1e-3, f"token {position} moves the last row by {moved:.1e} only"


@pytest.mark.parametrize("id", IDS)
def test_every_parameter_gets_a_gradient_but_the_choice_of_experts(draw, id):
    config, weights, tokens = draw(id)
    reference = reference_models.find(config["model_type"])
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    logits = reference.recompute(config, leaves, tokens).logits
    logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).mean().backward()
    without = {name for name, leaf in leaves.items() if leaf.grad is None or not leaf.grad.any()}
    # a bias that only chooses has none, nor has an expert that no token of these chose
    assert {name for name in without if "e_score_correction_bias" not in name and ".experts." not in name} == set()


def _is_read_where_there_is_one(name: str) -> bool:
    return name.endswith((".bias", ".shared_experts.up_proj.weight"))


@pytest.mark.parametrize("id", IDS)
def test_every_parameter_is_read(draw, id):
    config, weights, tokens = draw(id, length=3)
    reference = reference_models.find(config["model_type"])
    for name in weights:
        left = {n: t for n, t in weights.items() if n != name}
        if config["model_type"] == "nemotron_h" and _is_read_where_there_is_one(name):
            assert not torch.equal(*(reference.recompute(config, w, tokens).logits for w in (weights, left)))
        elif ".experts." not in name or config["model_type"] == "gpt_oss":  # those are read when a token chooses them
            with pytest.raises(KeyError):
                reference.recompute(config, left, tokens)


@pytest.mark.parametrize("id", IDS)
def test_lower_precisions_are_near_the_oracle_in_their_own_measure(draw, id):
    config, weights, tokens = draw(id)
    reference = reference_models.find(config["model_type"])
    exact = reference.recompute(config, weights, tokens).logits
    for dtype, most in ((torch.float32, 2e-4), (torch.bfloat16, 2.0)):
        naive = reference.recompute(config, weights, tokens, dtype=dtype)
        assert naive.logits.dtype == dtype
        error = (naive.logits.double() - exact).abs().max()
        assert torch.finfo(dtype).eps / 100 < error < most
        assert (naive.logits.double() - exact).square().mean().sqrt() < most / 6
