"""A tiny llama with random weights, and its logits computed by numpy in float64, without caches, from the equations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from engine.models import llama

RAW: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}


def weights(config: llama.Config, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = llama.parameters(config)
    return {name: (rng.normal(size=shape) * 0.3 + ("norm" in name)).astype(np.float32) for name, shape in shapes.items()}


def model(seed: int = 0, dtype: mx.Dtype = mx.float32, **changes: Any) -> llama.Model:
    config = llama.Config.from_dict(RAW | changes)
    return llama.Model(config, {name: mx.array(w).astype(dtype) for name, w in weights(config, seed).items()})


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, RAW["vocab_size"], n)]


def expected_logits(ids: list[int], seed: int = 0, inv_freq: np.ndarray | None = None, **changes: Any) -> np.ndarray:
    """float64 [len(ids), vocab]. inv_freq: rotary frequencies where they are not the default ones."""
    c = llama.Config.from_dict(RAW | changes)
    w = {name: array.astype(np.float64) for name, array in weights(c, seed).items()}
    T, d = len(ids), c.head_dim

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rms(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * w[f"{name}.weight"]

    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(T, -1, d).transpose(1, 0, 2)

    if inv_freq is None:
        inv_freq = RAW["rope_theta"] ** (-np.arange(0, d, 2) / d)
    turn = np.exp(1j * np.outer(np.arange(T), inv_freq))  # a pair is a complex number, a rotation multiplies it

    def rotated(x: np.ndarray) -> np.ndarray:
        z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}"
        h = rms(x, f"{at}.input_layernorm")
        q, k, v = (heads(linear(h, f"{at}.self_attn.{n}_proj")) for n in "qkv")
        q, k = rotated(q), rotated(k)
        k, v = (np.repeat(a, c.num_attention_heads // c.num_key_value_heads, axis=0) for a in (k, v))
        scores = np.where(np.tri(T, dtype=bool), q @ k.transpose(0, 2, 1) / np.sqrt(d), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = (p / p.sum(-1, keepdims=True)) @ v
        x = x + linear(out.transpose(1, 0, 2).reshape(T, -1), f"{at}.self_attn.o_proj")
        h = rms(x, f"{at}.post_attention_layernorm")
        gate = linear(h, f"{at}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    head = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
    return rms(x, "model.norm") @ w[f"{head}.weight"].T
