"""Llama: pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU MLP.

https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2307.09288, https://arxiv.org/abs/2407.21783; fields and weight names
as in Hugging Face checkpoints of model_type `llama`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.errors import Refused
from engine.fields import Fields
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.layers.quantised import Weight
from engine.layers.rope import Rope, RopeConfig
from engine.layers.rotary_attention import Attention
from engine.layers.weights import Weights
from engine.models.layouts import BothLayouts
from engine.state import KVState, Span, State
from engine.state.span import positions

__all__ = ["Config", "Model", "duplicates", "ignored", "parameters"]


@dataclass(frozen=True)
class Config:
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: RopeConfig

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        """Read config.json. Raises ConfigError, which names field and value, or Refused for what is not supported."""
        fields = Fields(raw)
        hidden_size = fields.integer("hidden_size", 1, 1 << 17)
        heads = fields.integer("num_attention_heads", 1, 1 << 12)
        kv_heads = fields.integer("num_key_value_heads", 1, 1 << 12, heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"must divide num_attention_heads {heads}")
        head_dim = fields.head_dim(hidden_size, heads)
        layers = fields.integer("num_hidden_layers", 1, 1 << 12)
        fields.choice("hidden_act", ("silu",), "silu")
        _refuse_sliding(fields)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 1, 1 << 20),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size", 1, 1 << 24),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            rope=RopeConfig.from_dict(raw),
        )


def _refuse_sliding(fields: Fields) -> None:
    kinds = fields.raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise Refused(f"config field layer_types = {str(kinds)[:80]} is not supported (supported: all full_attention)")
    if fields.has("sliding_window") and fields.raw.get("use_sliding_window") is not False:
        raise Refused(f"config field sliding_window = {fields.raw['sliding_window']!r:.80} is not supported (supported: null)")


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint with its shape; a checkpoint has exactly these."""
    c = config
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (c.hidden_size,)
        linear(f"{layer}.self_attn.q_proj", q_size, c.hidden_size, c.attention_bias)
        linear(f"{layer}.self_attn.k_proj", kv_size, c.hidden_size, c.attention_bias)
        linear(f"{layer}.self_attn.v_proj", kv_size, c.hidden_size, c.attention_bias)
        linear(f"{layer}.self_attn.o_proj", c.hidden_size, q_size, c.attention_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (c.hidden_size,)
        linear(f"{layer}.mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
        linear(f"{layer}.mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
        linear(f"{layer}.mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def duplicates(config: Config) -> dict[str, str]:
    """Names under which a file may hold a copy of a parameter: some published tied checkpoints repeat the embedding."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq\Z")


def ignored(config: Config, name: str) -> bool:
    """Tensors of published files that are no parameters: rotary tables, which follow from the config."""
    return _ROTARY_TABLE.match(name) is not None


class Block:
    def __init__(self, config: Config, weights: Weights, slot: int) -> None:
        self.input_layernorm = RMSNorm(weights.at("input_layernorm"), config.rms_norm_eps)
        self.self_attn = Attention(weights.at("self_attn"), config.head_dim, config.attention_bias, slot)
        self.post_attention_layernorm = RMSNorm(weights.at("post_attention_layernorm"), config.rms_norm_eps)
        self.mlp = MLP(weights.at("mlp"), config.mlp_bias)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, spans: Sequence[Span]) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, spans)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(BothLayouts):
    """Slots: one KV state per block."""

    def __init__(self, config: Config, weights: Mapping[str, Weight]) -> None:
        root = Weights(weights)
        self.config = config
        self.vocab_size = config.vocab_size
        self.embed_tokens = Embedding(root.at("model.embed_tokens"))
        self.layers = [Block(config, root.at(f"model.layers.{i}"), slot=i) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(root.at("model.norm"), config.rms_norm_eps)
        self.lm_head = self.embed_tokens.as_head if config.tie_word_embeddings else Linear(root.at("lm_head"))
        self.rope = Rope(config.rope, config.head_dim)

    def make_slots(self) -> list[State]:
        return [KVState() for _ in self.layers]

    def forward(self, tokens: mx.array, spans: Sequence[Span], rows: Sequence[int] | None) -> mx.array:
        """tokens: int32 [T]. Returns logits [len(rows), vocab] of these indices into T, or [T, vocab] for None."""
        spans = self.own(spans)
        cos, sin = self.rope.tables(positions(spans))
        x = self.embed_tokens(tokens)  # [T, hidden]
        for layer in self.layers:
            x = layer(x, cos, sin, spans)
        if rows is not None:
            x = x[mx.array(list(rows), dtype=mx.int32)]
        return self.lm_head(self.norm(x))
