"""Gemma 3: five layers with a sliding window to one that sees everything, each kind with rotary positions of its own.

https://arxiv.org/abs/2503.19786; fields and weight names as in Hugging Face checkpoints of model_type `gemma3_text`, and of
`gemma3`, whose text model is loaded and whose vision tower is set aside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.errors import Refused
from engine.fields import Fields
from engine.layers.activations import gelu_tanh
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.layers.quantised import Weight
from engine.layers.rope import Rope, RopeConfig
from engine.layers.rotary_attention import Attention
from engine.layers.weights import Weights
from engine.models.layouts import BothLayouts
from engine.state import KVState, RingKVState, Span, State
from engine.state.span import positions

__all__ = ["Config", "Model", "canonical", "duplicates", "ignored", "keep_float32", "parameters", "text_fields"]

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Config:
    """layer_types: SLIDING or FULL for each layer; rope: layer type -> its rope; multimodal: the files hold a vision tower."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    attention_bias: bool
    tie_word_embeddings: bool
    sliding_window: int
    layer_types: tuple[str, ...]
    rope: tuple[tuple[str, RopeConfig], ...]
    multimodal: bool

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        """Read config.json. Raises ConfigError, which names field and value, or Refused for what is not supported.

        Published configs of model_type gemma3 leave out what is as in the smallest of its models; the defaults are these.
        """
        outer = Fields(raw)
        fields = Fields(*text_fields(raw))
        hidden_size = fields.integer("hidden_size", 1, 1 << 17)
        heads = fields.integer("num_attention_heads", 1, 1 << 12, 8)
        kv_heads = fields.integer("num_key_value_heads", 1, 1 << 12, 4)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"must divide num_attention_heads {heads}")
        head_dim = fields.integer("head_dim", 2, 1 << 12, 256)
        if head_dim % 2:
            raise fields.error("head_dim", "must be even for rotary positions")
        layers = fields.integer("num_hidden_layers", 1, 1 << 12)
        fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        if fields.raw.get("use_bidirectional_attention") not in (None, False):
            raise Refused(
                f"config field {fields.prefix}use_bidirectional_attention = {fields.raw['use_bidirectional_attention']!r:.80} "
                "is not supported (supported: false)"
            )
        layer_types = _layer_types(fields, layers)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 1, 1 << 20),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size", 1, 1 << 24, 262208),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
            query_pre_attn_scalar=fields.number("query_pre_attn_scalar", 1e-6, 1e9, 256.0),
            attn_logit_softcapping=fields.number("attn_logit_softcapping", 1e-6, 1e6, None),
            final_logit_softcapping=fields.number("final_logit_softcapping", 1e-6, 1e6, None),
            attention_bias=fields.flag("attention_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", True)),
            sliding_window=fields.integer("sliding_window", 1, 1 << 30) if SLIDING in layer_types else 0,
            layer_types=layer_types,
            rope=(
                (FULL, RopeConfig.from_fields(fields, 1e6, layer_type=FULL)),
                (
                    SLIDING,
                    RopeConfig.from_fields(fields, 1e4, layer_type=SLIDING, theta_field="rope_local_base_freq", scaled=False),
                ),
            ),
            multimodal=outer.has("text_config"),
        )


def text_fields(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's fields and their prefix: model_type gemma3 nests them in `text_config`."""
    if raw.get("text_config") is None:
        return raw, ""
    return Fields(raw).section("text_config").raw, "text_config."


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """`layer_types`, or from older configs' `sliding_window_pattern`: every pattern-th layer is a full one."""
    kinds = fields.layer_types(layers, (SLIDING, FULL))
    if kinds is None:
        pattern = fields.integer("sliding_window_pattern", 1, 1 << 12, None)
        pattern = pattern or fields.integer("_sliding_window_pattern", 1, 1 << 12, 6)
        kinds = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(layers))
    return kinds


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint with its shape; a checkpoint has exactly these, beside its vision tower."""
    c = config
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(len(c.layer_types)):
        layer = f"model.layers.{i}"
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}.{name}_layernorm.weight"] = (c.hidden_size,)
        for name, out, into in (
            ("q", q_size, c.hidden_size),
            ("k", kv_size, c.hidden_size),
            ("v", kv_size, c.hidden_size),
            ("o", c.hidden_size, q_size),
        ):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (out, into)
            if c.attention_bias:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (out,)
        shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (c.head_dim,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (c.intermediate_size, c.hidden_size)
        shapes[f"{layer}.mlp.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def duplicates(config: Config) -> dict[str, str]:
    """Names under which a file may hold a copy of a parameter."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


_TEXT_MODEL = re.compile(r"(?:language_model\.model|model\.language_model)\.")


