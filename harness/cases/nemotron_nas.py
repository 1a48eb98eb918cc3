"""Cases of Nemotron-NAS: every layer has its own kind of attention and feed-forward.

The theta is small and the original length of the scaled rope is shorter than the prompt, as in the llama cases. An MLP's width
is a multiple of 256 whatever the hidden size, so two multipliers on both sides of 256 are used.
"""

from __future__ import annotations

from typing import Any

from harness.cases.case import Case

__all__ = ["CASES"]

_BASE: dict[str, Any] = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": None,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "num_attention_heads": 6,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 3.0,
        "low_freq_factor": 1.5,
        "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
}

_ATTENTION = {
    "n_heads_in_group": None,
    "no_op": False,
    "num_sink_tokens": None,
    "replace_with_linear": False,
    "sparsify": None,
    "unshifted_sink": False,
    "use_prefill_window_in_sink_attention": False,
    "window_length": None,
}
_FFN = {"ffn_mult": None, "no_op": False, "replace_with_linear": False, "sparsify": None}
_NONE, _LINEAR = {"no_op": True}, {"replace_with_linear": True}
_NARROW, _BROAD = {"ffn_mult": 2.625}, {"ffn_mult": 8.5}  # 256 and 512 wide at a hidden size of 48


def _heads(group: int) -> dict[str, Any]:
    return {"n_heads_in_group": group}


def _case(name: str, stresses: str, *layers: tuple[dict[str, Any], dict[str, Any]]) -> Case:
    blocks = [{"attention": _ATTENTION | attention, "ffn": _FFN | ffn} for attention, ffn in layers]
    config = _BASE | {"num_hidden_layers": len(blocks), "block_configs": blocks}
    # What rounding does two cases show; the others are about what is computed, which float32 shows best.
    dtypes = ("float32", "bfloat16") if name in ("linear_first", "mixed_gqa") else ("float32",)
    return Case("nemotron_nas", name, stresses, config, layouts=("dense", "model_owned"), dtypes=dtypes)


CASES = [
    _case("all_attention", "every layer has attention and an MLP", *[(_heads(3), _NARROW)] * 3),
    _case(
        "linear_first",
        "the first layer's attention is a linear map and keeps no cache",
        (_LINEAR, _NARROW),
        *[(_heads(3), _NARROW)] * 2,
    ),
    _case("no_op_first", "the first layer has no attention and no norm for it", (_NONE, _BROAD), *[(_heads(3), _NARROW)] * 2),
    _case(
        "linear_between",
        "a layer of two linear maps between two attention layers, so that a running count of caches is off",
        (_heads(2), _NARROW),
        (_LINEAR, _LINEAR),
        (_heads(3), _NARROW),
    ),
    _case(
        "mixed_gqa",
        "layers differ in key heads (1, 3, 6, 2) and in MLP width",
        (_heads(6), _NARROW),
        (_heads(2), _BROAD),
        (_heads(1), _NARROW),
        (_heads(3), _BROAD),
    ),
    _case(
        "ffn_no_op",
        "layers without an MLP, without attention, and without either",
        (_heads(3), _NONE),
        (_NONE, _NARROW),
        (_NONE, _NONE),
        (_heads(2), _NARROW),
    ),
]
