"""Tiny Nemotron-H models with random weights, and their logits by numpy in float64 from the equations, token by token."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from engine.models import nemotron_h

RAW: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 24,
    "hybrid_override_pattern": "MEM*-M",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "ssm_state_size": 7,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "moe_shared_expert_intermediate_size": 14,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-3,
    "vocab_size": 61,
    "eos_token_id": 2,
}
MTP_ATTENTION_MOE = (  # what files have beside a head's mixers
    *(f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "mixer.q_proj")),
    "mtp.layers.1.mixer.gate.weight",
    "mtp.layers.1.final_layernorm.weight",
)


def config(raw: dict[str, Any], optional: tuple[str, ...] = ()) -> nemotron_h.Config:
    """optional: names that only files say."""
    return nemotron_h.complete(nemotron_h.Config.from_dict(raw), {name: () for name in optional})


def weights(config: nemotron_h.Config, seed: int = 0) -> dict[str, np.ndarray]:
    """No parameter is trivially zero or one; steps sizes and decays from slow to fast, correction biases from -2 to 0.5."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, shape in nemotron_h.parameters(config).items():
        array = rng.normal(size=shape) * 0.3
        if name.endswith("norm.weight") or "norm" in name.split(".")[-2]:
            array += 1.0
        elif name.endswith("e_score_correction_bias"):
            array = rng.uniform(-2.0, 0.5, shape)
        elif name.endswith((".dt_bias", ".A_log")):
            array = rng.normal(size=shape)
        elif name.endswith((".gate.weight", "conv1d.weight")):
            array *= 2.0
        drawn[name] = array.astype(np.float32)
    return drawn


def model(raw: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32, optional: tuple[str, ...] = ()) -> nemotron_h.Model:
    c = config(raw, optional)
    arrays = {}
    for name, array in weights(c, seed).items():
        arrays[name] = mx.array(array) if nemotron_h.keep_float32(name) else mx.array(array).astype(dtype)
    return nemotron_h.Model(c, arrays)


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, RAW["vocab_size"], n)]


def expected_logits(ids: list[int], raw: dict[str, Any], seed: int = 0, optional: tuple[str, ...] = ()) -> np.ndarray:
    """float64 [len(ids), vocab]."""
    c = config(raw, optional)
    w = {name: array.astype(np.float64) for name, array in weights(c, seed).items()}
    head = w.get("lm_head.weight", w["backbone.embeddings.weight"])
    return expected_hidden(ids, c, w) @ head.T


def expected_hidden(ids: list[int], c: nemotron_h.Config, w: dict[str, np.ndarray]) -> np.ndarray:
    x = w["backbone.embeddings.weight"][ids]
    for i, kind in enumerate(c.pattern):
        x = x + expected_mixer(rms(x, w[f"backbone.layers.{i}.norm.weight"], c), kind, f"backbone.layers.{i}.mixer", c, w)
    return rms(x, w["backbone.norm_f.weight"], c)


def expected_mtp(hidden: np.ndarray, ids: list[int], c: nemotron_h.Config, w: dict[str, np.ndarray]) -> np.ndarray:
    """Hidden states of the head of MTP_ATTENTION_MOE after each of the ids."""
    embedded = w["backbone.embeddings.weight"][ids]
    both = [rms(embedded, w["mtp.layers.0.enorm.weight"], c), rms(hidden, w["mtp.layers.0.hnorm.weight"], c)]
    x = np.concatenate(both, axis=-1) @ w["mtp.layers.0.eh_proj.weight"].T
    for i, kind in enumerate("*E"):
        x = x + expected_mixer(rms(x, w[f"mtp.layers.{i}.norm.weight"], c), kind, f"mtp.layers.{i}.mixer", c, w)
    return rms(x, w["mtp.layers.1.final_layernorm.weight"], c)


def expected_mixer(x: np.ndarray, kind: str, at: str, c: nemotron_h.Config, w: dict[str, np.ndarray]) -> np.ndarray:
    if kind == "M":
        return _mamba(x, at, c, w)
    if kind == "*":
        return _attention(x, at, c, w)
    return _mlp(x, at, w) if kind == "-" else np.array([_experts(token, at, c, w) for token in x])


def rms(x: np.ndarray, weight: np.ndarray | float, c: nemotron_h.Config) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.layer_norm_epsilon) * weight


