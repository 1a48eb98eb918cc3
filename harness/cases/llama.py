"""Cases of the llama family.

Thetas are small, so that the few frequencies of a small head all turn within the prompt and a position that is off by one
moves the scores; original lengths of scaled ropes are small, so that prompts pass them and all bands occur. The norms' eps is
large, so that another one, or none, moves the logits also where the residual is large.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.cases.case import Case

__all__ = ["CASES"]

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-2,
    "rope_theta": 10.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

_ALSO_FLOAT16 = frozenset({"gqa"})  # a third dtype; on all cases it would show no more
_ALSO_MODEL_OWNED = frozenset({"gqa", "long"})  # llama needs no layout of its own; it shows that any family may have one


def _case(
    name: str, stresses: str, prompt: int = 48, without: tuple[str, ...] = (), file_dtype: str = "float32", **fields: Any
) -> Case:
    config = {key: value for key, value in (_BASE | fields).items() if key not in without}
    dtypes = ("float32", "bfloat16", "float16") if name in _ALSO_FLOAT16 else ("float32", "bfloat16")
    layouts = ("dense", "model_owned") if name in _ALSO_MODEL_OWNED else ("dense",)
    return Case("llama", name, stresses, config, prompt, layouts, dtypes, file_dtype=file_dtype)


def _config_case(name: str, stresses: str, without: tuple[str, ...] = (), **fields: Any) -> Case:
    """A case of how a config is read, which dtype and layout have no part in: one of each is enough."""
    return replace(_case(name, stresses, without=without, **fields), dtypes=("float32",), layouts=("dense",))


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0, "original_max_position_embeddings": 32}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}

CASES = [
    _case("gqa", "groups of query heads share a key/value head"),
    _case(
        "mha",
        "as many key/value heads as query heads, the field is left out; the file is in float16",
        file_dtype="float16",
        without=("num_key_value_heads",),
    ),
    _case("mqa", "one key/value head; biases on the MLP alone", num_key_value_heads=1, mlp_bias=True),
    _case("biased", "biases on all attention and MLP projections", attention_bias=True, mlp_bias=True),
    _case("tied", "the embedding is the head; the file is in bfloat16", file_dtype="bfloat16", tie_word_embeddings=True),
    _case(
        "head_dim",
        "head_dim is given and heads * head_dim is not hidden_size; biases on attention alone",
        head_dim=16,
        attention_bias=True,
    ),
    _case("linear_rope", "positions are divided by a factor", rope_scaling={"type": "linear", "factor": 2.0}),
    _case(
        "llama3_rope",
        "three bands of rope frequencies, prompt beyond the original length",
        head_dim=16,
        rope_scaling={"rope_type": "llama3", **_LLAMA3},
    ),
    _case(
        "yarn",
        "rope frequencies ramp over the index, cos and sin are scaled; prompt beyond the original length",
        head_dim=16,
        rope_scaling={"rope_type": "yarn", **_YARN},
    ),
    _case(
        "long",
        "the prompt crosses two steps of cache allocation (256, 512), and from there on one query has 4096 scores, as many as "
        "an engine may compute another way",
        prompt=530,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        head_dim=8,
    ),
    _config_case(
        "old_spelling",
        "rope_theta and rope_scaling beside each other",
        rope_theta=20.0,
        rope_scaling={"rope_type": "llama3", **_LLAMA3},
    ),
    _config_case(
        "new_spelling",
        "the same model as old_spelling with all of it in rope_parameters",
        without=("rope_theta",),
        rope_parameters={"rope_type": "llama3", "rope_theta": 20.0, **_LLAMA3},
    ),
    _config_case(
        "defaults",
        "fields that have a default are left out",
        without=(
            "num_key_value_heads",
            "hidden_act",
            "rms_norm_eps",
            "rope_theta",
            "attention_bias",
            "mlp_bias",
            "tie_word_embeddings",
        ),
    ),
    _config_case(
        "yarn_defaults",
        "yarn whose factor follows from the lengths, with default betas, a ramp that is not rounded and two mscales",
        head_dim=16,
        rope_theta=20.0,
        max_position_embeddings=1024,
        original_max_position_embeddings=512,
        rope_scaling={"rope_type": "yarn", "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.4},
    ),
    _config_case(
        "yarn_given",
        "yarn whose attention_factor is given and whose ramp begins before the first frequency",
        head_dim=16,
        rope_scaling={"rope_type": "yarn", **_YARN, "beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.3},
    ),
]
