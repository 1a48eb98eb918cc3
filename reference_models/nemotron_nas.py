"""Nemotron-NAS (DeciLM): Llama whose every layer has its own attention and feed-forward, or none. Full forward, no cache.

    x += attention(rms(x))     or  x += W rms(x)  (replace_with_linear)  or nothing, not even the norm  (no_op)
    x += W_down(silu(W_gate h) * W_up h)          with the same two replacements
    logits = head(rms(x))

`block_configs` holds one entry a layer: `attention` (n_heads_in_group: queries that share a key head) and `ffn` (ffn_mult: the
width of the MLP). Attention is Llama's: rotary halves, causal, scale head_dim^-0.5.

Sources: config.json and tensor names of Llama-3_3-Nemotron-Super-49B; Puzzle (arXiv 2411.19146) for the block choices;
the llama3 rope bands from the model card of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_models.recompute import Config, Recompute, ReferenceError, Weights, wide

__all__ = ["intermediate_size", "logits", "parameters", "recompute"]

_READ = {"attention": {"no_op", "replace_with_linear", "n_heads_in_group"}, "ffn": {"no_op", "replace_with_linear", "ffn_mult"}}


class _Layer(NamedTuple):
    """`attention` and `ffn`: 'full', 'linear' or 'no_op'. kv_heads and intermediate mean something where the kind is 'full'."""

    attention: str
    kv_heads: int
    ffn: str
    intermediate: int


class _Shape(NamedTuple):
    layers: list[_Layer]
    hidden: int
    heads: int
    head_dim: int
    vocab: int
    eps: float
    tied: bool


def intermediate_size(ffn_mult: float, hidden: int) -> int:
    """Width of the MLP: two thirds of ffn_mult * hidden, cut to an integer, then up to a multiple of 256."""
    return -(-int(2 * ffn_mult * hidden / 3) // 256) * 256


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ReferenceError(f"config field {name!r} must be a positive integer (got {value!r})")
    return value


def _kind(config: Any, where: str) -> str:
    """What a half block is; refuses fields that are set and not computed here (windows, sinks, sparsity)."""
    if not isinstance(config, Mapping):
        raise ReferenceError(f"config field {where!r} must be an object (got {config!r})")
    for name, value in config.items():
        if name not in _READ[where.rpartition(".")[2]] and value not in (None, False, 0):
            raise ReferenceError(f"config field '{where}.{name}' must be unset: it is not computed here (got {value!r})")
    if config.get("no_op"):
        return "no_op"
    return "linear" if config.get("replace_with_linear") else "full"


def _layer(block: Any, index: int, heads: int, hidden: int) -> _Layer:
    where = f"block_configs[{index}]"
    if not isinstance(block, Mapping) or any(value for name, value in block.items() if name not in _READ):
        raise ReferenceError(f"config field {where!r} must set 'attention' and 'ffn' and nothing else (got {block!r})")
    attention, ffn = _kind(block.get("attention"), f"{where}.attention"), _kind(block.get("ffn"), f"{where}.ffn")
    kv_heads = intermediate = 0
    if attention == "full":
        group = block["attention"].get("n_heads_in_group")
        if not isinstance(group, int) or group <= 0 or heads % group:
            raise ReferenceError(
                f"config field '{where}.attention.n_heads_in_group' must divide num_attention_heads {heads} (got {group!r})"
            )
        kv_heads = heads // group
    if ffn == "full":
        mult = block["ffn"].get("ffn_mult")
        if not isinstance(mult, (int, float)) or not 0 < mult < math.inf:
            raise ReferenceError(f"config field '{where}.ffn.ffn_mult' must be a positive number (got {mult!r})")
        intermediate = intermediate_size(mult, hidden)
    return _Layer(attention, kv_heads, ffn, intermediate)


def _shape(config: Config) -> _Shape:
    heads, hidden, count = (_positive(config, n) for n in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    if hidden % heads or hidden // heads % 2:
        raise ReferenceError(
            f"config field 'hidden_size' must be an even multiple of num_attention_heads {heads} (got {hidden})"
        )
    if (config.get("hidden_act") or "silu") != "silu":
        raise ReferenceError(f"config field 'hidden_act' must be 'silu' (got {config['hidden_act']!r})")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise ReferenceError(f"config field {name!r} must be false: no published checkpoint has these biases")
    blocks = config.get("block_configs")
    if not isinstance(blocks, Sequence) or len(blocks) != count:
        got = len(blocks) if isinstance(blocks, Sequence) else blocks
        raise ReferenceError(f"config field 'block_configs' must have num_hidden_layers = {count} entries (got {got!r})")
    return _Shape(
        layers=[_layer(block, index, heads, hidden) for index, block in enumerate(blocks)],
        hidden=hidden,
        heads=heads,
        head_dim=hidden // heads,
        vocab=_positive(config, "vocab_size"),
        eps=float(1e-5 if config.get("rms_norm_eps") is None else config["rms_norm_eps"]),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Checkpoint names -> shapes; exactly the tensors that `recompute` reads. A no_op half has none, not even its norm."""
    s = _shape(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab, s.hidden)}
    for index, layer in enumerate(s.layers):
        name = f"model.layers.{index}"
        if layer.attention != "no_op":
            shapes[f"{name}.input_layernorm.weight"] = (s.hidden,)
        if layer.attention == "linear":
            shapes[f"{name}.self_attn.linear_attn.weight"] = (s.hidden, s.hidden)
        if layer.attention == "full":
            for part, rows in (("q", s.heads), ("k", layer.kv_heads), ("v", layer.kv_heads), ("o", s.heads)):
                shapes[f"{name}.self_attn.{part}_proj.weight"] = (rows * s.head_dim, s.hidden)  # o: heads * head_dim = hidden
        if layer.ffn != "no_op":
            shapes[f"{name}.post_attention_layernorm.weight"] = (s.hidden,)
        if layer.ffn == "linear":
            shapes[f"{name}.mlp.linear_mlp.weight"] = (s.hidden, s.hidden)
        if layer.ffn == "full":
            for part in ("gate", "up"):
                shapes[f"{name}.mlp.{part}_proj.weight"] = (layer.intermediate, s.hidden)
            shapes[f"{name}.mlp.down_proj.weight"] = (s.hidden, layer.intermediate)
    shapes["model.norm.weight"] = (s.hidden,)
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab, s.hidden)
    return shapes