def canonical(name: str) -> str:
    """The parameter that a tensor of a checkpoint with a vision tower is: both generations of prefixes of its text model."""
    name = _TEXT_MODEL.sub("model.", name, count=1) if _TEXT_MODEL.match(name) else name
    return "lm_head.weight" if name == "language_model.lm_head.weight" else name


_VISION = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb(_local)?\.inv_freq\Z")


def ignored(config: Config, name: str) -> bool:
    """Tensors of published files that are no parameters: the vision tower, its projector, and rotary tables."""
    return (config.multimodal and _VISION.match(name) is not None) or _ROTARY_TABLE.match(name) is not None


def keep_float32(name: str) -> bool:
    """Norms, whose weight is 1 + w: in a narrower type the sum would lose what w has of its own."""
    return name.endswith("norm.weight")


class Norm(RMSNorm):
    """RMS norm by 1 + w, in float32 to the end; returned in `dtype`."""

    def __init__(self, weights: Weights, eps: float, dtype: mx.Dtype) -> None:
        super().__init__(weights, eps)
        self.weight = 1.0 + self.weight
        self.dtype = dtype

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(self.dtype)


class Block:
    """Attention and MLP, each between two norms; the residual takes what the second one lets through.

    dtype: of all but what is added to the residual.
    """

    def __init__(
        self, config: Config, layer_type: str, weights: Weights, slot: int, dtype: mx.Dtype, residual_dtype: mx.Dtype
    ) -> None:
        c, eps = config, config.rms_norm_eps
        self.layer_type = layer_type
        self.input_layernorm = Norm(weights.at("input_layernorm"), eps, dtype)
        self.self_attn = Attention(
            weights.at("self_attn"),
            c.head_dim,
            c.attention_bias,
            slot,
            scale=c.query_pre_attn_scalar**-0.5,
            window=c.sliding_window if layer_type == SLIDING else None,
            q_norm=Norm(weights.at("self_attn.q_norm"), eps, dtype),
            k_norm=Norm(weights.at("self_attn.k_norm"), eps, dtype),
            softcap=c.attn_logit_softcapping,
        )
        self.post_attention_layernorm = Norm(weights.at("post_attention_layernorm"), eps, residual_dtype)
        self.pre_feedforward_layernorm = Norm(weights.at("pre_feedforward_layernorm"), eps, dtype)
        self.mlp = MLP(weights.at("mlp"), activation=gelu_tanh)
        self.post_feedforward_layernorm = Norm(weights.at("post_feedforward_layernorm"), eps, residual_dtype)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, spans: Sequence[Span]) -> mx.array:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin, spans))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Model(BothLayouts):
    """Slots: one a layer, a ring of `sliding_window` tokens or a KV state."""

    def __init__(self, config: Config, weights: Mapping[str, Weight]) -> None:
        root = Weights(weights)
        self.config = config
        self.vocab_size = config.vocab_size
        self.embed_tokens = Embedding(root.at("model.embed_tokens"))
        dtype = self.embed_tokens.weight.dtype
        # The residual of published models goes beyond 100,000, which float16 does not hold.
        self.residual_dtype = mx.float32 if dtype == mx.float16 else dtype
        self.layers = [
            Block(config, kind, root.at(f"model.layers.{i}"), i, dtype, self.residual_dtype)
            for i, kind in enumerate(config.layer_types)
        ]
        self.norm = Norm(root.at("model.norm"), config.rms_norm_eps, dtype)
        self.lm_head = self.embed_tokens.as_head if config.tie_word_embeddings else Linear(root.at("lm_head"))
        self.ropes = {kind: Rope(rope, config.head_dim) for kind, rope in config.rope if kind in config.layer_types}

    def make_slots(self) -> list[State]:
        window = self.config.sliding_window
        return [RingKVState(window) if kind == SLIDING else KVState() for kind in self.config.layer_types]

    def forward(self, tokens: mx.array, spans: Sequence[Span], rows: Sequence[int] | None) -> mx.array:
        """tokens: int32 [T]. Returns logits [len(rows), vocab] of these indices into T, or [T, vocab] for None."""
        spans = self.own(spans)
        at = positions(spans)
        tables = {kind: rope.tables(at) for kind, rope in self.ropes.items()}
        x = self.embed_tokens(tokens)  # [T, hidden]
        x = x * mx.array(self.config.hidden_size**0.5, x.dtype)  # a factor rounded to the compute dtype, as in training
        x = x.astype(self.residual_dtype)
        for layer in self.layers:
            x = layer(x, *tables[layer.layer_type], spans)
        if rows is not None:
            x = x[mx.array(list(rows), dtype=mx.int32)]
        logits = self.lm_head(self.norm(x))
        cap = self.config.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap
