"""Tiny LongCat models with random weights, and their logits by numpy in float64 from the equations, without caches."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from engine.models import longcat_flash, longcat_flash_ngram

EOS = 2
RAW: dict[str, Any] = {
    "model_type": "longcat_flash",
    "hidden_size": 24,
    "ffn_hidden_size": 32,
    "expert_ffn_hidden_size": 10,
    "num_layers": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 3,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "vocab_size": 61,
    "rms_norm_eps": 1e-3,
    "rope_theta": 100.0,
    "max_position_embeddings": 4096,
    "eos_token_id": EOS,
}
NGRAM: dict[str, Any] = RAW | {
    "model_type": "longcat_flash_ngram",
    "emb_neighbor_num": 4,
    "emb_split_num": 2,
    "ngram_vocab_size_ratio": 3,
}
FAMILIES: dict[str, ModuleType] = {"longcat_flash": longcat_flash, "longcat_flash_ngram": longcat_flash_ngram}
YARN = {
    "type": "yarn",
    "factor": 10.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def weights(config: Any, family: ModuleType, seed: int = 0) -> dict[str, np.ndarray]:
    """Latent projections are quiet, so that the eps of the latent norms shows; no parameter is trivially zero or one."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, shape in family.parameters(config).items():
        size = 0.02 if "_a_proj" in name else 1.0 if "classifier" in name or "ngram" in name else 0.3
        drawn[name] = (rng.normal(size=shape) * size + ("norm" in name)).astype(np.float32)
    return drawn


def model(raw: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32) -> Any:
    family = FAMILIES[raw["model_type"]]
    config = family.Config.from_dict(raw)
    arrays = {}
    for name, array in weights(config, family, seed).items():
        arrays[name] = mx.array(array) if family.keep_float32(name) else mx.array(array).astype(dtype)
    return family.Model(config, arrays)


def tokens(n: int, seed: int = 0, eos: tuple[int, ...] = ()) -> list[int]:
    """Random ids without EOS, and EOS at these positions."""
    drawn = [int(t) for t in np.random.default_rng(seed).integers(EOS + 1, RAW["vocab_size"], n)]
    return [EOS if i in eos else token for i, token in enumerate(drawn)]


def expected_logits(ids: list[int], raw: dict[str, Any], seed: int = 0) -> np.ndarray:
    """float64 [len(ids), vocab]."""
    family = FAMILIES[raw["model_type"]]
    c = family.Config.from_dict(raw)
    w = {name: array.astype(np.float64) for name, array in weights(c, family, seed).items()}
    x = w["model.embed_tokens.weight"][ids]
    if "emb_neighbor_num" in raw:
        x = expected_embedding(ids, raw, w)
    for i in range(c.num_layers):
        at = f"model.layers.{i}"
        x = x + _attention(_rms(x, w[f"{at}.input_layernorm.0.weight"], c.rms_norm_eps), f"{at}.self_attn.0", raw, w)
        p = _rms(x, w[f"{at}.post_attention_layernorm.0.weight"], c.rms_norm_eps)
        shortcut = expected_experts(p, f"{at}.mlp", raw, w)
        x = x + _mlp(p, f"{at}.mlps.0", w)
        x = x + _attention(_rms(x, w[f"{at}.input_layernorm.1.weight"], c.rms_norm_eps), f"{at}.self_attn.1", raw, w)
        p = _rms(x, w[f"{at}.post_attention_layernorm.1.weight"], c.rms_norm_eps)
        x = x + _mlp(p, f"{at}.mlps.1", w) + shortcut
    head = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
    return _rms(x, w["model.norm.weight"], c.rms_norm_eps) @ w[f"{head}.weight"].T


def expected_row_ids(ids: list[int], position: int, raw: dict[str, Any]) -> list[int]:
    """Rows in the n-gram tables of the token at `position`, in Python's unbounded integers."""
    V, k = raw["vocab_size"], raw["emb_split_num"]
    rows = []
    for g in range(2, raw["emb_neighbor_num"] + 1):
        for j in range(k):
            modulus = int(raw["ngram_vocab_size_ratio"] * V) + 2 * ((g - 2) * k + j) + 1
            total = ids[position]
            for s in range(1, g):
                between = ids[max(0, position - s) : position]
                if position - s >= 0 and raw["eos_token_id"] not in between:
                    total += ids[position - s] * V**s
            rows.append(total % modulus)
    return rows


