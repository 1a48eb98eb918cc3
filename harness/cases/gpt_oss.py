"""Cases of gpt-oss. Choices of experts have wide margins by construction (harness.cases.routing).

Windows are shorter than prompts by far; sinks are of the size of the scores; experts are wide enough in their values that the
limit of 7 cuts some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from harness.cases import routing
from harness.cases.case import GROWING, RING, ROPE, Case
from harness.cases.routing import Routers, Site, among, exact

__all__ = ["CASES", "adjust", "routers"]

_BASE: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 2,
    "experts_per_token": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initial_context_length": 24,
    "intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-2,
    "rope_scaling": {
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 24,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 50.0,
    "sliding_window": 8,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
}
_SPELLED = ("gpt_oss_incremental_logits_match_full_forward", "chunked_prefill_matches_full_forward")
_TRAITS = frozenset({GROWING, RING, ROPE})
_LOUD = 4.0  # on what is clamped: every twentieth value is beyond 7


def _case(
    name: str,
    stresses: str,
    *,
    dtypes: tuple[str, ...] = ("float32",),
    layouts: tuple[str, ...] = ("dense",),
    checks: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    **fields: Any,
) -> Case:
    config = {key: value for key, value in (_BASE | fields).items() if key not in without}
    return Case("gpt_oss", name, stresses, config, 48, layouts, dtypes, traits=_TRAITS, checks=checks)


CASES = [
    _case(
        "sinks",
        "windows of 8 and full attention by turns, sinks, biases, YaRN that is not rounded",
        dtypes=("float32", "bfloat16"),
        layouts=("dense", "model_owned"),
    ),
    _case(
        "clamped",
        "gates and ups beyond the limit on both sides; the same YaRN rounded; a layer that sees all before one that does not",
        layer_types=["full_attention", "sliding_attention"],
        rope_scaling=_BASE["rope_scaling"] | {"truncate": True},
    ),
    _case(
        "new_spelling",
        "rope_parameters, layers by turns and the limit by default, no biases on attention; a YaRN ramp beyond both ends",
        checks=_SPELLED,
        without=("rope_scaling", "rope_theta", "layer_types", "experts_per_token", "swiglu_limit"),
        rope_parameters=_BASE["rope_scaling"] | {"rope_theta": 4.0},
        attention_bias=False,
    ),
]


def routers(config: Mapping[str, Any]) -> Routers:
    """The logits themselves choose, linear bias included; a logit is rounded more coarsely than a score: margins are wider."""
    sites = []
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norm, bias = f"{name}.post_attention_layernorm.weight", f"{name}.mlp.router.bias"
        sites.append(Site(f"{name}.mlp.router.weight", norm, 1.6 + 2.4 * layer, bias))
    return Routers(
        sites,
        among(config["num_experts_per_tok"], lambda logits: logits),
        writes={r"\.o_proj\.(weight|bias)$": 0, r"\.experts\.down_proj": -1},
        edge=0.25,
        margin=0.15,
        spacing=1.0,
    )


def adjust(case: Case, seed: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The drawn parameters with values that the limit cuts, and with routers of wide margins."""
    if case.name == "clamped":
        loud = {name: exact(_LOUD * tensor) for name, tensor in tensors.items() if name.endswith(".gate_up_proj")}
        quiet = {name: exact(tensor / _LOUD) for name, tensor in tensors.items() if name.endswith(".experts.down_proj")}
        tensors = tensors | loud | quiet
    return routing.reroute(case, seed, tensors, routers(case.config))
