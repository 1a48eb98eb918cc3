"""The llama reference has the properties that the oracle rests on."""

from __future__ import annotations

import math

import pytest
import torch

import reference_models
from harness.cases import Case, all_cases, find
from harness.cases.build import initial
from harness.tokens import TokenStream, special_ids
from reference_models import llama
from reference_models.recompute import ReferenceError

CASES = [case for case in all_cases() if case.family == "llama"]


def weights(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: initial(case, seed, name, shape) for name, shape in llama.parameters(case.config).items()}


def prompt(case: Case, count: int, seed: int = 0) -> list[int]:
    return TokenStream(seed, case.config["vocab_size"], special_ids(case.config)).tokens("a", 0, range(count))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_row_p_of_the_full_forward_is_the_last_row_of_the_prefix(case: Case) -> None:
    tokens, parameters = prompt(case, 40), weights(case)
    full = llama.logits(case.config, parameters, tokens)
    for length in (1, 2, 7, 33, 40):
        prefix = llama.logits(case.config, parameters, tokens[:length])
        torch.testing.assert_close(full[length - 1], prefix[-1], rtol=0, atol=1e-12)


def test_both_spellings_of_rope_are_one_model() -> None:
    old, new = find("llama/old_spelling"), find("llama/new_spelling")
    assert "rope_parameters" not in old.config and "rope_scaling" not in new.config and "rope_theta" not in new.config
    tokens = prompt(old, 40)
    assert torch.equal(llama.logits(old.config, weights(old), tokens), llama.logits(new.config, weights(new), tokens))


def test_spellings_that_contradict_each_other_are_refused() -> None:
    config = dict(find("llama/old_spelling").config) | {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}
    with pytest.raises(ReferenceError, match="disagree on 'factor'"):
        llama.logits(config, weights(find("llama/old_spelling")), [3, 4])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parameter_has_a_gradient(case: Case) -> None:
    parameters = {name: value.double().requires_grad_() for name, value in weights(case).items()}
    llama.logits(case.config, parameters, prompt(case, 12)).square().mean().backward()
    for name, value in parameters.items():
        assert value.grad is not None and value.grad.isfinite().all() and value.grad.abs().max() > 1e-9, name


def test_llama3_scaling_has_three_bands_in_its_case() -> None:
    case = find("llama/llama3_rope")
    frequency, magnitude = llama._inverse_frequencies(case.config, 16, torch.float64)
    plain, _ = llama._inverse_frequencies(dict(case.config) | {"rope_scaling": None}, 16, torch.float64)
    kept, scaled = frequency == plain, frequency == plain / 8
    assert kept.any() and scaled.any() and not (kept | scaled).all() and magnitude == 1.0
    assert (frequency[:-1] > frequency[1:]).all()


def test_yarn_ramps_between_kept_and_divided_frequencies() -> None:
    case = find("llama/yarn")
    frequency, magnitude = llama._inverse_frequencies(case.config, 16, torch.float64)
    plain, _ = llama._inverse_frequencies(dict(case.config) | {"rope_scaling": None}, 16, torch.float64)
    divisor = plain / frequency
    assert divisor[0] == 1 and divisor[-1] == 4 and ((divisor > 1.01) & (divisor < 3.99)).any()
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_linear_scaling_at_twice_the_position_is_no_scaling() -> None:
    case = find("llama/linear_rope")
    frequency, _ = llama._inverse_frequencies(case.config, 12, torch.float64)
    plain, _ = llama._inverse_frequencies(dict(case.config) | {"rope_scaling": None}, 12, torch.float64)
    torch.testing.assert_close(2 * frequency, plain, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 5),
        ("hidden_act", "gelu"),
        ("layer_types", ["sliding_attention"]),
        ("vocab_size", "128"),
    ],
)
def test_a_config_that_the_reference_does_not_compute_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ReferenceError, match=field):
        llama.parameters(dict(find("llama/gqa").config) | {field: value})


def test_an_unknown_rope_type_is_named() -> None:
    config = dict(find("llama/gqa").config) | {"rope_scaling": {"rope_type": "spiral"}}
    with pytest.raises(ReferenceError, match="spiral"):
        llama.logits(config, weights(find("llama/gqa")), [3])


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "yarn", "factor": "4"}, "factor"),
        ({"rope_type": "default", "rope_theta": -1}, "rope_theta"),
    ],
)
def test_a_rope_setting_that_is_missing_or_no_number_is_named(settings: dict[str, object], field: str) -> None:
    config = dict(find("llama/gqa").config) | {"rope_scaling": settings}
    with pytest.raises(ReferenceError, match=field):
        llama.logits(config, weights(find("llama/gqa")), [3])


@pytest.mark.parametrize("model_type", ["loading", "gguf_file", "no_such_family", "../llama", "", "Llama"])
def test_only_families_are_found_by_model_type(model_type: str) -> None:
    with pytest.raises(ReferenceError, match="no reference"):
        reference_models.find(model_type)
    assert reference_models.find("llama").recompute is llama.recompute


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "llama", "architectures": ["GptOssForCausalLM"]}, "llama"),
        ({"architectures": ["Mystery", 3, "LlamaForCausalLM"]}, "llama"),
        ({"model_type": None, "architectures": ["DeciLMForCausalLM"]}, "nemotron-nas"),
    ],
)
def test_a_config_names_its_family_or_the_class_that_has_one(config, found):
    assert reference_models.model_type(config) == found


def test_every_class_that_is_known_has_a_reference():
    for name, model_type in reference_models._CLASSES.items():
        assert reference_models.find(model_type).parameters, name


@pytest.mark.parametrize("config", [{}, {"architectures": "LlamaForCausalLM"}, {"architectures": [["x"], None, "Mystery"]}])
def test_a_config_without_family_and_class_is_an_error_that_says_what_to_add(config):
    with pytest.raises(ReferenceError, match=r"names no family.*add a model_type"):
        reference_models.model_type(config)
