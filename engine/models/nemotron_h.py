"""Nemotron-H and Nemotron 3: layers of one mixer each, which is Mamba-2, attention, an MLP, or a mixture of experts.

https://arxiv.org/abs/2504.03624, https://arxiv.org/abs/2512.20848; fields and weight names as in Hugging Face checkpoints of
model_type `nemotron_h`. Attention has no position encoding. Multimodal checkpoints (Nano VL, Nano Omni) serve their text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from engine.errors import ConfigError
from engine.layers.embedding import Embedding
from engine.layers.group_router import GroupRouter
from engine.layers.linear import Linear
from engine.layers.mamba2 import Mamba2
from engine.layers.norm import RMSNorm
from engine.layers.quantised import Weight
from engine.layers.relu2 import ReLU2Experts, ReLU2MLP
from engine.layers.unrotated_attention import UnrotatedAttention
from engine.layers.weights import Weights
from engine.models.layouts import BothLayouts
from engine.models.nemotron_h_config import ATTENTION, MAMBA, MLP, MOE, Config, MoEConfig, text_fields
from engine.models.nemotron_h_mtp import MTPHead, MTPNames
from engine.state import KVState, Span, State

__all__ = ["Config", "Model", "canonical", "complete", "ignored", "keep_float32", "parameters", "text_fields"]

_BODY = re.compile(r"(?:model\.)?(?:language_model\.)?(?:(?:model\.)?backbone\.|model\.(?=embeddings|layers|norm_f))")
_CONTAINER = re.compile(r"\A(?:model\.)?language_model\.(?=lm_head|mtp)")
_STACKED = re.compile(r"\.experts\.(?:up|down)_proj\Z")
_OPTIONAL = re.compile(r"lm_head\.weight\Z|mtp\.|.*(?:\.bias|\.mixer\.(?:experts|shared_experts)\.(?:up|down)_proj\.weight)\Z")
_FLOAT32 = re.compile(r".*\.mixer\.(?:gate\..*|conv1d\..*|A_log|D|dt_bias)\Z")
# The other towers of multimodal checkpoints, by the first part of their names
_TOWERS = {"vision_model", "vision_projector", "mlp1", "sound_encoder", "sound_projection"}


def canonical(name: str) -> str:
    """The parameter that a tensor is: published files differ in what they put before the body, the head and the MTP head."""
    name = _CONTAINER.sub("", _BODY.sub("backbone.", name, count=1) if _BODY.match(name) else name, count=1)
    return f"{name}.weight" if _STACKED.search(name) else name


def complete(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    """The config with what only the tensors' names and shapes say: which of the optional ones there are, and their layout.

    Raises CheckpointError for an MTP head that is not whole, ConfigError for one of other layers than the config says.
    """
    optional = frozenset(name for name in shapes if _OPTIONAL.match(name))
    channels_last = (config.mamba.conv_dim, config.mamba.conv_kernel, 1)
    is_last = config.mamba.conv_kernel > 1 and any(
        name.endswith(".conv1d.weight") and tuple(shape) == channels_last for name, shape in shapes.items()
    )
    mtp = MTPNames.find(optional)
    if mtp is not None and config.mtp_pattern is not None:
        kinds = "".join(kind for _, kind in mtp.layers)
        if kinds != config.mtp_pattern:
            raise ConfigError(
                f"config field mtp_hybrid_override_pattern or mtp_layers_block_type lists layers {config.mtp_pattern}, "
                f"the MTP head in the files has {kinds}"
            )
    if mtp is not None and config.moe is None and any(kind == MOE for _, kind in mtp.layers):
        raise ConfigError("config field n_routed_experts is missing, and the MTP head in the files has experts")
    if mtp is not None and config.intermediate_size is None and any(kind == MLP for _, kind in mtp.layers):
        raise ConfigError("config field intermediate_size is missing, and the MTP head in the files has an MLP")
    return replace(config, optional=optional, conv_channels_last=is_last)


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint with its shape; a checkpoint has exactly these."""
    c, hidden = config, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (c.vocab_size, hidden)}
    for i, kind in enumerate(c.pattern):
        shapes[f"backbone.layers.{i}.norm.weight"] = (hidden,)
        _mixer_parameters(shapes, f"backbone.layers.{i}.mixer", kind, c)
    shapes["backbone.norm_f.weight"] = (hidden,)
    if not c.tie_word_embeddings or "lm_head.weight" in c.optional:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    mtp = MTPNames.find(c.optional)
    if mtp is not None:
        for norm in (mtp.enorm, mtp.hnorm, mtp.norm):
            shapes[f"{norm}.weight"] = (hidden,)
        _linear(shapes, mtp.fc, hidden, 2 * hidden, c)
        for prefix, kind in mtp.layers:
            shapes[f"{prefix}.norm.weight"] = (hidden,)
            _mixer_parameters(shapes, f"{prefix}.mixer", kind, c)
    return shapes


