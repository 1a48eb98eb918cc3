"""Nemotron-NAS: a Llama whose layers were chosen one by one by architecture search (Puzzle, https://arxiv.org/abs/2411.19146).

Each layer's attention and feed-forward is its own: of its own width, replaced by one linear map, or left out with its norm.
Fields and weight names as in the published checkpoints of model_type `nemotron-nas` (architecture DeciLMForCausalLM).
"""

from __future__ import annotations

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
from engine.models.llama import duplicates, ignored
from engine.state import KVState, Span, State
from engine.state.span import positions

__all__ = ["AttentionConfig", "Config", "FFNConfig", "Model", "duplicates", "ignored", "parameters"]

# What a block's field may be besides null. Sparse, windowed and sink attention are in the format, and in no published block.
_OFF: dict[str, dict[str, tuple[bool, ...]]] = {
    "attention": {
        "sparsify": (),
        "window_length": (),
        "num_sink_tokens": (),
        "unshifted_sink": (False,),
        "use_prefill_window_in_sink_attention": (False,),
    },
    "ffn": {"sparsify": ()},
}
_MOST_HEADS = 1 << 12


@dataclass(frozen=True)
class AttentionConfig:
    """n_heads_in_group: query heads per key/value head; None where the layer has no attention."""

    n_heads_in_group: int | None = None
    no_op: bool = False
    replace_with_linear: bool = False

    @property
    def is_attention(self) -> bool:
        return not (self.no_op or self.replace_with_linear)


@dataclass(frozen=True)
class FFNConfig:
    """intermediate_size: what ffn_mult comes to; None where the layer has no MLP."""

    intermediate_size: int | None = None
    no_op: bool = False
    replace_with_linear: bool = False


@dataclass(frozen=True)
class Config:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: RopeConfig
    block_configs: tuple[tuple[AttentionConfig, FFNConfig], ...]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        """Read config.json. Raises ConfigError, which names field and value, or Refused for what is not supported."""
        fields = Fields(raw)
        hidden_size = fields.integer("hidden_size", 1, 1 << 17)
        heads = fields.integer("num_attention_heads", 1, _MOST_HEADS)
        head_dim = fields.head_dim(hidden_size, heads)
        for name in ("intermediate_size", "num_key_value_heads"):
            if fields.has(name):
                raise fields.error(name, "must be null, each of block_configs has its own")
        fields.choice("hidden_act", ("silu",), "silu")
        layers = fields.integer("num_hidden_layers", 1, 1 << 12)
        return cls(
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size", 1, 1 << 24),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            rope=RopeConfig.from_dict(raw),
            block_configs=_blocks(fields, layers, heads, hidden_size),
        )


def _blocks(fields: Fields, layers: int, heads: int, hidden_size: int) -> tuple[tuple[AttentionConfig, FFNConfig], ...]:
    found = fields.raw.get("block_configs")
    if not isinstance(found, list) or len(found) != layers:
        got = f"{len(found)} entries" if isinstance(found, list) else f"{type(found).__name__}"
        raise fields.error("block_configs", f"must be a list of num_hidden_layers = {layers} objects, here {got}")
    blocks = []
    for i, entry in enumerate(found):
        if not isinstance(entry, Mapping):
            raise fields.error("block_configs", f"must hold an object for each layer, entry {i} is {type(entry).__name__}")
        block = Fields(entry, f"block_configs[{i}].")
        _refuse_others(block, ("attention", "ffn"), {})
        blocks.append((_attention(block.section("attention"), heads), _ffn(block.section("ffn"), hidden_size)))
    return tuple(blocks)


def _attention(fields: Fields, heads: int) -> AttentionConfig:
    _refuse_others(fields, ("n_heads_in_group", "no_op", "replace_with_linear"), _OFF["attention"])
    no_op, linear = _kind(fields)
    group = fields.integer("n_heads_in_group", 1, _MOST_HEADS, None)
    if no_op or linear:
        return AttentionConfig(None, no_op, linear)
    if group is None or heads % group:
        raise fields.error("n_heads_in_group", f"must divide num_attention_heads {heads}")
    return AttentionConfig(group)


def _ffn(fields: Fields, hidden_size: int) -> FFNConfig:
    _refuse_others(fields, ("ffn_mult", "no_op", "replace_with_linear"), _OFF["ffn"])
    no_op, linear = _kind(fields)
    mult = fields.number("ffn_mult", 1e-6, 1e3, None)
    if no_op or linear:
        return FFNConfig(None, no_op, linear)
    width = 0 if mult is None else intermediate_size(mult, hidden_size)
    if width == 0:
        raise fields.error("ffn_mult", f"must give an MLP at least one unit at hidden_size {hidden_size}")
    return FFNConfig(width)


def _kind(fields: Fields) -> tuple[bool, bool]:
    no_op, linear = fields.flag("no_op", False), fields.flag("replace_with_linear", False)
    if no_op and linear:
        raise fields.error("no_op", "and replace_with_linear must not both be true")
    return no_op, linear


