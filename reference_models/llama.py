"""Llama: full forward from the published equations, no cache.

    x      = embed[t]
    x     += W_o attention(rms(x))            causal, grouped queries, rotary positions
    x     += W_down(silu(W_gate h) * W_up h)  h = rms(x)
    logits = head(rms(x))                     head is the embedding itself where tied

Sources: LLaMA (arXiv 2302.13971), GQA (2305.13245), RoPE (2104.09864), SwiGLU (2002.05202), RMSNorm (1910.07467); rope scaling:
linear position interpolation (2306.15595), YaRN (2309.00071; the ramp runs over the index of the frequency, as in the code that
the paper's checkpoints were trained with), llama3 (model card of Llama 3.1: three bands by wavelength).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_models.recompute import Config, Recompute, ReferenceError, Weights, wide

__all__ = ["logits", "parameters", "recompute"]


class _Shape(NamedTuple):
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    attention_bias: bool
    mlp_bias: bool
    tied: bool


def _positive(config: Config, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ReferenceError(f"config field {name!r} must be a positive integer (got {value!r})")
    return value


def _shape(config: Config) -> _Shape:
    heads, hidden = _positive(config, "num_attention_heads"), _positive(config, "hidden_size")
    kv_heads = heads if config.get("num_key_value_heads") is None else _positive(config, "num_key_value_heads")
    head_dim = hidden // heads if config.get("head_dim") is None else _positive(config, "head_dim")
    if heads % kv_heads:
        raise ReferenceError(f"config field 'num_key_value_heads' ({kv_heads}) must divide num_attention_heads ({heads})")
    if head_dim % 2 or not head_dim:
        raise ReferenceError(f"config field 'head_dim' must be even (got {head_dim})")
    if (config.get("hidden_act") or "silu") != "silu":
        raise ReferenceError(f"config field 'hidden_act' must be 'silu' (got {config['hidden_act']!r})")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ReferenceError(
            "config field 'layer_types' asks for other than full attention, which this reference does not compute"
        )
    return _Shape(
        layers=_positive(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_positive(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=_positive(config, "vocab_size"),
        eps=float(1e-6 if config.get("rms_norm_eps") is None else config["rms_norm_eps"]),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Checkpoint names -> shapes; exactly the tensors that `recompute` reads."""
    s = _shape(config)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab, s.hidden)}
    for layer in range(s.layers):
        linears = {
            "self_attn.q_proj": (q, s.hidden, s.attention_bias),
            "self_attn.k_proj": (kv, s.hidden, s.attention_bias),
            "self_attn.v_proj": (kv, s.hidden, s.attention_bias),
            "self_attn.o_proj": (s.hidden, q, s.attention_bias),
            "mlp.gate_proj": (s.intermediate, s.hidden, s.mlp_bias),
            "mlp.up_proj": (s.intermediate, s.hidden, s.mlp_bias),
            "mlp.down_proj": (s.hidden, s.intermediate, s.mlp_bias),
        }
        for name, (rows, columns, bias) in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (s.hidden,)
    shapes["model.norm.weight"] = (s.hidden,)
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab, s.hidden)
    return shapes