def _linear(x: np.ndarray, name: str, w: dict[str, np.ndarray]) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _mamba(x: np.ndarray, at: str, c: nemotron_h.Config, w: dict[str, np.ndarray]) -> np.ndarray:
    m = c.mamba
    H, P, G, N, K = m.mamba_num_heads, m.mamba_head_dim, m.n_groups, m.ssm_state_size, m.conv_kernel
    projected = _linear(x, f"{at}.in_proj", w)
    z, rows, raw_dt = projected[:, : H * P], projected[:, H * P : -H], projected[:, -H:]
    past = np.concatenate([np.zeros((K - 1, rows.shape[1])), rows])
    kernel = w[f"{at}.conv1d.weight"].reshape(rows.shape[1], K)
    h, out = np.zeros((H, P, N)), []
    for t in range(len(x)):
        mixed = (past[t : t + K] * kernel.T).sum(0) + w.get(f"{at}.conv1d.bias", 0.0)
        mixed = mixed * _sigmoid(mixed)
        dt = np.clip(np.log1p(np.exp(raw_dt[t] + w[f"{at}.dt_bias"])), *m.time_step_limit)
        y = np.zeros((H, P))
        for head in range(H):
            group = head // (H // G)
            value = mixed[head * P : (head + 1) * P]
            b = mixed[H * P + group * N : H * P + (group + 1) * N]
            read = mixed[H * P + (G + group) * N : H * P + (G + group + 1) * N]
            h[head] = np.exp(-dt[head] * np.exp(w[f"{at}.A_log"][head])) * h[head] + dt[head] * np.outer(value, b)
            y[head] = h[head] @ read + w[f"{at}.D"][head] * value
        out.append(y.reshape(-1))
    gated = np.array(out) * z * _sigmoid(z)
    normed = rms(gated.reshape(len(x), G, -1), 1.0, c).reshape(len(x), -1) * w[f"{at}.norm.weight"]
    return _linear(normed, f"{at}.out_proj", w)


def _attention(x: np.ndarray, at: str, c: nemotron_h.Config, w: dict[str, np.ndarray]) -> np.ndarray:
    T, d, share = len(x), c.head_dim, c.num_attention_heads // c.num_key_value_heads
    q, k, v = (_linear(x, f"{at}.{n}_proj", w).reshape(T, -1, d).transpose(1, 0, 2) for n in "qkv")
    scores = np.where(np.tri(T, dtype=bool), q @ np.repeat(k, share, 0).transpose(0, 2, 1) / np.sqrt(d), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = (p / p.sum(-1, keepdims=True)) @ np.repeat(v, share, 0)
    return _linear(out.transpose(1, 0, 2).reshape(T, -1), f"{at}.o_proj", w)


def _mlp(x: np.ndarray, at: str, w: dict[str, np.ndarray]) -> np.ndarray:
    return _linear(np.maximum(_linear(x, f"{at}.up_proj", w), 0) ** 2, f"{at}.down_proj", w)


def _experts(x: np.ndarray, at: str, c: nemotron_h.Config, w: dict[str, np.ndarray]) -> np.ndarray:
    moe = c.moe
    assert moe is not None
    scores = _sigmoid(w[f"{at}.gate.weight"] @ x)
    choice = (scores + w[f"{at}.gate.e_score_correction_bias"]).reshape(moe.n_group, -1)
    best = np.argsort(-np.sort(choice, axis=1)[:, -2:].sum(1))[: moe.topk_group]
    allowed = [g * choice.shape[1] + e for g in best for e in range(choice.shape[1])]
    chosen = sorted(allowed, key=lambda expert: -choice.reshape(-1)[expert])[: moe.num_experts_per_tok]
    share = scores[chosen] / (scores[chosen].sum() if moe.norm_topk_prob else 1.0) * moe.routed_scaling_factor
    narrow = x if moe.moe_latent_size is None else _linear(x, f"{at}.fc1_latent_proj", w)
    out = sum(s * _expert(narrow, expert, at, w) for s, expert in zip(share, chosen, strict=True))
    if moe.moe_latent_size is not None:
        out = _linear(out, f"{at}.fc2_latent_proj", w)
    has_shared = f"{at}.shared_experts.up_proj.weight" in w
    return out + (_mlp(x, f"{at}.shared_experts", w) if has_shared else 0.0)


def _expert(x: np.ndarray, expert: int, at: str, w: dict[str, np.ndarray]) -> np.ndarray:
    if f"{at}.experts.up_proj.weight" in w:
        up, down = w[f"{at}.experts.up_proj.weight"][expert], w[f"{at}.experts.down_proj.weight"][expert]
    else:
        up, down = w[f"{at}.experts.{expert}.up_proj.weight"], w[f"{at}.experts.{expert}.down_proj.weight"]
    return down @ np.maximum(up @ x, 0) ** 2
