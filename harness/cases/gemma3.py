"""Cases of Gemma 3. Windows are shorter than prompts by far, so that a window that is off by one shows.

Rotary bases are small and far apart, so that a layer with the base of the other kind shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.cases.build import generator
from harness.cases.case import GROWING, RING, ROPE, Case
from harness.cases.routing import exact

__all__ = ["CASES", "adjust"]

_BASE: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 12,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 40,
    "intermediate_size": 56,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 10,
    "rms_norm_eps": 1e-2,
    "rope_local_base_freq": 10.0,
    "rope_scaling": None,
    "rope_theta": 100.0,
    "sliding_window": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
}
_SPELLED = ("gemma3_incremental_logits_match_full_forward", "chunked_prefill_matches_full_forward")


# Without a layer that sees all, the end of a prompt knows nothing of its beginning, nor of what was left over before it.
_FORGETFUL = (
    "batched_steps_match_solo",
    "gemma3_incremental_logits_match_full_forward",
    "interleaved_sequences_match_recompute",
    "states_that_cannot_go_back_refuse_it",
    "window_boundaries_match_full_forward",
)


def _case(
    name: str,
    stresses: str,
    *,
    prompt: int = 48,
    dtypes: tuple[str, ...] = ("float32",),
    layouts: tuple[str, ...] = ("dense",),
    stored: str = "",
    checks: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    traits: frozenset[str] = frozenset({GROWING, RING, ROPE}),
    **fields: Any,
) -> Case:
    config = {key: value for key, value in (_BASE | fields).items() if key not in without}
    return Case(
        "gemma3", name, stresses, config, prompt, layouts, dtypes, traits=traits, stored=stored, checks=checks
    )  # fmt: skip


CASES = [
    _case(
        "local_global",
        "windows of 8 around a layer that sees all; two rotary bases",
        dtypes=("float32", "bfloat16"),
        layouts=("dense", "model_owned"),
    ),
    _case(
        "scaled_global",
        "positions of global layers, and of these alone, are divided by a factor; a head of its own",
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        tie_word_embeddings=False,
    ),
    _case(
        "all_local",
        "no layer sees more than its window; biases on attention",
        layer_types=["sliding_attention"] * 2,
        num_hidden_layers=2,
        attention_bias=True,
        traits=frozenset({RING, ROPE}),
        checks=_FORGETFUL,
    ),
    _case(
        "pattern",
        "every second layer is global, by sliding_window_pattern",
        checks=_SPELLED,
        without=("layer_types",),
        sliding_window_pattern=2,
    ),
    _case(
        "capped",
        "scores and logits pressed below a cap by tanh, as in Gemma 2",
        checks=_SPELLED,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=6.0,
    ),
    _case(
        "new_spelling",
        "rotary settings by kind of layer in rope_parameters",
        checks=_SPELLED,
        without=("rope_theta", "rope_local_base_freq", "rope_scaling"),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
    _case(
        "long",
        "a prompt of more queries than attention takes at a time",
        prompt=140,
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
        checks=("chunked_prefill_matches_full_forward",),
    ),
    _case("wrapper", "the language model of Gemma 3 with vision", stored="gemma3_wrapper", checks=_SPELLED),
]


def adjust(case: Case, seed: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norm weights are what is added to one. The last norm's have signs of their own, else every token would predict itself
    where the head is the embedding.
    """
    adjusted = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            numbers = generator(case, seed, name)
            factor = (0.3 * torch.randn(tensor.shape, generator=numbers)).exp()
            if name == "model.norm.weight":
                factor = 0.5 * factor * (torch.rand(tensor.shape, generator=numbers) - 0.5).sign()
            adjusted[name] = exact(factor - 1)
    return adjusted
