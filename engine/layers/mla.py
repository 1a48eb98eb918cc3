"""Multi-head latent attention https://arxiv.org/abs/2405.04434: keys and values of all heads are linear in one small latent.

The cache holds per token the latent c, normalised and scaled, and one rotated rope key that all heads share. Two orders of
the same products: *expanded* computes every head's keys and values from the latents; *absorbed* moves the key matrix to the
queries and the value matrix behind the weighted sum, so that attention runs on the latents themselves. Expanded costs less
where many queries share the expansion (prefill), absorbed where few queries meet many latents (decode).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.layers.activations import softmax
from engine.layers.attention import attention, causal
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.quantised import dense
from engine.layers.rope import RopeConfig, rotate_interleaved, yarn_mscale
from engine.layers.weights import Weights
from engine.state import Span

__all__ = ["MLA", "MLAConfig"]

LATENT_EPS = 1e-6  # of both latent norms, whatever the config says of the others


@dataclass(frozen=True)
class MLAConfig:
    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None  # None: queries are projected from the hidden state directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_bias: bool
    mla_scale_q_lora: bool
    mla_scale_kv_lora: bool
    rope: RopeConfig

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(head dim), with YaRN's temperature squared: once for the queries, once for the keys."""
        return self.qk_head_dim**-0.5 * yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Names below the attention's own -> shapes."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.q_lora_rank is None:
            shapes["q_proj.weight"] = (heads * self.qk_head_dim, hidden)
        else:
            shapes["q_a_proj.weight"] = (self.q_lora_rank, hidden)
            shapes["q_a_layernorm.weight"] = (self.q_lora_rank,)
            shapes["q_b_proj.weight"] = (heads * self.qk_head_dim, self.q_lora_rank)
        shapes["kv_a_proj_with_mqa.weight"] = (self.kv_lora_rank + self.qk_rope_head_dim, hidden)
        shapes["kv_a_layernorm.weight"] = (self.kv_lora_rank,)
        shapes["kv_b_proj.weight"] = (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        shapes["o_proj.weight"] = (hidden, heads * self.v_head_dim)
        if self.attention_bias:
            for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
                if f"{name}.weight" in shapes:
                    shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
        return shapes


class MLA:
    """Its slot is a KVState of one head: keys are the latents [1, 1, length, kv_lora_rank], values the rope keys
    [1, 1, length, qk_rope_head_dim].
    """

    def __init__(self, config: MLAConfig, weights: Weights, slot: int) -> None:
        c, bias = config, config.attention_bias
        self.config = config
        self.slot = slot
        self.scale = config.softmax_scale
        self.q_scale = 1.0
        if c.q_lora_rank is None:
            self.q_proj = Linear(weights.at("q_proj"), bias=False)
        else:
            self.q_a_proj = Linear(weights.at("q_a_proj"), bias)
            self.q_a_layernorm = RMSNorm(weights.at("q_a_layernorm"), LATENT_EPS)
            self.q_b_proj = Linear(weights.at("q_b_proj"), bias=False)
            if c.mla_scale_q_lora:
                self.q_scale = math.sqrt(c.hidden_size / c.q_lora_rank)
        self.kv_a_proj_with_mqa = Linear(weights.at("kv_a_proj_with_mqa"), bias)
        self.kv_a_layernorm = RMSNorm(weights.at("kv_a_layernorm"), LATENT_EPS)
        self.latent_scale = math.sqrt(c.hidden_size / c.kv_lora_rank) if c.mla_scale_kv_lora else 1.0
        self.kv_b_proj = Linear(weights.at("kv_b_proj"), bias=False)
        per_head = dense(self.kv_b_proj.weight).reshape(c.num_attention_heads, -1, c.kv_lora_rank)
        self.k_b = per_head[:, : c.qk_nope_head_dim]  # [heads, nope, kv_lora]
        self.v_b = per_head[:, c.qk_nope_head_dim :]  # [heads, v, kv_lora]
        self.o_proj = Linear(weights.at("o_proj"), bias)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, spans: Sequence[Span]) -> mx.array:
        """x [T, hidden]; cos and sin of the interleaved rope. Appends to each span's slot. Returns [T, hidden]."""
        q_nope, q_rope = self.queries(x, cos, sin)
        latents, rope_keys = self.latents(x, cos, sin)
        outs = []
        for span in spans:
            rows = slice(span.start, span.stop)
            c, k_rope = span.slots[self.slot].append(latents[None, None, rows], rope_keys[None, None, rows], span.padding)
            attend = self.absorbed if self.absorbs(span.length, c.shape[2]) else self.expanded
            outs.append(attend(q_nope[:, rows], q_rope[:, rows], c.squeeze((0, 1)), k_rope.squeeze((0, 1))))
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)  # [heads, T, v]
        return self.o_proj(out.swapaxes(0, 1).reshape(x.shape[0], -1))

    def queries(self, x: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
        """Scaled queries [heads, T, nope] and, rotated, [heads, T, rope]."""
        nope = self.config.qk_nope_head_dim
        q = self.q_proj(x) if self.config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = (q * self.q_scale).reshape(x.shape[0], -1, self.config.qk_head_dim)  # [T, heads, nope + rope]
        q_nope, q_rope = q[..., :nope], rotate_interleaved(q[..., nope:], cos, sin)
        return q_nope.swapaxes(0, 1), q_rope.swapaxes(0, 1)

    def latents(self, x: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
        """What is cached of each token: the scaled latent [T, kv_lora] and the rotated, unscaled rope key [T, rope]."""
        rank = self.config.kv_lora_rank
        both = self.kv_a_proj_with_mqa(x)
        c = self.kv_a_layernorm(both[:, :rank]) * self.latent_scale
        return c, rotate_interleaved(both[:, None, rank:], cos, sin).squeeze(1)

    def absorbs(self, n: int, length: int) -> bool:
        """Whether n queries on `length` latents take fewer multiplications absorbed than expanded (per head)."""
        c = self.config
        through_kv_b = c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
        expanded = length * through_kv_b + n * length * (c.qk_head_dim + c.v_head_dim)
        absorbed = n * through_kv_b + n * length * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
        return absorbed <= expanded

    def expanded(self, q_nope: mx.array, q_rope: mx.array, c: mx.array, k_rope: mx.array) -> mx.array:
        """q [heads, n, nope] and [heads, n, rope] on c [length, kv_lora] and k_rope [length, rope] -> [heads, n, v]."""
        heads, nope = self.config.num_attention_heads, self.config.qk_nope_head_dim
        kv = self.kv_b_proj(c).reshape(c.shape[0], heads, -1).swapaxes(0, 1)  # [heads, length, nope + v]
        k = mx.concatenate([kv[..., :nope], mx.broadcast_to(k_rope, (heads, *k_rope.shape))], axis=-1)
        q = mx.concatenate([q_nope, q_rope], axis=-1)
        return attention(q[None], k[None], kv[None, ..., nope:], self.scale).squeeze(0)

    def absorbed(self, q_nope: mx.array, q_rope: mx.array, c: mx.array, k_rope: mx.array) -> mx.array:
        """The same; q_nope (k_b c) = (q_nope k_b) c, and v_b (weights c) = weights (v_b c)."""
        heads, n, _ = q_nope.shape
        q_latent = (q_nope @ self.k_b).reshape(heads * n, -1)  # all heads share c and k_rope: one product for all
        scores = (q_latent @ c.T).astype(mx.float32) + (q_rope.reshape(heads * n, -1) @ k_rope.T).astype(mx.float32)
        scores = scores.reshape(heads, n, -1) * self.scale
        if n > 1:
            scores = scores + causal(n, c.shape[0])
        weights = softmax(scores).astype(c.dtype)
        out = (weights.reshape(heads * n, -1) @ c).reshape(heads, n, -1)  # [heads, n, kv_lora]
        return out @ self.v_b.swapaxes(-1, -2)