def _refuse_others(fields: Fields, known: Sequence[str], off: Mapping[str, Sequence[bool]]) -> None:
    """Raise Refused for a field that is not `known`, unless it is null or one of the values that switch it off."""
    for name, value in fields.raw.items():
        if name in known or value is None or any(value is allowed for allowed in off.get(name, ())):
            continue
        supported = "/".join(["null", *(str(allowed).lower() for allowed in off[name])]) if name in off else "no such field"
        raise Refused(f"config field {fields.prefix}{str(name)[:80]} = {value!r:.80} is not supported (supported: {supported})")


def intermediate_size(ffn_mult: float, hidden_size: int) -> int:
    """Two thirds of ffn_mult * hidden_size, truncated, then up to a multiple of 256."""
    return -(-int(2 * ffn_mult * hidden_size / 3) // 256) * 256


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint with its shape; a checkpoint has exactly these. A no_op has no norm either."""
    c, hidden = config, config.hidden_size
    q_size = c.num_attention_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, hidden)}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    for i, (attention, ffn) in enumerate(c.block_configs):
        layer = f"model.layers.{i}"
        if not attention.no_op:
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        if attention.replace_with_linear:
            linear(f"{layer}.self_attn.linear_attn", hidden, hidden, False)
        if attention.n_heads_in_group is not None:
            kv_size = q_size // attention.n_heads_in_group
            linear(f"{layer}.self_attn.q_proj", q_size, hidden, c.attention_bias)
            linear(f"{layer}.self_attn.k_proj", kv_size, hidden, c.attention_bias)
            linear(f"{layer}.self_attn.v_proj", kv_size, hidden, c.attention_bias)
            linear(f"{layer}.self_attn.o_proj", hidden, q_size, c.attention_bias)
        if not ffn.no_op:
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if ffn.replace_with_linear:
            linear(f"{layer}.mlp.linear_mlp", hidden, hidden, False)
        if ffn.intermediate_size is not None:
            linear(f"{layer}.mlp.gate_proj", ffn.intermediate_size, hidden, c.mlp_bias)
            linear(f"{layer}.mlp.up_proj", ffn.intermediate_size, hidden, c.mlp_bias)
            linear(f"{layer}.mlp.down_proj", hidden, ffn.intermediate_size, c.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    return shapes


class AttentionBlock:
    """What a layer adds over positions: attention, or one linear map of each token, which keeps no state."""

    def __init__(self, config: Config, attention: AttentionConfig, weights: Weights, slot: int) -> None:
        self.input_layernorm = RMSNorm(weights.at("input_layernorm"), config.rms_norm_eps)
        self.self_attn: Attention | None = None
        if attention.replace_with_linear:
            self.linear_attn = Linear(weights.at("self_attn.linear_attn"), bias=False)
        else:
            self.self_attn = Attention(weights.at("self_attn"), config.head_dim, config.attention_bias, slot)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, spans: Sequence[Span]) -> mx.array:
        normed = self.input_layernorm(x)
        if self.self_attn is None:
            return x + self.linear_attn(normed)
        return x + self.self_attn(normed, cos, sin, spans)


class FFNBlock:
    """What a layer adds to each token: an MLP, or one linear map."""

    def __init__(self, config: Config, ffn: FFNConfig, weights: Weights) -> None:
        self.post_attention_layernorm = RMSNorm(weights.at("post_attention_layernorm"), config.rms_norm_eps)
        self.mlp: Linear | MLP
        if ffn.replace_with_linear:
            self.mlp = Linear(weights.at("mlp.linear_mlp"), bias=False)
        else:
            self.mlp = MLP(weights.at("mlp"), config.mlp_bias)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.mlp(self.post_attention_layernorm(x))


class Block:
    """A no_op half is left out."""

    def __init__(self, config: Config, attention: AttentionConfig, ffn: FFNConfig, weights: Weights, slot: int) -> None:
        self.attention = None if attention.no_op else AttentionBlock(config, attention, weights, slot)
        self.ffn = None if ffn.no_op else FFNBlock(config, ffn, weights)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, spans: Sequence[Span]) -> mx.array:
        if self.attention is not None:
            x = self.attention(x, cos, sin, spans)
        return x if self.ffn is None else self.ffn(x)


class Model(BothLayouts):
    """Slots: one KV state per real attention, in the order of layers; slots are not layers."""

    def __init__(self, config: Config, weights: Mapping[str, Weight]) -> None:
        root = Weights(weights)
        self.config = config
        self.vocab_size = config.vocab_size
        self.embed_tokens = Embedding(root.at("model.embed_tokens"))
        self.layers = []
        self.num_slots = 0
        for i, (attention, ffn) in enumerate(config.block_configs):
            self.layers.append(Block(config, attention, ffn, root.at(f"model.layers.{i}"), slot=self.num_slots))
            self.num_slots += attention.is_attention
        self.norm = RMSNorm(root.at("model.norm"), config.rms_norm_eps)
        self.lm_head = self.embed_tokens.as_head if config.tie_word_embeddings else Linear(root.at("lm_head"))
        self.rope = Rope(config.rope, config.head_dim)

    def make_slots(self) -> list[State]:
        return [KVState() for _ in range(self.num_slots)]

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
