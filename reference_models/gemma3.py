"""Gemma 3: layers that see a window and layers that see everything, four norms a layer. Full forward, no cache.

    x      = embed[t] * sqrt(hidden)                 the factor rounded to the dtype of the model
    x     += rms(W_o attention(rms(x)))              queries and keys normed by head; scale query_pre_attn_scalar^-0.5
    x     += rms(W_down(gelu(W_gate h) * W_up h))    h = rms(x); gelu by its tanh formula
    logits = head(rms(x))                            head is the embedding itself unless untied

rms multiplies by 1 + w. A local layer attends to the token itself and sliding_window - 1 before it, with rotary base
rope_local_base_freq, never scaled; a global layer to all, with rope_theta, divided by a factor on the larger models. Rotation
is in halves.

Sources: Gemma 3 technical report (arXiv 2503.19786), config.json and tensor names of gemma-3-1b-it and gemma-3-4b-it; Gemma 2
(2408.00118) for the soft caps. A config that leaves fields out has the defaults of the published config class.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_models.recompute import Config, Recompute, ReferenceError, Weights, wide

__all__ = ["logits", "parameters", "recompute", "renamed"]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


class _Shape(NamedTuple):
    local: list[bool]  # by layer
    window: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    scale: float
    attention_bias: bool
    tied: bool
    attention_cap: float | None
    logit_cap: float | None


def _text(config: Config) -> Config:
    """The text part; a wrapper's tie_word_embeddings counts where the text part says nothing."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    return {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}


def _count(config: Config, name: str, default: int) -> int:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ReferenceError(f"config field {name!r} must be a positive integer (got {value!r})")
    return value


def _positive(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ReferenceError(f"config field {name!r} must be a positive number (got {value!r})")
    return float(value)


def _cap(config: Config, name: str) -> float | None:
    return None if config.get(name) is None else _positive(config, name)


def _local(config: Config, layers: int) -> list[bool]:
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, Sequence) or len(kinds) != layers or any(kind not in (_LOCAL, _GLOBAL) for kind in kinds):
            raise ReferenceError(f"config field 'layer_types' must hold {layers} of {_LOCAL} and {_GLOBAL} (got {kinds!r:.80})")
        return [kind == _LOCAL for kind in kinds]
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    every = _count({"sliding_window_pattern": pattern}, "sliding_window_pattern", 6)
    return [bool((layer + 1) % every) for layer in range(layers)]