def _linear(shapes: dict[str, tuple[int, ...]], name: str, out: int, into: int, c: Config, bias: bool = False) -> None:
    shapes[f"{name}.weight"] = (out, into)
    if bias or f"{name}.bias" in c.optional:
        shapes[f"{name}.bias"] = (out,)


def _mixer_parameters(shapes: dict[str, tuple[int, ...]], at: str, kind: str, c: Config) -> None:
    hidden = c.hidden_size
    if kind == MAMBA:
        m = c.mamba
        _linear(shapes, f"{at}.in_proj", m.inner + m.conv_dim + m.mamba_num_heads, hidden, c, c.use_bias)
        shapes[f"{at}.conv1d.weight"] = (
            (m.conv_dim, m.conv_kernel, 1) if c.conv_channels_last else (m.conv_dim, 1, m.conv_kernel)
        )
        if c.use_conv_bias or f"{at}.conv1d.bias" in c.optional:
            shapes[f"{at}.conv1d.bias"] = (m.conv_dim,)
        for name in ("A_log", "D", "dt_bias"):
            shapes[f"{at}.{name}"] = (m.mamba_num_heads,)
        shapes[f"{at}.norm.weight"] = (m.inner,)
        _linear(shapes, f"{at}.out_proj", hidden, m.inner, c, c.use_bias)
    elif kind == ATTENTION:
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            _linear(shapes, f"{at}.{name}", size, hidden, c)
        _linear(shapes, f"{at}.o_proj", hidden, q_size, c)
    elif kind == MLP:
        assert c.intermediate_size is not None
        _mlp_parameters(shapes, at, c.intermediate_size, c)
    else:
        assert c.moe is not None
        _moe_parameters(shapes, at, c.moe, c)


def _mlp_parameters(shapes: dict[str, tuple[int, ...]], at: str, size: int, c: Config) -> None:
    _linear(shapes, f"{at}.up_proj", size, c.hidden_size, c, c.mlp_bias)
    _linear(shapes, f"{at}.down_proj", c.hidden_size, size, c, c.mlp_bias)


def _moe_parameters(shapes: dict[str, tuple[int, ...]], at: str, moe: MoEConfig, c: Config) -> None:
    shapes[f"{at}.gate.weight"] = (moe.n_routed_experts, c.hidden_size)
    shapes[f"{at}.gate.e_score_correction_bias"] = (moe.n_routed_experts,)
    width, size = moe.moe_latent_size or c.hidden_size, moe.moe_intermediate_size
    for name, shape in (("up_proj", (size, width)), ("down_proj", (width, size))):
        if f"{at}.experts.{name}.weight" in c.optional:
            shapes[f"{at}.experts.{name}.weight"] = (moe.n_routed_experts, *shape)
        else:
            shapes |= {f"{at}.experts.{expert}.{name}.weight": shape for expert in range(moe.n_routed_experts)}
    if moe.moe_latent_size is not None:
        _linear(shapes, f"{at}.fc1_latent_proj", width, c.hidden_size, c, c.mlp_bias)
        _linear(shapes, f"{at}.fc2_latent_proj", c.hidden_size, width, c, c.mlp_bias)
    if moe.n_shared_experts or f"{at}.shared_experts.up_proj.weight" in c.optional:
        _mlp_parameters(shapes, f"{at}.shared_experts", moe.moe_shared_expert_intermediate_size, c)


def ignored(config: Config, name: str) -> bool:
    """Tensors of published files that are no parameters: the towers of other media."""
    return config.is_wrapped and name.partition(".")[0] in _TOWERS


def keep_float32(name: str) -> bool:
    """Whether a parameter is float32 in every compute dtype: of the router, the convolution and the recurrence."""
    return _FLOAT32.match(name) is not None


