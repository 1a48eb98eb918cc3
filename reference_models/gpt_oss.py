"""gpt-oss: windows and full attention by turns, a sink in every softmax, clamped experts with biases. Full forward, no cache.

    x     += W_o attention(rms(x)) + b_o          softmax over the keys and one learned logit a head (the sink), whose
                                                  share is then dropped; grouped queries, rotary halves, YaRN
    x     += sum_e p_e expert_e(rms(x))           the top k by router logits, weighted by the softmax over these k alone
    logits = head(rms(x))

    expert: u = W_gate_up h + b; gate = min(u[even], limit), up = clip(u[odd], -limit, limit)
            W_down((up + 1) * gate * sigmoid(1.702 gate)) + b

A sliding layer attends to the token itself and sliding_window - 1 before it.

Sources: gpt-oss model card (arXiv 2508.10925), config.json and tensor names of gpt-oss-20b; YaRN (2309.00071), whose ramp these
checkpoints do not round to whole pairs (truncate: false) and whose factor on cos and sin is 0.1 ln(factor) + 1. A config that
leaves fields out has the defaults of the published config class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_models.recompute import Config, Recompute, ReferenceError, Weights, wide

__all__ = ["logits", "parameters", "recompute"]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class _Shape(NamedTuple):
    local: list[bool]  # by layer
    window: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    topk: int
    vocab: int
    eps: float
    alpha: float
    limit: float
    attention_bias: bool
    tied: bool


def _count(config: Config, name: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ReferenceError(f"config field {name!r} must be a positive integer (got {value!r})")
    return value


def _positive(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ReferenceError(f"config field {name!r} must be a positive number (got {value!r})")
    return float(value)


def _shape(config: Config) -> _Shape:
    if (config.get("hidden_act") or "silu") != "silu":
        raise ReferenceError(f"config field 'hidden_act' must be 'silu' (got {config['hidden_act']!r})")
    layers = _count(config, "num_hidden_layers", 36)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_GLOBAL if layer % 2 else _LOCAL for layer in range(layers)]
    if not isinstance(kinds, Sequence) or len(kinds) != layers or any(kind not in (_LOCAL, _GLOBAL) for kind in kinds):
        raise ReferenceError(f"config field 'layer_types' must hold {layers} of {_LOCAL} and {_GLOBAL} (got {kinds!r:.80})")
    s = _Shape(
        local=[kind == _LOCAL for kind in kinds],
        window=_count(config, "sliding_window", 128),
        hidden=_count(config, "hidden_size", 2880),
        intermediate=_count(config, "intermediate_size", 2880),
        heads=_count(config, "num_attention_heads", 64),
        kv_heads=_count(config, "num_key_value_heads", 8),
        head_dim=_count(config, "head_dim", 64),
        experts=_count(config, "num_local_experts", config.get("num_experts") or 128),
        topk=_count(config, "num_experts_per_tok", config.get("experts_per_token") or 4),
        vocab=_count(config, "vocab_size", 201_088),
        eps=_positive(config, "rms_norm_eps", 1e-5),
        alpha=_positive(config, "swiglu_alpha", 1.702),
        limit=_positive(config, "swiglu_limit", 7.0),
        attention_bias=bool(config.get("attention_bias", True)),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    if s.heads % s.kv_heads:
        raise ReferenceError(f"config field 'num_key_value_heads' ({s.kv_heads}) must divide num_attention_heads ({s.heads})")
    if s.head_dim % 2:
        raise ReferenceError(f"config field 'head_dim' must be even (got {s.head_dim})")
    if s.topk > s.experts:
        raise ReferenceError(f"config field 'num_experts_per_tok' must be at most num_local_experts {s.experts} (got {s.topk})")
    return s


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Checkpoint names -> shapes; exactly the tensors that `recompute` reads.

    Expert matrices are [experts, in, out]; published files hold them as MXFP4, which the loader decodes to these.
    """
    s = _shape(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab, s.hidden)}
    for layer in range(len(s.local)):
        name = f"model.layers.{layer}"
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        for part, rows, columns in (("q", q, s.hidden), ("k", kv, s.hidden), ("v", kv, s.hidden), ("o", s.hidden, q)):
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (rows, columns)
            if s.attention_bias:
                shapes[f"{name}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{name}.self_attn.sinks"] = (s.heads,)
        for part in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{name}.{part}.weight"] = (s.hidden,)
        shapes[f"{name}.mlp.router.weight"] = (s.experts, s.hidden)
        shapes[f"{name}.mlp.router.bias"] = (s.experts,)
        shapes[f"{name}.mlp.experts.gate_up_proj"] = (s.experts, s.hidden, 2 * s.intermediate)
        shapes[f"{name}.mlp.experts.gate_up_proj_bias"] = (s.experts, 2 * s.intermediate)
        shapes[f"{name}.mlp.experts.down_proj"] = (s.experts, s.intermediate, s.hidden)
        shapes[f"{name}.mlp.experts.down_proj_bias"] = (s.experts, s.hidden)
    shapes["model.norm.weight"] = (s.hidden,)
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab, s.hidden)
    return shapes


