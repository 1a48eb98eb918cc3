"""Cases of Nemotron-H. Choices of experts have wide margins by construction (harness.cases.routing).

The norms' eps is large, so that it shows. Most cases are about one thing and run in float32; a case that is about how a config
or a file is written runs the checks of which it is the subject.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.cases import routing
from harness.cases.case import GROWING, RECURRENT, Case
from harness.cases.routing import Choose, Routers, Site, among

__all__ = ["CASES", "adjust", "routers", "traits"]

_BASE: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "bos_token_id": 1,
    "chunk_size": 16,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 12,
    "hidden_size": 48,
    "hybrid_override_pattern": "M*E-M",
    "intermediate_size": 40,
    "layer_norm_epsilon": 1e-2,
    "mamba_head_dim": 8,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 8,
    "mamba_proj_bias": False,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 1,
    "n_groups": 2,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 16,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 128,
}
_SPELLED = ("nemotron_h_incremental_logits_match_full_forward", "padded_prefill_matches_full_forward")


def traits(pattern: str) -> frozenset[str]:
    """What a model of this pattern keeps between forwards. It has no rope, whatever its layers."""
    return frozenset({trait for kind, trait in (("M", RECURRENT), ("*", GROWING)) if kind in pattern})


def _case(
    name: str,
    stresses: str,
    pattern: str,
    *,
    prompt: int = 48,
    dtypes: tuple[str, ...] = ("float32",),
    layouts: tuple[str, ...] = ("dense",),
    stored: str = "",
    checks: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    **fields: Any,
) -> Case:
    config = _BASE | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)} | fields
    config = {key: value for key, value in config.items() if key not in without}
    return Case(
        "nemotron_h", name, stresses, config, prompt, layouts, dtypes, traits=traits(pattern), stored=stored, checks=checks
    )  # fmt: skip


BOTH = ("dense", "model_owned")
CASES = [
    _case("mixed", "every kind of layer, two groups", "M*E-M", dtypes=("float32", "bfloat16"), layouts=BOTH),
    _case("groups_1", "one group; a convolution of two taps", "MM*", n_groups=1, conv_kernel=2),
    _case("groups_8", "a group for each head; no bias on the convolution", "M-M", n_groups=8, use_conv_bias=False),
    _case("no_attention", "nothing but recurrent states and experts", "MEM", layouts=BOTH),
    _case("no_mamba", "attention without positions, and nothing recurrent", "*E-*"),
    _case(
        "limited_groups",
        "experts in groups, all corrected scores below zero",
        "ME",
        n_group=4,
        topk_group=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
    ),
    _case(
        "latent",
        "experts in a latent space, weights not normalised, an odd number of heads in a group",
        "E*M",
        moe_latent_size=20,
        norm_topk_prob=False,
        mamba_num_heads=6,
    ),
    _case("time_steps", "time steps that reach both ends of their limit", "MM", time_step_limit=[0.2, 0.6]),
    _case(
        "biased",
        "biases on every projection; time steps that have a limit below alone",
        "M-E",
        use_bias=True,
        mlp_bias=True,
        time_step_limit=[0.2, {"__float__": "Infinity"}],
    ),
    _case(
        "long",
        "a prompt of more chunks than one pass of the scan takes and of part of one, and of more rows than experts gather for",
        "ME*",
        prompt=266,
        hidden_size=32,
    ),
    _case(
        "listed",
        "layers listed by name, a tied head, no shared expert",
        "ME*",
        checks=_SPELLED,
        layers_block_type=["linear_attention", "moe", "full_attention"],
        tie_word_embeddings=True,
        n_shared_experts=0,
        time_step_limit=[0.0, {"__float__": "Infinity"}],
        without=("hybrid_override_pattern", "num_hidden_layers", "n_group", "topk_group"),
    ),
    _case(
        "omni",
        "the language model of a wrapper, experts in one tensor; time steps that have a limit above alone",
        "ME-",
        stored="omni",
        checks=_SPELLED,
        time_step_limit=[0.0, 0.6],
    ),
]


def _within_groups(config: Mapping[str, Any]) -> Choose:
    """The topk best of sigmoid(logits) + correction among the experts of the best groups, by the sum of their two best."""
    groups, kept, topk = config.get("n_group", 1), config.get("topk_group", 1), config["num_experts_per_tok"]
    experts = among(topk, torch.sigmoid)
    if kept == groups:
        return experts

    def choose(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        grouped = (logits.sigmoid() + correction).unflatten(-1, (groups, -1))
        order = grouped.topk(2, -1).values.sum(-1).sort(-1, descending=True)
        gap = order.values[..., kept - 1] - order.values[..., kept]
        dropped = torch.ones_like(order.values).scatter(-1, order.indices[..., :kept], 0.0).bool()
        left = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2).sort(-1, descending=True)
        margin = torch.minimum(gap, left.values[..., topk - 1] - left.values[..., topk])
        return margin, torch.zeros_like(logits).scatter(-1, left.indices[..., :topk], 1.0)

    return choose


def routers(config: Mapping[str, Any], pattern: str) -> Routers:
    """Sigmoid scores with a correction bias; where groups are limited, one that leaves every corrected score below zero."""
    sites = [
        Site(
            f"backbone.layers.{layer}.mixer.gate.weight",
            f"backbone.layers.{layer}.norm.weight",
            depth=layer / 2,
            correction=f"backbone.layers.{layer}.mixer.gate.e_score_correction_bias",
        )
        for layer, kind in enumerate(pattern)
        if kind == "E"
    ]
    limited = config.get("n_group", 1) > 1
    return Routers(
        sites,
        _within_groups(config),
        embedding="backbone.embeddings.weight",
        writes={r"\.(out_proj|o_proj|down_proj|fc2_latent_proj)\.(weight|bias)$": 0},
        mean=-1.5 if limited else 0.0,
    )


def adjust(case: Case, seed: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The drawn parameters with routers of wide margins."""
    listed = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    pattern = case.config.get("hybrid_override_pattern") or "".join(listed[k] for k in case.config["layers_block_type"])
    return routing.reroute(case, seed, tensors, routers(case.config, pattern)) if "E" in pattern else tensors