class MixtureOfExperts:
    """Routed experts, in a latent space where the checkpoint has one, and shared experts, which every token takes."""

    def __init__(self, config: MoEConfig, weights: Weights) -> None:
        self.gate = GroupRouter(
            weights.at("gate"),
            config.num_experts_per_tok,
            groups=config.n_group,
            top_groups=config.topk_group,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        self.experts = ReLU2Experts(weights.at("experts"), config.n_routed_experts)
        is_latent = config.moe_latent_size is not None
        self.fc1_latent_proj = Linear.of(weights.at("fc1_latent_proj")) if is_latent else None
        self.fc2_latent_proj = Linear.of(weights.at("fc2_latent_proj")) if is_latent else None
        has_shared = "shared_experts.up_proj.weight" in weights
        self.shared_experts = ReLU2MLP(weights.at("shared_experts")) if has_shared else None

    def __call__(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> [T, hidden], in x's dtype."""
        ids, weights = self.gate(x)
        latent = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        out = self.experts(latent, ids, weights).astype(x.dtype)
        if self.fc2_latent_proj is not None:
            out = self.fc2_latent_proj(out)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class Block:
    """slot: of the mixer's state among a span's slots, for the kinds that keep one."""

    def __init__(self, config: Config, kind: str, weights: Weights, slot: int) -> None:
        self.norm = RMSNorm(weights.at("norm"), config.layer_norm_epsilon)
        self.over_positions: Mamba2 | UnrotatedAttention | None = None
        mixer = weights.at("mixer")
        if kind == MAMBA:
            self.over_positions = Mamba2(config.mamba, mixer, slot)
        elif kind == ATTENTION:
            self.over_positions = UnrotatedAttention(mixer, config.head_dim, slot)
        elif kind == MLP:
            self.per_token: ReLU2MLP | MixtureOfExperts = ReLU2MLP(mixer)
        else:
            assert config.moe is not None
            self.per_token = MixtureOfExperts(config.moe, mixer)

    def __call__(self, x: mx.array, spans: Sequence[Span]) -> mx.array:
        normed = self.norm(x)
        return x + (self.per_token(normed) if self.over_positions is None else self.over_positions(normed, spans))


class Model(BothLayouts):
    """Slots: a recurrent state per Mamba layer, a KV state per attention layer, in the order of layers; slots are not layers.

    mtp: the head for multi-token prediction, where the checkpoint has one. Its states are no slots of the model.
    """

    def __init__(self, config: Config, weights: Mapping[str, Weight]) -> None:
        root = Weights(weights)
        self.config = config
        self.vocab_size = config.vocab_size
        self.embeddings = Embedding(root.at("backbone.embeddings"))
        self.layers = _blocks(config, [(f"backbone.layers.{i}", kind) for i, kind in enumerate(config.pattern)], root)
        self.norm_f = RMSNorm(root.at("backbone.norm_f"), config.layer_norm_epsilon)
        self.lm_head = Linear(root.at("lm_head")) if "lm_head.weight" in root else self.embeddings.as_head
        self.mtp: MTPHead | None = None
        names = MTPNames.find(config.optional)
        if names is not None:
            self.mtp = MTPHead(
                names,
                root,
                config.layer_norm_epsilon,
                embeddings=self.embeddings,
                lm_head=self.lm_head,
                layers=_blocks(config, names.layers, root),
            )

    def make_slots(self) -> list[State]:
        makers: dict[str, Callable[[], State]] = {MAMBA: self.config.mamba.make_state, ATTENTION: KVState}
        return [makers[kind]() for kind in self.config.pattern if kind in makers]

    def hidden(self, tokens: mx.array, spans: Sequence[Span], rows: Sequence[int] | None = None) -> mx.array:
        """What the output head and the MTP head read: the states after the last norm.

        tokens: int32 [T]. Returns [len(rows), hidden] of these indices into T, or [T, hidden] for None.
        """
        spans = self.own(spans)
        x = self.embeddings(tokens)  # [T, hidden]
        for layer in self.layers:
            x = layer(x, spans)
        if rows is not None:
            x = x[mx.array(list(rows), dtype=mx.int32)]
        return self.norm_f(x)

    def forward(self, tokens: mx.array, spans: Sequence[Span], rows: Sequence[int] | None) -> mx.array:
        """tokens: int32 [T]. Returns logits [len(rows), vocab] of these indices into T, or [T, vocab] for None."""
        return self.lm_head(self.hidden(tokens, spans, rows))


def _blocks(config: Config, layers: Sequence[tuple[str, str]], weights: Weights) -> list[Block]:
    """Blocks of (name, kind) in order; each kind that keeps a state takes the next slot."""
    blocks, slots = [], 0
    for name, kind in layers:
        blocks.append(Block(config, kind, weights.at(name), slots))
        slots += kind in (MAMBA, ATTENTION)
    return blocks