def expected_embedding(ids: list[int], raw: dict[str, Any], w: dict[str, np.ndarray]) -> np.ndarray:
    out = []
    for position, token in enumerate(ids):
        rows = expected_row_ids(ids, position, raw)
        total = w["model.embed_tokens.weight"][token].copy()
        for t, row in enumerate(rows):
            total += w[f"model.ngram_embeddings.post_projs.{t}.weight"] @ w[f"model.ngram_embeddings.embedders.{t}.weight"][row]
        out.append(total / (1 + len(rows)))
    return np.array(out)


def expected_experts(x: np.ndarray, at: str, raw: dict[str, Any], w: dict[str, np.ndarray]) -> np.ndarray:
    """Token by token, expert by expert."""
    out = np.zeros_like(x)
    for row, token in enumerate(x):
        logits = w[f"{at}.router.classifier.weight"] @ token + w.get(f"{at}.router.classifier.bias", 0.0)
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        chosen = np.argsort(-(scores + w[f"{at}.router.e_score_correction_bias"]))[: raw["moe_topk"]]
        share = scores[chosen] / (scores[chosen].sum() if raw.get("norm_topk_prob") else 1.0)
        for expert, weight in zip(chosen, share * raw["routed_scaling_factor"], strict=True):
            is_zero = expert >= raw["n_routed_experts"]
            out[row] += weight * (token if is_zero else _mlp(token, f"{at}.experts.{expert}", w))
    return out


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _mlp(x: np.ndarray, at: str, w: dict[str, np.ndarray]) -> np.ndarray:
    gate = x @ w[f"{at}.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w[f"{at}.up_proj.weight"].T)) @ w[f"{at}.down_proj.weight"].T


def _inverse_frequencies(raw: dict[str, Any]) -> np.ndarray:
    d, theta, yarn = raw["qk_rope_head_dim"], raw["rope_theta"], raw.get("rope_scaling")
    plain = theta ** (-np.arange(0, d, 2) / d)
    if yarn is None:
        return plain

    def dimension(turns: float) -> float:
        return d * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(yarn["beta_fast"])), 0), min(math.ceil(dimension(yarn["beta_slow"])), d - 1)
    slow = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
    return slow * plain / yarn["factor"] + (1 - slow) * plain


def _attention(x: np.ndarray, at: str, raw: dict[str, Any], w: dict[str, np.ndarray]) -> np.ndarray:
    T, heads, hidden = len(x), raw["num_attention_heads"], raw["hidden_size"]
    nope, rope, v_dim = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    turn = np.exp(1j * np.outer(np.arange(T), _inverse_frequencies(raw)))  # pairs (2i, 2i + 1) are complex numbers

    def linear(y: np.ndarray, name: str) -> np.ndarray:
        return y @ w[f"{at}.{name}.weight"].T + w.get(f"{at}.{name}.bias", 0.0)

    def rotated(y: np.ndarray) -> np.ndarray:
        z = (y[..., 0::2] + 1j * y[..., 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(y.shape)

    if raw["q_lora_rank"] is None:
        q = linear(x, "q_proj")
    else:
        q = linear(_rms(linear(x, "q_a_proj"), w[f"{at}.q_a_layernorm.weight"], 1e-6), "q_b_proj")
        q = q * (math.sqrt(hidden / raw["q_lora_rank"]) if raw["mla_scale_q_lora"] else 1.0)
    q = q.reshape(T, heads, nope + rope).transpose(1, 0, 2)
    both = linear(x, "kv_a_proj_with_mqa")
    c = _rms(both[:, : raw["kv_lora_rank"]], w[f"{at}.kv_a_layernorm.weight"], 1e-6)
    c = c * (math.sqrt(hidden / raw["kv_lora_rank"]) if raw["mla_scale_kv_lora"] else 1.0)
    kv = linear(c, "kv_b_proj").reshape(T, heads, nope + v_dim).transpose(1, 0, 2)
    scores = q[..., :nope] @ kv[..., :nope].transpose(0, 2, 1)
    scores = scores + rotated(q[..., nope:]) @ rotated(both[:, raw["kv_lora_rank"] :]).T
    scores = scores / math.sqrt(nope + rope)
    if "rope_scaling" in raw:
        scores = scores * (0.1 * raw["rope_scaling"]["mscale_all_dim"] * math.log(raw["rope_scaling"]["factor"]) + 1) ** 2
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = (p / p.sum(-1, keepdims=True)) @ kv[..., nope:]
    return linear(out.transpose(1, 0, 2).reshape(T, -1), "o_proj")
