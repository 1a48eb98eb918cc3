"""gpt-oss: sliding-window and full attention in turn, each head with a sink, and experts with a clamped SwiGLU.

https://arxiv.org/abs/2508.10925; fields and weight names as in Hugging Face checkpoints of model_type `gpt_oss`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from engine.fields import Fields
from engine.layers.activations import clamped_swiglu, softmax
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.moe import BlockMap, moe_gather_qmm_mapped, values_of
from engine.layers.norm import RMSNorm
from engine.layers.quantised import QuantisedTensor, Weight
from engine.layers.rope import Rope, RopeConfig
from engine.layers.rotary_attention import Attention
from engine.layers.weights import Weights
from engine.models.layouts import BothLayouts
from engine.models.llama import duplicates, ignored
from engine.state import KVState, RingKVState, Span, State
from engine.state.span import positions

__all__ = ["Config", "Model", "complete", "duplicates", "ignored", "inputs_first", "keep_float32", "parameters"]

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Config:
    """layer_types: SLIDING or FULL for each layer. intermediate_size: of one expert.

    separate_experts: gate and up of the experts are matrices of their own, as in files that mlx-lm wrote.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    num_local_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float
    swiglu_limit: float
    sliding_window: int
    layer_types: tuple[str, ...]
    rope: RopeConfig
    separate_experts: bool = False

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        """Read config.json. Raises ConfigError, which names field and value, or Refused for what is not supported."""
        fields = Fields(raw)
        heads = fields.integer("num_attention_heads", 1, 1 << 12)
        kv_heads = fields.integer("num_key_value_heads", 1, 1 << 12)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"must divide num_attention_heads {heads}")
        head_dim = fields.integer("head_dim", 2, 1 << 12, 64)
        if head_dim % 2:
            raise fields.error("head_dim", "must be even for rotary positions")
        experts = fields.integer("num_local_experts", 1, 1 << 14)
        layers = fields.integer("num_hidden_layers", 1, 1 << 12)
        fields.choice("hidden_act", ("silu",), "silu")  # what published configs call the clamped SwiGLU
        alternating = tuple(FULL if i % 2 else SLIDING for i in range(layers))
        layer_types = fields.layer_types(layers, (SLIDING, FULL)) or alternating
        if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
            # Libraries disagree about what it would mean: no scaling, or that of the published models.
            raise fields.error("rope_scaling", "or rope_parameters must be given")
        return cls(
            hidden_size=fields.integer("hidden_size", 1, 1 << 17),
            intermediate_size=fields.integer("intermediate_size", 1, 1 << 20),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size", 1, 1 << 24),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-5),
            attention_bias=fields.flag("attention_bias", True),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            num_local_experts=experts,
            num_experts_per_tok=fields.integer("num_experts_per_tok", 1, experts),
            swiglu_alpha=fields.number("swiglu_alpha", 0.0, 1e3, 1.702),
            swiglu_limit=fields.number("swiglu_limit", 1e-6, 1e6, 7.0),
            sliding_window=fields.integer("sliding_window", 1, 1 << 30) if SLIDING in layer_types else 0,
            layer_types=layer_types,
            rope=RopeConfig.from_fields(fields, 150000.0),
        )


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint with its shape; a checkpoint has exactly these."""
    c = config
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(len(c.layer_types)):
        layer = f"model.layers.{i}"
        for name, out, into in (
            ("q", q_size, c.hidden_size),
            ("k", kv_size, c.hidden_size),
            ("v", kv_size, c.hidden_size),
            ("o", c.hidden_size, q_size),
        ):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (out, into)
            if c.attention_bias:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (out,)
        shapes[f"{layer}.self_attn.sinks"] = (c.num_attention_heads,)
        shapes[f"{layer}.mlp.router.weight"] = (c.num_local_experts, c.hidden_size)
        shapes[f"{layer}.mlp.router.bias"] = (c.num_local_experts,)
        shapes |= {f"{layer}.mlp.experts.{name}": shape for name, shape in _expert_parameters(c).items()}
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (c.hidden_size,)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def _expert_parameters(c: Config) -> dict[str, tuple[int, ...]]:
    """The stacks of experts. gate_up_proj has outputs of a gate and an up in turn; it and down_proj are [experts, in, out], or
    packed [experts, out, in]. Separate matrices are [experts, out, in] either way.
    """
    experts, hidden, intermediate = c.num_local_experts, c.hidden_size, c.intermediate_size
    if not c.separate_experts:
        return {
            "gate_up_proj": (experts, hidden, 2 * intermediate),
            "gate_up_proj_bias": (experts, 2 * intermediate),
            "down_proj": (experts, intermediate, hidden),
            "down_proj_bias": (experts, hidden),
        }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, out, into in (("gate", intermediate, hidden), ("up", intermediate, hidden), ("down", hidden, intermediate)):
        shapes[f"{name}_proj.weight"], shapes[f"{name}_proj.bias"] = (experts, out, into), (experts, out)
    return shapes


def complete(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    """The config with what only the tensors' names say: whether gate and up are separate."""
    return replace(config, separate_experts="model.layers.0.mlp.experts.gate_proj.weight" in shapes)


