"""Cases of how weights are stored: one for each quantised format, on the smallest model that has its modules.

The oracle decodes the bytes itself. Formats have no part in what is kept between forwards, so these cases run few checks. They
run in both layouts because our own engine holds weights packed in one and unpacked in the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.cases import gpt_oss, llama, nemotron_h
from harness.cases.case import Case

__all__ = ["CASES"]

_CHECKS = ("chunked_prefill_matches_full_forward", "batched_steps_match_solo")


def _llama(form: str, stresses: str, **fields: Any) -> Case:
    base = next(case for case in llama.CASES if case.name == "gqa")
    config = dict(base.config) | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1} | fields
    return replace(
        base,
        name=form,
        stresses=stresses,
        config=config,
        stored=form,
        checks=(*_CHECKS, "incremental_logits_match_full_forward"),
        dtypes=("float32",),
        layouts=("dense", "model_owned"),
    )


def _nemotron_h(form: str, stresses: str, pattern: str) -> Case:
    base = next(case for case in nemotron_h.CASES if case.name == "mixed")
    shape = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}
    config = dict(base.config) | shape | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), "head_dim": 16}
    return replace(
        base,
        name=form,
        stresses=stresses,
        config=config,
        stored=form,
        traits=nemotron_h.traits(pattern),
        checks=(*_CHECKS, "nemotron_h_incremental_logits_match_full_forward"),
        dtypes=("float32",),
        layouts=("dense", "model_owned"),
    )


def _gpt_oss() -> Case:
    base = next(case for case in gpt_oss.CASES if case.name == "sinks")
    config = dict(base.config) | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    return replace(
        base,
        name="mxfp4",
        stresses="experts as published: blocks of 32 values with one exponent, rows in place of columns",
        config=config,
        stored="gpt_oss_mxfp4",
        checks=(*_CHECKS, "gpt_oss_incremental_logits_match_full_forward"),
        dtypes=("float32",),
        layouts=("dense", "model_owned"),
    )


CASES = [
    *(_llama(f"affine_{bits}", f"MLX affine, {bits} bits, other settings by module") for bits in (2, 3, 4, 5, 6, 8)),
    *(_llama(f"mlx_{mode}", f"MLX {mode}, embedding and head too") for mode in ("mxfp4", "mxfp8", "nvfp4")),
    _llama("modelopt_nvfp4", "ModelOpt NVFP4: two levels of scales; excluded modules by wildcard"),
    _llama("modelopt_fp8", "ModelOpt FP8: one scale a tensor"),
    _llama("modelopt_mxfp8", "ModelOpt MXFP8: one exponent for 32 values"),
    _llama("compressed_nvfp4", "compressed-tensors: the scale of all is stored as its reciprocal"),
    _llama("block_fp8", "FP8 in blocks of 128 by 128, with smaller ones at the edges", hidden_size=160, intermediate_size=192),
    _nemotron_h("modelopt_mixed", "NVFP4 experts with a scale each, FP8 and plain modules in one file", "ME*"),
    _nemotron_h("mlx_nvfp4", "experts in MLX's layout, each in tensors of its own", "E-M"),
    _gpt_oss(),
]
