"""Cases of LongCat-Flash. Choices of experts have wide margins by construction (harness.cases.routing).

The latent projections are quiet, so that the eps of the latent norms (1e-6) shows against rms_norm_eps, which is large; value
heads are wider than key heads, so that a wrong split shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.cases import routing
from harness.cases.case import Case
from harness.cases.routing import Routers, Site, among, exact

__all__ = ["CASES", "LATENT_GAIN", "adjust", "quiet_latents", "routers"]

LATENT_GAIN = 0.05  # mean square of a latent before its norm: about 0.0025, where an eps of 1e-5 is off by 2e-3

_BASE: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "attention_bias": False,
    "attention_method": "MLA",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "expert_ffn_hidden_size": 20,
    "ffn_hidden_size": 64,
    "hidden_size": 48,
    "kv_lora_rank": 12,
    "max_position_embeddings": 1024,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_topk": 3,
    "n_routed_experts": 5,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_layers": 2,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-3,
    "rope_theta": 100.0,
    "routed_scaling_factor": 2.5,
    "router_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 12,
    "vocab_size": 128,
    "zero_expert_num": 3,
    "zero_expert_type": "identity",
}

_YARN = {
    "type": "yarn",
    "factor": 10.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


# What rounding does to this arithmetic two cases show; the others are about what is computed, which float32 shows best.
ROUNDED = ("float32", "bfloat16")
_SHALLOW: dict[str, Any] = {"num_layers": 1}  # for what one layer shows; two sub-layers keep state in it all the same


def _case(name: str, stresses: str, *, dtypes: tuple[str, ...] = ("float32",), **fields: Any) -> Case:
    return Case("longcat_flash", name, stresses, _BASE | fields, layouts=("dense", "model_owned"), dtypes=dtypes)


CASES = [
    _case("plain", "two latent attentions a layer, real and zero experts, both latent scales", dtypes=ROUNDED),
    _case("no_zero_experts", "every expert has weights", **_SHALLOW, zero_expert_num=0, n_routed_experts=6),
    _case(
        "q_lora_null",
        "queries have no latent and no scale, and the key latent is not scaled",
        **_SHALLOW,
        q_lora_rank=None,
        mla_scale_kv_lora=False,
    ),
    _case("q_unscaled", "the key latent is scaled, the queries are not", **_SHALLOW, mla_scale_q_lora=False),
    _case(
        "yarn",
        "rope frequencies ramp, the softmax scale grows; prompt beyond the original length",
        dtypes=ROUNDED,
        **_SHALLOW,
        rope_scaling=_YARN,
    ),
    _case(
        "norm_topk",
        "the weights of the chosen experts are normalised; a latent so narrow that a first prefill runs on it too",
        **_SHALLOW,
        norm_topk_prob=True,
        kv_lora_rank=8,
    ),
    _case("router_bias", "the router has a linear bias beside the correction bias", **_SHALLOW, router_bias=True),
]


def quiet_latents(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with small latents before their norms (the rope key, which has no norm, keeps its size), and with attention
    outputs of the size of the residual whether or not the key latent, which the values come from, is scaled."""
    quiet = dict(tensors)
    latent = config["kv_lora_rank"]
    value_scale = math.sqrt(config["hidden_size"] / latent) if config["mla_scale_kv_lora"] else 1.0
    for name, tensor in tensors.items():
        if name.endswith("q_a_proj.weight"):
            quiet[name] = exact(LATENT_GAIN * tensor)
        elif name.endswith("kv_a_proj_with_mqa.weight"):
            quiet[name] = exact(torch.cat([LATENT_GAIN * tensor[:latent], tensor[latent:]]))
        elif name.endswith("o_proj.weight"):
            quiet[name] = exact(tensor / value_scale)
    return quiet


def routers(config: Mapping[str, Any]) -> Routers:
    """A softmax over real and zero experts, chosen from with a correction bias; the router may have a linear bias too."""
    sites = []
    for layer in range(config["num_layers"]):
        name = f"model.layers.{layer}"
        bias = f"{name}.mlp.router.classifier.bias" if config["router_bias"] else ""
        correction = f"{name}.mlp.router.e_score_correction_bias"
        norm = f"{name}.post_attention_layernorm.0.weight"
        sites.append(Site(f"{name}.mlp.router.classifier.weight", norm, layer, bias, correction))
    return Routers(
        sites,
        among(config["moe_topk"], lambda logits: logits.softmax(-1)),
        writes={r"\.(o_proj|down_proj)\.weight$": 0, r"\.post_projs\.": 0},
    )


def adjust(case: Case, seed: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The drawn parameters with quiet latents and with routers of wide margins."""
    return routing.reroute(case, seed, quiet_latents(case.config, tensors), routers(case.config))
