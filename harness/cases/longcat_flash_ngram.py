"""Cases of LongCat-Flash with n-gram embeddings: the trunk of the LongCat-Flash cases under each shape of the embedding.

Word and n-gram parts of the embedding have the same size, so that a wrong context moves the input by about as much as a wrong
token would. EOS is planted where a case is about it, at the same positions in every sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from harness.cases import longcat_flash, routing
from harness.cases.case import Case
from harness.cases.routing import exact

__all__ = ["CASES", "adjust"]

_EOS = 2

_BASE: dict[str, Any] = {
    "architectures": ["LongcatFlashNgramForCausalLM"],
    "model_type": "longcat_flash_ngram",
    "attention_bias": False,
    "attention_method": "MLA",
    "bos_token_id": 1,
    "emb_neighbor_num": 4,
    "emb_split_num": 2,
    "eos_token_id": _EOS,
    "expert_ffn_hidden_size": 20,
    "ffn_hidden_size": 64,
    "hidden_size": 48,
    "kv_lora_rank": 12,
    "max_position_embeddings": 1024,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_topk": 3,
    "n_routed_experts": 5,
    "ngram_vocab_size_ratio": 3,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_layers": 2,
    "pad_token_id": 3,
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


def _case(
    name: str,
    stresses: str,
    *,
    prompt: int = 48,
    eos: tuple[int, ...] = (),
    dtypes: tuple[str, ...] = ("float32",),  # rounding: as for longcat_flash
    **fields: Any,
) -> Case:
    return Case(
        "longcat_flash_ngram",
        name,
        stresses,
        _BASE | fields,
        prompt,
        layouts=("dense", "model_owned"),
        dtypes=dtypes,
        planted=dict.fromkeys(eos, _EOS),
    )


CASES = [
    _case("n2_k1", "one table, of pairs", emb_neighbor_num=2, emb_split_num=1, num_layers=1),
    _case("n3_k2", "two tables each of pairs and triples", emb_neighbor_num=3, num_layers=1),
    _case("n4_k1", "one table each of pairs, triples and quadruples", emb_split_num=1, num_layers=1),
    _case("n4_k2", "two tables each of pairs, triples and quadruples", dtypes=longcat_flash.ROUNDED),
    _case("eos_in_prompt", "EOS alone, twice in a row, and with one token between", eos=(9, 20, 21, 34, 36), num_layers=1),
    _case(
        "eos_at_chunk_edge",
        "EOS first and last in chunks of 3, 7 and 16, the last token of the prompt too",
        emb_split_num=1,
        eos=(6, 15, 21, 32, 47),
        num_layers=1,
    ),
    _case(
        "one_token_prompt", "a prompt shorter than the token tail", prompt=1, emb_neighbor_num=3, emb_split_num=1, num_layers=1
    ),
    _case("two_token_prompt", "a prompt shorter than the token tail", prompt=2, num_layers=1),
    _case(
        "wide_hash",
        "vocabulary and tables so large that 32 bits hold neither four in ten quadruples' products nor three in four's sums",
        prompt=36,
        emb_split_num=1,
        hidden_size=24,
        ffn_hidden_size=32,
        ngram_vocab_size_ratio=12,
        num_layers=1,
        vocab_size=16104,
    ),
]


def _loud_tables(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with an embedding whose word part and n-gram part have the same size after the division by 1 + tables."""
    tables = config["emb_split_num"] * (config["emb_neighbor_num"] - 1)
    loud = dict(tensors)
    for name, tensor in tensors.items():
        if name == "model.embed_tokens.weight":
            loud[name] = exact(tensor * (1 + tables))
        elif ".ngram_embeddings." in name:  # initially rows and columns of unit length: both get entries of unit size
            gain = 0.7 * (1 + tables) / math.sqrt(tables) if ".post_projs." in name else math.sqrt(tensor.shape[1])
            loud[name] = exact(tensor * gain)
    return loud


def adjust(case: Case, seed: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The drawn parameters with quiet latents, with loud n-gram tables and with routers of wide margins."""
    loud = _loud_tables(case.config, longcat_flash.quiet_latents(case.config, tensors))
    return routing.reroute(case, seed, loud, longcat_flash.routers(case.config))