def _rope(config: Config, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Radians per token for each pair of a head [head_dim / 2], and the factor on cos and sin."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            raise ReferenceError(f"rope_parameters and rope_scaling disagree on {name!r} ({new[name]!r}, {old[name]!r})")
    rope = {**new, **old}
    if "rope_parameters" not in config and "rope_scaling" not in config:
        rope = dict(_DEFAULT_ROPE)
    theta = _positive(rope, "rope_theta", _positive(config, "rope_theta", 150_000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    if kind == "default":
        return frequency, 1.0
    if kind != "yarn":
        raise ReferenceError(f"rope_type must be 'default' or 'yarn' (got {kind!r})")
    lengths = config.get("initial_context_length") or config.get("max_position_embeddings")
    trained, factor = _positive(rope, "original_max_position_embeddings", lengths), _positive(rope, "factor")

    def index(turns: float) -> float:  # of the pair that makes so many turns within the trained length
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(_positive(rope, "beta_fast", 32.0)), index(_positive(rope, "beta_slow", 1.0))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    slow = ((torch.arange(head_dim // 2, dtype=dtype) - first) / (last - first or 0.001)).clamp(0, 1)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    mscale, all_dim, given = rope.get("mscale"), rope.get("mscale_all_dim"), rope.get("attention_factor")
    if given is None:
        given = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1)
    return slow * frequency / factor + (1 - slow) * frequency, float(given)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.to(wide(x.dtype))
    return (weight.to(y.dtype) * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of x [heads, T, head_dim]."""
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def recompute(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Recompute:
    """Logits [T, vocab] of one full forward over `tokens`, in `dtype`; differentiable in the weights.

    Margins [T]: the least gap, over the layers, between the last chosen and the first unchosen router logit.
    """
    s = _shape(config)
    length, high = len(tokens), wide(dtype)
    position = torch.arange(length)
    back = position[:, None] - position  # [T, T]: how many tokens the key is before the query
    hidden_keys = {False: back < 0, True: (back < 0) | (back >= s.window)}
    frequency, magnitude = _rope(config, s.head_dim, high)
    angle = position.to(high)[:, None] * frequency  # [T, head_dim / 2]
    cos, sin = angle.cos() * magnitude, angle.sin() * magnitude
    margins = torch.full((length,), math.inf, dtype=high)
    choices: list[Tensor] = []  # of each layer [T, topk]

    def linear(x: Tensor, name: str, bias: bool) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"].to(dtype), weights[f"{name}.bias"].to(dtype) if bias else None)

    def norm(x: Tensor, name: str) -> Tensor:
        return _rms(x, weights[f"{name}.weight"], s.eps)

    def attend(h: Tensor, name: str, local: bool) -> Tensor:
        q, k, v = (
            linear(h, f"{name}.{part}_proj", s.attention_bias).view(length, -1, s.head_dim).transpose(0, 1) for part in "qkv"
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, 0) for t in (k, v))  # [heads, T, head_dim]
        scores = ((q @ k.transpose(1, 2)) * s.head_dim**-0.5).masked_fill(hidden_keys[local], -math.inf).to(high)
        sinks = weights[f"{name}.sinks"].to(high)[:, None, None].expand(-1, length, 1)
        seen = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(dtype)
        return linear((seen @ v).transpose(0, 1).reshape(length, -1), f"{name}.o_proj", s.attention_bias)

    def route(h: Tensor, name: str) -> Tensor:
        """Weight of every expert for every token [T, experts], 0 where not chosen."""
        nonlocal margins
        ordered, order = linear(h, name, True).to(high).sort(-1, descending=True)
        if s.topk < s.experts:
            margins = torch.minimum(margins, (ordered[:, s.topk - 1] - ordered[:, s.topk]).detach())
        choices.append(order[:, : s.topk].sort(-1).values)
        shares = ordered[:, : s.topk].softmax(-1)
        return torch.zeros(length, s.experts, dtype=high).scatter(-1, order[:, : s.topk], shares)

    def expert(h: Tensor, name: str, number: int) -> Tensor:
        up_weight, up_bias, down_weight, down_bias = (
            weights[f"{name}.{part}"][number].to(dtype)
            for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        )
        both = h @ up_weight + up_bias
        gate, up = both[:, 0::2].clamp(max=s.limit), both[:, 1::2].clamp(-s.limit, s.limit)
        return ((up + 1) * gate * torch.sigmoid(s.alpha * gate)) @ down_weight + down_bias

    def moe(h: Tensor, name: str) -> Tensor:
        weight = route(h, f"{name}.router")
        out = torch.zeros_like(h, dtype=high)
        for number in range(s.experts):
            rows = weight[:, number].nonzero().squeeze(-1)
            if len(rows):
                own = expert(h[rows], f"{name}.experts", number).to(high) * weight[rows, number, None]
                out = out.index_add(0, rows, own)
        return out.to(dtype)

    x = weights["model.embed_tokens.weight"][torch.as_tensor(tokens, dtype=torch.long)].to(dtype)  # [T, hidden]
    for layer, local in enumerate(s.local):
        name = f"model.layers.{layer}"
        x = x + attend(norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", local)
        x = x + moe(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
    head = "model.embed_tokens" if s.tied else "lm_head"
    return Recompute(linear(norm(x, "model.norm"), head, False), margins, torch.cat(choices, -1))


def logits(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of `recompute`: [T, vocab]."""
    return recompute(config, weights, tokens, dtype=dtype).logits