def keep_float32(name: str) -> bool:
    """The router's parameters: a choice of experts is as precise as they are."""
    return ".mlp.router." in name


def inputs_first(name: str) -> bool:
    """Experts' matrices, which are [experts, in, out] in a plain file and [experts, out, in] in a packed one."""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


class Router:
    """Chooses the `top_k` experts of the largest logits; among equal ones the first. Computed in float32 in every dtype."""

    def __init__(self, weights: Weights, top_k: int) -> None:
        self.weight, self.bias = weights["weight"], weights["bias"]  # float32 [experts, hidden], [experts]
        self.top_k = top_k

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [T, hidden]. Returns expert ids [T, top_k] and weights float32 [T, top_k], a softmax over the chosen alone."""
        logits = mx.addmm(self.bias, x.astype(mx.float32), self.weight.T)
        ids = mx.argsort(-logits, axis=-1)[:, : self.top_k]  # stable, so that ties are settled alike in every batch
        return ids, softmax(mx.take_along_axis(logits, ids, axis=-1))


class Experts:
    """Experts with biases and a clamped SwiGLU."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.experts = config.num_local_experts
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        # (weight [experts, out, in], bias [experts, out]) of the products with a token: gate and up in turn, or each its own
        if config.separate_experts:
            self.inner = [(weights.matrix(f"{name}.weight"), weights[f"{name}.bias"]) for name in ("gate_proj", "up_proj")]
            self.down = weights.matrix("down_proj.weight"), weights["down_proj.bias"]
        else:
            self.inner = [(_outputs_first(weights.matrix("gate_up_proj")), weights["gate_up_proj_bias"])]
            self.down = _outputs_first(weights.matrix("down_proj")), weights["down_proj_bias"]
        self.values = values_of(*(weight for weight, _ in self.inner), self.down[0])

    def __call__(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """x [T, hidden], ids and weights [T, k] -> float32 [T, hidden]."""
        blocks = BlockMap(ids, self.experts, self.values)
        rows = blocks.gather(x)
        products = [moe_gather_qmm_mapped(rows, weight, blocks, bias) for weight, bias in self.inner]
        gate, up = products if len(products) == 2 else (products[0][:, ::2], products[0][:, 1::2])
        h = clamped_swiglu(gate, up, self.alpha, self.limit)
        return blocks.combine(moe_gather_qmm_mapped(h, self.down[0], blocks, self.down[1]), weights)


def _outputs_first(stack: Weight) -> Weight:
    """[experts, out, in], as packed files hold it and plain ones do not; a view."""
    return stack if isinstance(stack, QuantisedTensor) else stack.swapaxes(1, 2)


class MLP:
    """Mixture of experts."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.router = Router(weights.at("router"), config.num_experts_per_tok)
        self.experts = Experts(config, weights.at("experts"))

    def __call__(self, x: mx.array) -> mx.array:
        ids, weights = self.router(x)
        return self.experts(x, ids, weights).astype(x.dtype)


class Block:
    def __init__(self, config: Config, layer_type: str, weights: Weights, slot: int) -> None:
        self.input_layernorm = RMSNorm(weights.at("input_layernorm"), config.rms_norm_eps)
        self.self_attn = Attention(
            weights.at("self_attn"),
            config.head_dim,
            config.attention_bias,
            slot,
            window=config.sliding_window if layer_type == SLIDING else None,
            sinks=True,
        )
        self.post_attention_layernorm = RMSNorm(weights.at("post_attention_layernorm"), config.rms_norm_eps)
        self.mlp = MLP(config, weights.at("mlp"))

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, spans: Sequence[Span]) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, spans)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(BothLayouts):
    """Slots: one a layer, a ring of `sliding_window` tokens or a KV state."""

    def __init__(self, config: Config, weights: Mapping[str, Weight]) -> None:
        root = Weights(weights)
        self.config = config
        self.vocab_size = config.vocab_size
        self.embed_tokens = Embedding(root.at("model.embed_tokens"))
        self.layers = [Block(config, kind, root.at(f"model.layers.{i}"), slot=i) for i, kind in enumerate(config.layer_types)]
        self.norm = RMSNorm(root.at("model.norm"), config.rms_norm_eps)
        self.lm_head = self.embed_tokens.as_head if config.tie_word_embeddings else Linear(root.at("lm_head"))
        self.rope = Rope(config.rope, config.head_dim)

    def make_slots(self) -> list[State]:
        window = self.config.sliding_window
        return [RingKVState(window) if kind == SLIDING else KVState() for kind in self.config.layer_types]

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