def _inverse_frequencies(config: Config, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Radians per token for each pair of a head [head_dim / 2]; reads rope_theta + rope_scaling, or rope_parameters."""
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    if kind == "default":
        return frequency
    if kind != "llama3":
        raise ReferenceError(f"rope_type must be 'default' or 'llama3' (got {kind!r})")
    missing = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"} - rope.keys()
    if missing:
        raise ReferenceError(f"rope_type 'llama3' needs {sorted(missing)[0]!r}")
    wavelength = 2 * math.pi / frequency
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / wavelength - low) / (high - low)
    slow = frequency / rope["factor"]
    between = (1 - smooth) * slow + smooth * frequency
    return torch.where(wavelength < original / high, frequency, torch.where(wavelength > original / low, slow, between))


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
    length = len(tokens)
    frequency = _inverse_frequencies(config, s.head_dim, wide(dtype))
    angle = torch.arange(length, dtype=wide(dtype))[:, None] * frequency  # [T, head_dim / 2]
    cos, sin = angle.cos(), angle.sin()
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"].to(dtype))

    def norm(x: Tensor, name: str) -> Tensor:
        return _rms(x, weights[f"{name}.weight"].to(dtype), s.eps)

    def attend(h: Tensor, name: str, kv_heads: int) -> Tensor:
        q, k, v = (linear(h, f"{name}.{part}_proj").view(length, -1, s.head_dim).transpose(0, 1) for part in "qkv")
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)  # [heads, T, head_dim], [kv_heads, T, head_dim]
        k, v = (t.repeat_interleave(s.heads // kv_heads, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * s.head_dim**-0.5  # [heads, T, T]
        attention = scores.masked_fill(future, -math.inf).to(wide(dtype)).softmax(-1).to(dtype)
        return linear((attention @ v).transpose(0, 1).reshape(length, -1), f"{name}.o_proj")

    def mlp(h: Tensor, name: str) -> Tensor:
        return linear(F.silu(linear(h, f"{name}.gate_proj")) * linear(h, f"{name}.up_proj"), f"{name}.down_proj")

    x = weights["model.embed_tokens.weight"][torch.as_tensor(tokens, dtype=torch.long)].to(dtype)  # [T, hidden]
    for index, layer in enumerate(s.layers):
        name = f"model.layers.{index}"
        if layer.attention != "no_op":
            h = norm(x, f"{name}.input_layernorm")
            full = layer.attention == "full"
            x = x + (attend(h, f"{name}.self_attn", layer.kv_heads) if full else linear(h, f"{name}.self_attn.linear_attn"))
        if layer.ffn != "no_op":
            h = norm(x, f"{name}.post_attention_layernorm")
            x = x + (mlp(h, f"{name}.mlp") if layer.ffn == "full" else linear(h, f"{name}.mlp.linear_mlp"))
    return Recompute(linear(norm(x, "model.norm"), "model.embed_tokens" if s.tied else "lm_head"))


def logits(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of `recompute`: [T, vocab]."""
    return recompute(config, weights, tokens, dtype=dtype).logits