def _rope_settings(config: Config) -> dict[str, Any]:
    """One dict with rope_type and rope_theta, from either spelling; both may be there where they say the same."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            raise ReferenceError(f"rope_parameters and rope_scaling disagree on {name!r} ({new[name]!r}, {old[name]!r})")
    settings = {**new, **old}
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    if settings.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ReferenceError("config field 'partial_rotary_factor' must be 1: llama rotates whole heads")
    if settings["rope_type"] in ("llama3", "yarn") and settings.get("original_max_position_embeddings") is None:
        original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        settings["original_max_position_embeddings"] = original
    return settings


def _number(rope: dict[str, Any], name: str) -> float:
    value = rope.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ReferenceError(f"rope_type {rope['rope_type']!r} needs a positive number {name!r} (got {value!r})")
    return float(value)


def _inverse_frequencies(config: Config, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Radians per token for each pair of a head [head_dim / 2], and the factor on cos and sin."""
    rope = _rope_settings(config)
    kind, theta = rope["rope_type"], _number(rope, "rope_theta")
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    if kind == "default":
        return frequency, 1.0
    if kind == "linear":
        return frequency / _number(rope, "factor"), 1.0
    if kind == "llama3":
        turns = _number(rope, "original_max_position_embeddings") * frequency / (2 * math.pi)  # within the trained length
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * frequency + (1 - kept) * frequency / _number(rope, "factor"), 1.0
    if kind == "yarn":
        return _yarn(rope, config, head_dim, frequency, theta)
    raise ReferenceError(f"rope_type {kind!r} is none of default, linear, llama3, yarn")


def _yarn(rope: dict[str, Any], config: Config, head_dim: int, frequency: Tensor, theta: float) -> tuple[Tensor, float]:
    trained = _number(rope, "original_max_position_embeddings")
    factor = _number(rope, "factor") if rope.get("factor") else _positive(config, "max_position_embeddings") / trained

    def index(turns: float) -> float:  # of the pair that makes so many turns within the trained length
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(rope.get("beta_fast") or 32), index(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    slow = ((torch.arange(head_dim // 2, dtype=frequency.dtype) - first) / width).clamp(0, 1)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1)
    return slow * frequency / factor + (1 - slow) * frequency, float(attention)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.to(wide(x.dtype))
    return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of x [heads, T, head_dim]."""
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def recompute(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Recompute:
    """Logits [T, vocab] of one full forward over `tokens`, in `dtype`; differentiable in the weights."""
    s = _shape(config)

    def weight(name: str) -> Tensor:
        return weights[name].to(dtype)

    def linear(x: Tensor, name: str, bias: bool) -> Tensor:
        return F.linear(x, weight(f"{name}.weight"), weight(f"{name}.bias") if bias else None)

    length = len(tokens)
    frequency, magnitude = _inverse_frequencies(config, s.head_dim, wide(dtype))
    angle = torch.arange(length, dtype=wide(dtype))[:, None] * frequency  # [T, head_dim / 2]
    cos, sin = angle.cos() * magnitude, angle.sin() * magnitude
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    x = weights["model.embed_tokens.weight"][torch.as_tensor(tokens, dtype=torch.long)].to(dtype)  # [T, hidden]
    for layer in range(s.layers):
        name = f"model.layers.{layer}"
        h = _rms(x, weight(f"{name}.input_layernorm.weight"), s.eps)
        q, k, v = (
            linear(h, f"{name}.self_attn.{part}_proj", s.attention_bias).view(length, -1, s.head_dim).transpose(0, 1)
            for part in "qkv"
        )  # [heads, T, head_dim], [kv_heads, T, head_dim] twice
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * s.head_dim**-0.5  # [heads, T, T]
        attention = scores.masked_fill(future, -math.inf).to(wide(dtype)).softmax(-1).to(dtype)
        out = (attention @ v).transpose(0, 1).reshape(length, -1)
        x = x + linear(out, f"{name}.self_attn.o_proj", s.attention_bias)
        h = _rms(x, weight(f"{name}.post_attention_layernorm.weight"), s.eps)
        gated = F.silu(linear(h, f"{name}.mlp.gate_proj", s.mlp_bias)) * linear(h, f"{name}.mlp.up_proj", s.mlp_bias)
        x = x + linear(gated, f"{name}.mlp.down_proj", s.mlp_bias)

    head = "model.embed_tokens.weight" if s.tied else "lm_head.weight"
    return Recompute(F.linear(_rms(x, weight("model.norm.weight"), s.eps), weight(head)))


def logits(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of `recompute`: [T, vocab]."""
    return recompute(config, weights, tokens, dtype=dtype).logits