def _shape(config: Config) -> _Shape:
    config = _text(config)
    if (config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ReferenceError(
            f"config field 'hidden_activation' must be 'gelu_pytorch_tanh' (got {config['hidden_activation']!r})"
        )
    if config.get("use_bidirectional_attention"):
        raise ReferenceError("config field 'use_bidirectional_attention' must be false: this reference is causal")
    heads, kv_heads = _count(config, "num_attention_heads", 8), _count(config, "num_key_value_heads", 4)
    if heads % kv_heads:
        raise ReferenceError(f"config field 'num_key_value_heads' ({kv_heads}) must divide num_attention_heads ({heads})")
    head_dim = _count(config, "head_dim", 256)
    if head_dim % 2:
        raise ReferenceError(f"config field 'head_dim' must be even (got {head_dim})")
    return _Shape(
        local=_local(config, _count(config, "num_hidden_layers", 26)),
        window=_count(config, "sliding_window", 4096),
        hidden=_count(config, "hidden_size", 2304),
        intermediate=_count(config, "intermediate_size", 9216),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=_count(config, "vocab_size", 262_208),
        eps=_positive(config, "rms_norm_eps", 1e-6),
        scale=_positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        attention_bias=bool(config.get("attention_bias", False)),
        tied=config.get("tie_word_embeddings") in (None, True),
        attention_cap=_cap(config, "attn_logit_softcapping"),
        logit_cap=_cap(config, "final_logit_softcapping"),
    )


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Checkpoint names -> shapes; exactly the tensors that `recompute` reads."""
    s = _shape(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab, s.hidden)}
    for layer in range(len(s.local)):
        name = f"model.layers.{layer}"
        for part, rows in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (rows * s.head_dim, s.hidden)
            if s.attention_bias:
                shapes[f"{name}.self_attn.{part}_proj.bias"] = (rows * s.head_dim,)
        shapes[f"{name}.self_attn.o_proj.weight"] = (s.hidden, s.heads * s.head_dim)
        if s.attention_bias:
            shapes[f"{name}.self_attn.o_proj.bias"] = (s.hidden,)
        for part in ("q_norm", "k_norm"):
            shapes[f"{name}.self_attn.{part}.weight"] = (s.head_dim,)
        for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{name}.{part}_layernorm.weight"] = (s.hidden,)
        for part in ("gate", "up"):
            shapes[f"{name}.mlp.{part}_proj.weight"] = (s.intermediate, s.hidden)
        shapes[f"{name}.mlp.down_proj.weight"] = (s.hidden, s.intermediate)
    shapes["model.norm.weight"] = (s.hidden,)
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab, s.hidden)
    return shapes


def renamed(config: Config, weights: Weights) -> dict[str, Tensor]:
    """The tensors under the names of `parameters`: a wrapper's prefixes go; vision tensors keep their names."""
    text = re.compile(r"(?:language_model\.(?:model\.)?|model\.language_model\.|model\.)(embed_tokens|layers|norm)\.(.*)")
    found = {}
    for name, tensor in weights.items():
        match = text.fullmatch(name)
        found[f"model.{match[1]}.{match[2]}" if match else re.sub(r"^language_model\.lm_head\.", "lm_head.", name)] = tensor
    return found


def _ropes(config: Config, head_dim: int, dtype: torch.dtype) -> dict[bool, Tensor]:
    """Radians per token for each pair of a head [head_dim / 2], by whether a layer is local.

    Old spelling: rope_theta, rope_local_base_freq and rope_scaling, which is the global layers'. New: rope_parameters by kind
    of layer.
    """
    config = _text(config)
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    kinds = {kind: dict(new.get(kind) or {}) for kind in (_LOCAL, _GLOBAL)}
    for name, value in old.items():
        if kinds[_GLOBAL].setdefault(name, value) != value:
            raise ReferenceError(f"rope_parameters and rope_scaling disagree on {name!r} ({kinds[_GLOBAL][name]!r}, {value!r})")
    bases = {_LOCAL: ("rope_local_base_freq", 10_000.0), _GLOBAL: ("rope_theta", 1_000_000.0)}
    frequencies = {}
    for kind, rope in kinds.items():
        theta = _positive(rope, "rope_theta", _positive(config, *bases[kind]))
        frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
        scaling = rope.get("rope_type") or rope.get("type") or "default"
        if scaling not in ("default", "linear"):
            raise ReferenceError(f"rope_type of {kind} must be 'default' or 'linear' (got {scaling!r})")
        frequencies[kind == _LOCAL] = frequency / _positive(rope, "factor") if scaling == "linear" else frequency
    return frequencies


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.to(wide(x.dtype))
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (1 + weight.to(y.dtype))).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of x [heads, T, head_dim]."""
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def recompute(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Recompute:
    """Logits [T, vocab] of one full forward over `tokens`, in `dtype`; differentiable in the weights."""
    s = _shape(config)
    length, high = len(tokens), wide(dtype)
    position = torch.arange(length)
    back = position[:, None] - position  # [T, T]: how many tokens the key is before the query
    hidden_keys = {False: back < 0, True: (back < 0) | (back >= s.window)}
    angles = {local: position.to(high)[:, None] * frequency for local, frequency in _ropes(config, s.head_dim, high).items()}
    turns = {local: (angle.cos(), angle.sin()) for local, angle in angles.items()}

    def linear(x: Tensor, name: str, bias: bool = False) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"].to(dtype), weights[f"{name}.bias"].to(dtype) if bias else None)

    def norm(x: Tensor, name: str) -> Tensor:
        return _rms(x, weights[f"{name}.weight"], s.eps)

    def attend(h: Tensor, name: str, local: bool) -> Tensor:
        q, k, v = (
            linear(h, f"{name}.{part}_proj", s.attention_bias).view(length, -1, s.head_dim).transpose(0, 1) for part in "qkv"
        )
        q, k = (_rotate(norm(t, f"{name}.{part}_norm"), *turns[local]) for t, part in ((q, "q"), (k, "k")))
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, 0) for t in (k, v))  # [heads, T, head_dim]
        scores = (q @ k.transpose(1, 2)) * s.scale  # [heads, T, T]
        if s.attention_cap is not None:
            scores = (scores / s.attention_cap).tanh() * s.attention_cap
        seen = scores.masked_fill(hidden_keys[local], -math.inf).to(high).softmax(-1).to(dtype)
        return linear((seen @ v).transpose(0, 1).reshape(length, -1), f"{name}.o_proj", s.attention_bias)

    def mlp(h: Tensor, name: str) -> Tensor:
        gate = F.gelu(linear(h, f"{name}.gate_proj"), approximate="tanh")
        return linear(gate * linear(h, f"{name}.up_proj"), f"{name}.down_proj")

    x = weights["model.embed_tokens.weight"][torch.as_tensor(tokens, dtype=torch.long)].to(dtype)  # [T, hidden]
    x = x * torch.tensor(math.sqrt(s.hidden), dtype=dtype)
    for layer, local in enumerate(s.local):
        name = f"model.layers.{layer}"
        h = attend(norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", local)
        x = x + norm(h, f"{name}.post_attention_layernorm")
        h = mlp(norm(x, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
        x = x + norm(h, f"{name}.post_feedforward_layernorm")
    out = linear(norm(x, "model.norm"), "model.embed_tokens" if s.tied else "lm_head")
    return Recompute(out if s.logit_cap is None else (out / s.logit_cap).tanh() * s.logit_cap)


def logits(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of `recompute`: [T, vocab]."""
    return recompute(config, weights, tokens, dtype=dtype).logits
