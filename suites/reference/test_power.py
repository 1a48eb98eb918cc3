"""The cases have power: each fault, planted in the reference itself, moves float32 logits far beyond their bound.

A fault is one replacement in the source of the reference, which must match exactly once. What it moves is measured in float64,
against three times the error of the naive float32 run: POWER times that, as for a check of the engine.
"""

from __future__ import annotations

import inspect
import types

import pytest
import torch

import reference_models
from suites.reference.recent_faults import GEMMA3, GPT_OSS, NEMOTRON_H

POWER = 20
K = 3

NAS = {
    "linear replacement without its norm": (
        'linear(h, f"{name}.self_attn.linear_attn")',
        'linear(x, f"{name}.self_attn.linear_attn")',
        "linear_first linear_between",
    ),
    "linear MLP without its norm": (
        'linear(h, f"{name}.mlp.linear_mlp")',
        'linear(x, f"{name}.mlp.linear_mlp")',
        "linear_between",
    ),
    "linear replacement not added to the residual": (
        'x = x + (attend(h, f"{name}.self_attn", layer.kv_heads) if full else linear(h, f"{name}.self_attn.linear_attn"))',
        'x = x + attend(h, f"{name}.self_attn", layer.kv_heads) if full else linear(h, f"{name}.self_attn.linear_attn")',
        "linear_first linear_between",
    ),
    "linear replacement skipped": (
        'if layer.attention != "no_op":\n            h =',
        'if layer.attention == "full":\n            h =',
        "linear_first linear_between",
    ),
    "linear MLP skipped": (
        'if layer.ffn != "no_op":\n            h =',
        'if layer.ffn == "full":\n            h =',
        "linear_between",
    ),
    "key heads tiled instead of repeated": (
        "t.repeat_interleave(s.heads // kv_heads, 0)",
        "t.repeat(s.heads // kv_heads, 1, 1)",
        "all_attention linear_first no_op_first linear_between mixed_gqa ffn_no_op",
    ),
    "rope in pairs instead of halves": (
        "x.to(cos.dtype).chunk(2, -1)",
        "x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)",
        "all_attention mixed_gqa ffn_no_op",
    ),
    "scaled rope left out": (
        'if kind == "default":',
        "if True:",
        "all_attention linear_first no_op_first linear_between mixed_gqa ffn_no_op",
    ),
    "rope bands not smoothed": (
        "slow, between)",
        "slow, frequency)",
        "all_attention linear_first no_op_first linear_between mixed_gqa ffn_no_op",
    ),
    "no causal mask": (
        ".triu(1)",
        ".triu(length)",
        "all_attention linear_first no_op_first linear_between mixed_gqa ffn_no_op",
    ),
    "scale of the heads left out": ("* s.head_dim**-0.5", "* 1.0", "all_attention mixed_gqa"),
    "gate and up swapped": (
        'F.silu(linear(h, f"{name}.gate_proj")) * linear(h, f"{name}.up_proj")',
        'F.silu(linear(h, f"{name}.up_proj")) * linear(h, f"{name}.gate_proj")',
        "all_attention mixed_gqa",
    ),
    "eps of the norms ten times too large": (
        'return _rms(x, weights[f"{name}.weight"].to(dtype), s.eps)',
        'return _rms(x, weights[f"{name}.weight"].to(dtype), s.eps * 10)',
        "all_attention mixed_gqa",
    ),
}
ROUTED = "plain no_zero_experts q_lora_null q_unscaled yarn norm_topk router_bias"
LONGCAT = {
    "correction bias used in the weights": (
        "scatter(-1, order[:, : s.topk], 1.0) * scores",
        'scatter(-1, order[:, : s.topk], 1.0) * (scores + weights[f"{name}.e_score_correction_bias"].to(high))',
        ROUTED,
    ),
    "correction bias left out of the choice": (
        'corrected, order = (scores + weights[f"{name}.e_score_correction_bias"].to(high))',
        'corrected, order = (scores + 0 * weights[f"{name}.e_score_correction_bias"].to(high))',
        ROUTED,
    ),
    "sigmoid instead of softmax": ("bias).softmax(-1)", "bias).sigmoid()", ROUTED),
    "weights normalised": ('config.get("norm_topk_prob", False)', "True", ROUTED.replace("norm_topk", "")),
    "weights not normalised": ('config.get("norm_topk_prob", False)', "False", "norm_topk"),
    "routed scaling left out": (
        'return chosen * config.get("routed_scaling_factor", 1.0), corrected',
        "return chosen, corrected",
        ROUTED,
    ),
    "one expert fewer": ("order[:, : s.topk], 1.0)", "order[:, : s.topk - 1], 1.0)", ROUTED),
    "router in bfloat16": (
        'F.linear(p.to(high), weights[f"{name}.classifier.weight"].to(high), bias)',
        '(F.linear(p.bfloat16(), weights[f"{name}.classifier.weight"].bfloat16()).to(high) + (0 if bias is None else bias))',
        ROUTED,
    ),
    "linear bias of the router left out": ("if s.router_bias else None", "if False else None", "router_bias"),
    "zero experts dropped": ("* p.to(high)  # zero", "* 0 * p.to(high)  # zero", ROUTED.replace("no_zero_experts", "")),
    "zero experts without their weight": (
        "weight[:, s.experts :].sum(-1, keepdim=True) * p",
        "(weight[:, s.experts :] > 0).sum(-1, keepdim=True) * p",
        ROUTED.replace("no_zero_experts", ""),
    ),
    "zero experts give the residual instead of the normed input": (
        'shortcut = moe(p, f"{name}.mlp")',
        'shortcut = moe(p, f"{name}.mlp") + (h - p) * route(p, f"{name}.mlp.router")[0][:, s.experts :].sum(-1, keepdim=True)',
        ROUTED.replace("no_zero_experts", ""),
    ),
    "shortcut added after the first sub-layer": (
        'h = h + mlp(p, f"{name}.mlps.0")',
        'h = h + mlp(p, f"{name}.mlps.0") + shortcut; shortcut = 0',
        ROUTED,
    ),
    "experts fed the second norm": (
        'shortcut = moe(p, f"{name}.mlp")',
        'shortcut = moe(norm(h, f"{name}.post_attention_layernorm.1"), f"{name}.mlp")',
        ROUTED,
    ),
    "shortcut dropped": ('f"{name}.mlps.1") + shortcut', 'f"{name}.mlps.1")', ROUTED),
    "second sub-layer with the weights of the first": ('f"{name}.self_attn.1")', 'f"{name}.self_attn.0")', ROUTED),
    "query scale left out": (
        "q_scale = math",
        "q_scale = 1.0 or math",
        ROUTED.replace("q_lora_null", "").replace("q_unscaled", ""),
    ),
    "query scale although it is off": ('config.get("mla_scale_q_lora", True)', "True", "q_unscaled"),
    "key scale left out": ("kv_scale = math", "kv_scale = 1.0 or math", ROUTED.replace("q_lora_null", "")),
    "key scale although it is off": ('config.get("mla_scale_kv_lora", True)', "True", "q_lora_null"),
    "latent scaled twice": ("_LATENT_EPS) * kv_scale", "_LATENT_EPS) * kv_scale**2", ROUTED.replace("q_lora_null", "")),
    "rope key scaled too": (
        "_rotate(k_rope[None], cos, sin)",
        "(kv_scale * _rotate(k_rope[None], cos, sin))",
        ROUTED.replace("q_lora_null", ""),
    ),
    "query scale on the nope part only": (
        "_rotate(q_rope, cos, sin)",
        "_rotate(q_rope, cos, sin) / q_scale",
        ROUTED.replace("q_lora_null", "").replace("q_unscaled", ""),
    ),
    "eps of the latent norms as of the others": ("_LATENT_EPS = 1e-6", "_LATENT_EPS = 1e-3", ROUTED),
    "eps of the latent norms 1e-5": ("_LATENT_EPS = 1e-6", "_LATENT_EPS = 1e-5", ROUTED),
    "latent norm left out": ('norm(latent, f"{name}.kv_a_layernorm", _LATENT_EPS)', "latent * 20", ROUTED),
    "rope in halves instead of pairs": (
        "x[..., 0::2].to(cos.dtype), x[..., 1::2].to(cos.dtype)",
        "x.to(cos.dtype).chunk(2, -1)",
        ROUTED,
    ),
    "rope key not rotated": ("_rotate(k_rope[None], cos, sin)", "k_rope[None]", ROUTED),
    "scale of the heads without the rope part": ("scale = (s.nope + s.rope)", "scale = (s.nope)", ROUTED),
    "softmax magnitude of YaRN left out": ("* scale_factor", "* 1.0", "yarn"),
    "softmax magnitude of YaRN not squared": ("magnitude(all_dim) ** 2", "magnitude(all_dim)", "yarn"),
    "YaRN left out": ('if kind == "default":', "if True:", "yarn"),
    "YaRN's ramp reversed": (
        "slow * frequency / factor + (1 - slow) * frequency",
        "(1 - slow) * frequency / factor + slow * frequency",
        "yarn",
    ),
    "no causal mask": (".triu(1)", ".triu(length)", ROUTED),
}
HASHED = "n2_k1 n3_k2 n4_k1 n4_k2 eos_in_prompt eos_at_chunk_edge wide_hash"
NGRAM = {
    "EOS does not cut the context": (
        "if back > p or tokens[p - back] in ends:",
        "if back > p:",
        "eos_in_prompt eos_at_chunk_edge",
    ),
    "EOS does not see its own past": (
        "if back > p or tokens[p - back] in ends:",
        "if back > p or tokens[p - back] in ends or tokens[p] in ends:",
        "eos_in_prompt eos_at_chunk_edge",
    ),
    "only the token after an EOS is cut": ("break  # so", "continue  # so", "eos_in_prompt eos_at_chunk_edge"),
    "context order reversed": (
        "pow(s.vocab, back, s.rows(table))",
        "pow(s.vocab, g - back, s.rows(table))",
        "n3_k2 n4_k1 n4_k2 wide_hash",
    ),
    "32-bit hash": (
        "rows.append(ids % s.rows(table))",
        "rows.append(ids.to(torch.int32).to(torch.int64) % s.rows(table))",
        "wide_hash",
    ),
    "the same modulus for all tables": (
        "ratio * self.vocab + 2 * table + 1",
        "ratio * self.vocab + 1 + 0 * table",
        "n3_k2 n4_k1 n4_k2 wide_hash",
    ),
    "context one token shorter": ("range(1, g):\n                ids", "range(1, g - 1):\n                ids", HASHED),
    "mean left out": ("x = x / (1 + s.tables)", "x = x / 1", HASHED),
    "mean without the word": ("x = x / (1 + s.tables)", "x = x / s.tables", HASHED.replace("n2_k1", "")),
    "word left out": ("x = x + linear(rows, f", "x = x * (table > 0) + linear(rows, f", HASHED),
    "last table left out": (
        "in enumerate(ngram_ids(config, tokens)):",
        "in enumerate(ngram_ids(config, tokens)[:-1]):",
        HASHED,
    ),
}


