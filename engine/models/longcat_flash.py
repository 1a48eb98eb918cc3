"""LongCat-Flash: two latent attentions and two MLPs a layer, and a mixture of experts on a shortcut around the second half.

https://arxiv.org/abs/2509.01322; fields and weight names as in Hugging Face checkpoints of model_type `longcat_flash`.
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
from engine.layers.mla import MLA, MLAConfig
from engine.layers.mlp import MLP
from engine.layers.moe import GatedExperts, MixtureOfExperts, Router
from engine.layers.norm import RMSNorm
from engine.layers.quantised import Weight
from engine.layers.rope import Rope, RopeConfig
from engine.layers.weights import Weights
from engine.models.layouts import BothLayouts
from engine.state import KVState, Span, State
from engine.state.span import positions

__all__ = ["Config", "Model", "duplicates", "ignored", "keep_float32", "parameters"]

SUB_LAYERS = 2  # attentions of a layer, each with its own MLP and state
_MAX_EXPERTS = 1 << 16  # of all layers together: bounds what one config can make us build


@dataclass(frozen=True)
class Config:
    hidden_size: int
    ffn_hidden_size: int
    expert_ffn_hidden_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    n_routed_experts: int
    zero_expert_num: int
    moe_topk: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    router_bias: bool
    tie_word_embeddings: bool
    attention: MLAConfig

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        """Read config.json. Raises ConfigError, which names field and value, or Refused for what is not supported."""
        refuse_variants(raw, known=())
        return cls(**trunk_fields(Fields(raw)))

    @property
    def expert_count(self) -> int:
        """Experts that the router chooses from, zero experts included."""
        return self.n_routed_experts + self.zero_expert_num


def trunk_fields(fields: Fields) -> dict[str, Any]:
    """The arguments of Config, for it and for those that extend it."""
    hidden_size = fields.integer("hidden_size", 1, 1 << 17)
    layers = fields.integer("num_layers", 1, 1 << 10)
    sub_layers = fields.integer("num_hidden_layers", 1, 1 << 12, layers)  # some writers count sub-layers, some layers
    if sub_layers not in (layers, SUB_LAYERS * layers):
        raise fields.error("num_hidden_layers", f"must be num_layers {layers} or {SUB_LAYERS} times as many")
    experts = fields.integer("n_routed_experts", 1, _MAX_EXPERTS)
    if experts * layers > _MAX_EXPERTS:
        raise fields.error("n_routed_experts", f"times num_layers {layers} must be at most {_MAX_EXPERTS}")
    zero_experts = fields.integer("zero_expert_num", 0, 1 << 16, 0)
    fields.choice("zero_expert_type", ("identity",), "identity")
    fields.choice("hidden_act", ("silu",), "silu")
    return {
        "hidden_size": hidden_size,
        "ffn_hidden_size": fields.integer("ffn_hidden_size", 1, 1 << 20),
        "expert_ffn_hidden_size": fields.integer("expert_ffn_hidden_size", 1, 1 << 20),
        "num_layers": layers,
        "vocab_size": fields.integer("vocab_size", 1, 1 << 24),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-12, 1.0, 1e-5),
        "n_routed_experts": experts,
        "zero_expert_num": zero_experts,
        "moe_topk": fields.integer("moe_topk", 1, experts + zero_experts),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 0.0, 1e6),
        "norm_topk_prob": fields.flag("norm_topk_prob", False),
        "router_bias": fields.flag("router_bias", False),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "attention": _attention(fields, hidden_size),
    }


def _attention(fields: Fields, hidden_size: int) -> MLAConfig:
    fields.choice("attention_method", ("MLA",), "MLA")
    rope_dim = fields.integer("qk_rope_head_dim", 2, 1 << 12)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "must be even for rotary positions")
    return MLAConfig(
        hidden_size=hidden_size,
        num_attention_heads=fields.integer("num_attention_heads", 1, 1 << 12),
        q_lora_rank=fields.integer("q_lora_rank", 1, 1 << 16, None),
        kv_lora_rank=fields.integer("kv_lora_rank", 1, 1 << 16),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", 1, 1 << 12),
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim", 1, 1 << 12),
        attention_bias=fields.flag("attention_bias", False),
        mla_scale_q_lora=fields.flag("mla_scale_q_lora", True),
        mla_scale_kv_lora=fields.flag("mla_scale_kv_lora", True),
        rope=RopeConfig.from_dict(fields.raw, default_theta=1e7),
    )


# Fields of sibling architectures: sparse attention with an indexer; n-gram embeddings, whose rule changes between generations.
_SPARSE = re.compile(r"index_|indexer|sparse|lsa_|use_longcat_dsa|dsa_")
_NGRAM = re.compile(r"ngram|(emb|oe)_(neighbor|split)|oe_|use_oe|special_token_scope")


def refuse_variants(raw: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises Refused for a field of a sibling architecture that is set and not `known`; the model would ignore it."""
    for name, value in raw.items():
        if name in known or value is None or value is False:
            continue
        if _SPARSE.match(name):
            raise Refused(f"config field {name[:80]} = {value!r:.80} is not supported (it belongs to sparse attention)")
        if _NGRAM.match(name):
            hint = f"of n-gram embeddings are supported: {', '.join(known)}" if known else "n-grams need longcat_flash_ngram"
            raise Refused(f"config field {name[:80]} = {value!r:.80} is not supported ({hint})")


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint with its shape; a checkpoint has exactly these. Zero experts have no weights."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}

    def mlp(name: str, size: int) -> None:
        shapes[f"{name}.gate_proj.weight"] = shapes[f"{name}.up_proj.weight"] = (size, c.hidden_size)
        shapes[f"{name}.down_proj.weight"] = (c.hidden_size, size)

    for i in range(c.num_layers):
        layer = f"model.layers.{i}"
        for j in range(SUB_LAYERS):
            shapes[f"{layer}.input_layernorm.{j}.weight"] = (c.hidden_size,)
            shapes[f"{layer}.post_attention_layernorm.{j}.weight"] = (c.hidden_size,)
            shapes |= {f"{layer}.self_attn.{j}.{name}": shape for name, shape in c.attention.parameters().items()}
            mlp(f"{layer}.mlps.{j}", c.ffn_hidden_size)
        shapes[f"{layer}.mlp.router.classifier.weight"] = (c.expert_count, c.hidden_size)
        if c.router_bias:
            shapes[f"{layer}.mlp.router.classifier.bias"] = (c.expert_count,)
        shapes[f"{layer}.mlp.router.e_score_correction_bias"] = (c.expert_count,)
        for e in range(c.n_routed_experts):
            mlp(f"{layer}.mlp.experts.{e}", c.expert_ffn_hidden_size)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def duplicates(config: Config) -> dict[str, str]:
    """Names under which a file may hold a copy of a parameter."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.(gate|up)_proj\.weight\Z")


def ignored(config: Config, name: str) -> bool:
    """Tensors of published files that this model has no use for: the multi-token-prediction layers of `model.mtp.`, and the
    gate and up rows that transformers writes for zero experts.
    """
    if name.startswith("model.mtp."):
        return True
    expert = _EXPERT.match(name)
    return expert is not None and config.n_routed_experts <= int(expert[1]) < config.expert_count


def keep_float32(name: str) -> bool:
    """The router's parameters: published in float32, and a choice of experts is as precise as they are."""
    return ".mlp.router." in name