FAMILIES = {
    "nemotron_nas": NAS,
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": NGRAM,
    "nemotron_h": NEMOTRON_H,
    "gemma3": GEMMA3,
    "gpt_oss": GPT_OSS,
}


def _measured():
    for family, faults in FAMILIES.items():
        for fault, (old, new, names) in faults.items():
            for name in names.split():
                yield pytest.param(family, name, old, new, id=f"{family}/{name}-{fault.replace(' ', '_')}")


def planted(family: str, old: str, new: str) -> types.ModuleType:
    source = inspect.getsource(reference_models.find(family))
    assert source.count(old) == 1, f"{old!r} matches {source.count(old)} times"
    module = types.ModuleType(f"faulty_{family}")
    exec(compile(source.replace(old, new), module.__name__, "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def measure(draw):
    kept: dict[str, tuple[torch.Tensor, float]] = {}

    def measured(id: str):
        config, weights, tokens = draw(id, length=36)
        if id not in kept:
            reference = reference_models.find(config["model_type"])
            exact = reference.recompute(config, weights, tokens).logits
            naive = reference.recompute(config, weights, tokens, dtype=torch.float32).logits
            kept[id] = exact, float((naive.double() - exact).abs().max())
        return config, weights, tokens, *kept[id]

    return measured


@pytest.mark.parametrize(("family", "name", "old", "new"), list(_measured()))
def test_a_fault_moves_the_logits_far_beyond_the_bound(measure, family, name, old, new):
    config, weights, tokens, exact, noise = measure(f"{family}/{name}")
    faulty = planted(family, old, new).recompute(config, weights, tokens).logits
    power = float((faulty - exact).abs().max()) / (K * noise)
    assert power >= POWER, f"moves the logits by {power:.1f} times the bound only"


def test_a_harmless_change_does_not_move_the_logits(measure):
    config, weights, tokens, exact, noise = measure("longcat_flash/plain")
    other_order = planted("longcat_flash", "h = x + attend(", "h = 0 + x + attend(").recompute(config, weights, tokens).logits
    assert float((other_order - exact).abs().max()) < noise