class Block:
    """Two attentions, each followed by an MLP. The experts see what the first MLP sees and join after the second."""

    def __init__(self, config: Config, weights: Weights, slot: int) -> None:
        c, both = config, range(SUB_LAYERS)
        self.input_layernorm = [RMSNorm(weights.at(f"input_layernorm.{j}"), c.rms_norm_eps) for j in both]
        self.self_attn = [MLA(c.attention, weights.at(f"self_attn.{j}"), slot + j) for j in both]
        self.post_attention_layernorm = [RMSNorm(weights.at(f"post_attention_layernorm.{j}"), c.rms_norm_eps) for j in both]
        self.mlps = [MLP(weights.at(f"mlps.{j}")) for j in both]
        router = Router(
            weights.at("mlp.router"),
            c.moe_topk,
            bias=c.router_bias,
            normalise=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
        )
        experts = GatedExperts(weights.at("mlp.experts"), c.n_routed_experts)
        self.mlp = MixtureOfExperts(router, experts)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, spans: Sequence[Span]) -> mx.array:
        x = x + self.self_attn[0](self.input_layernorm[0](x), cos, sin, spans)
        h = self.post_attention_layernorm[0](x)
        shortcut = self.mlp(h)
        x = x + self.mlps[0](h)
        x = x + self.self_attn[1](self.input_layernorm[1](x), cos, sin, spans)
        return x + self.mlps[1](self.post_attention_layernorm[1](x)) + shortcut


class Model(BothLayouts):
    """Slots: two KV states a layer, of its first and its second attention."""

    def __init__(self, config: Config, weights: Mapping[str, Weight]) -> None:
        root = Weights(weights)
        self.config = config
        self.vocab_size = config.vocab_size
        self.embed_tokens = Embedding(root.at("model.embed_tokens"))
        self.layers = [Block(config, root.at(f"model.layers.{i}"), slot=SUB_LAYERS * i) for i in range(config.num_layers)]
        self.norm = RMSNorm(root.at("model.norm"), config.rms_norm_eps)
        self.lm_head = self.embed_tokens.as_head if config.tie_word_embeddings else Linear(root.at("lm_head"))
        self.rope = Rope(config.attention.rope, config.attention.qk_rope_head_dim, interleaved=True)

    def make_slots(self) -> list[State]:
        return [KVState() for _ in range(SUB_LAYERS * len(self.layers))]

    def embed(self, tokens: mx.array, spans: Sequence[Span]) -> mx.array:
        """int32 [T] -> [T, hidden]."""
        return self.embed_tokens(tokens)

    def forward(self, tokens: mx.array, spans: Sequence[Span], rows: Sequence[int] | None) -> mx.array:
        """tokens: int32 [T]. Returns logits [len(rows), vocab] of these indices into T, or [T, vocab] for None."""
        spans = self.own(spans)
        cos, sin = self.rope.tables(positions(spans))
        x = self.embed(tokens, spans)
        for layer in self.layers:
            x = layer(x, cos, sin, spans)
        if rows is not None:
            x = x[mx.array(list(rows), dtype=mx.int32)]
        return self.lm_head(self.norm(x))
