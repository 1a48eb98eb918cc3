"""LongCat-Flash with n-gram embeddings (LongCat-Flash-Lite). Full forward, no cache.

Embedding: with n = emb_neighbor_num, k = emb_split_num, T = k (n - 1) tables, g = 2..n, j = 0..k-1, t = (g - 2) k + j,
V = vocab_size, M_t = ngram_vocab_size_ratio * V + 2 t + 1, for the token a_p:

    id_t = (a_p + sum_s prev_s * (V^s mod M_t)) mod M_t         s = 1..g-1, in 64-bit integers
    x_p  = (embed[a_p] + sum_t P_t table_t[id_t]) / (1 + T)

    prev_s = a_(p-s), but 0 before the start, and 0 where any of a_(p-s)..a_(p-1) is EOS; an EOS itself sees its own past

The trunk is LongCat-Flash's:

    h  = x + MLA0(rms(x))
    p  = rms(h)
    s  = MoE(p)                                computed here, added at the very end of the layer
    h += MLP0(p);  h += MLA1(rms(h));  h += MLP1(rms(h)) + s

    MLA: q = W_qb rms(W_qa h) * sqrt(hidden / q_lora_rank)         nope part and rope part; without q_lora_rank: q = W_q h
         c, k_rope = W_kva h;  c = rms(c) * sqrt(hidden / kv_lora_rank);  k_nope, v = W_kvb c     k_rope is one for all heads
         rotary pairs (2i, 2i + 1) on the rope parts only; the scale is (nope + rope)^-0.5, times YaRN's magnitude squared
    MoE: scores = softmax(W p) in float32 over real and zero experts; the top k by scores + correction bias are chosen, and
         weighted by their scores alone * routed_scaling_factor; a zero expert gives p itself

Sources: config.json and tensor names of LongCat-Flash-Lite; LongCat-Flash technical report (arXiv 2509.01322); MLA: DeepSeek-V2
(2405.04434); YaRN (2309.00071). The two latent norms have an eps of their own, 1e-6, whatever rms_norm_eps says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_models.recompute import Config, Recompute, ReferenceError, Weights, wide

__all__ = ["IGNORED", "canonical", "ignored", "logits", "ngram_ids", "parameters", "recompute"]

IGNORED = ("model.mtp.",)  # prefixes of published tensors that plain decoding does not use: multi-token prediction
_LATENT_EPS = 1e-6
_ROPE = frozenset({"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"})
_YARN = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
_NGRAM = frozenset({"ngram_vocab_size_ratio", "emb_neighbor_num", "emb_split_num"})
# Keys of other embedding rules, which later models have: oe_ignored_token_ids, ngram_exclude_sp_token, special_token_scope.
_NGRAM_LIKE = re.compile(r"(?i)ngram|^oe_|^emb_|^special_token_scope$|^ignored_token")
_OLDER = re.compile(r"model\.oe_embed_(tokens|proj)(\d+)\.weight")


class _Shape(NamedTuple):
    layers: int
    hidden: int
    ffn: int
    expert_ffn: int
    heads: int
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    v: int
    experts: int
    zero_experts: int
    topk: int
    vocab: int
    eps: float
    router_bias: bool
    neighbours: int
    splits: int
    ratio: int

    @property
    def tables(self) -> int:
        return self.splits * (self.neighbours - 1)

    def rows(self, table: int) -> int:
        return self.ratio * self.vocab + 2 * table + 1


def ignored(name: str) -> bool:
    """Whether a checkpoint may hold this tensor beside `parameters`."""
    return name.startswith(IGNORED)


def canonical(name: str) -> str:
    """The name in `parameters` of a tensor: the embedding's tables and projections have an older spelling (oe_embed_...)."""
    older = _OLDER.fullmatch(name)
    if not older:
        return name
    return f"model.ngram_embeddings.{'embedders' if older[1] == 'tokens' else 'post_projs'}.{older[2]}.weight"


def _count(config: Config, name: str, least: int = 1) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ReferenceError(f"config field {name!r} must be an integer of at least {least} (got {value!r})")
    return value


def _shape(config: Config) -> _Shape:
    computed: dict[str, Any] = {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    for name, value in computed.items():
        if config.get(name, value) not in (None, value):
            raise ReferenceError(f"config field {name!r} must be {value!r} (got {config[name]!r})")
    unknown = {name for name, value in config.items() if _NGRAM_LIKE.search(name) and name not in _NGRAM and value is not None}
    if unknown:
        raise ReferenceError(f"config field {min(unknown)!r} changes the n-gram embedding and is not computed here")
    s = _Shape(
        # some copies of the config count the attention sub-layers instead, two a layer
        layers=_count(config, "num_layers") if "num_layers" in config else _count(config, "num_hidden_layers", 2) // 2,
        hidden=_count(config, "hidden_size"),
        ffn=_count(config, "ffn_hidden_size"),
        expert_ffn=_count(config, "expert_ffn_hidden_size"),
        heads=_count(config, "num_attention_heads"),
        q_lora=None if config.get("q_lora_rank") is None else _count(config, "q_lora_rank"),
        kv_lora=_count(config, "kv_lora_rank"),
        nope=_count(config, "qk_nope_head_dim"),
        rope=_count(config, "qk_rope_head_dim", 2),
        v=_count(config, "v_head_dim"),
        experts=_count(config, "n_routed_experts"),
        zero_experts=_count(config, "zero_expert_num", 0) if config.get("zero_expert_num") is not None else 0,
        topk=_count(config, "moe_topk"),
        vocab=_count(config, "vocab_size"),
        eps=float(1e-5 if config.get("rms_norm_eps") is None else config["rms_norm_eps"]),
        router_bias=bool(config.get("router_bias", False)),
        neighbours=_count(config, "emb_neighbor_num", 2),
        splits=_count(config, "emb_split_num"),
        ratio=_count(config, "ngram_vocab_size_ratio"),
    )
    if s.rope % 2:
        raise ReferenceError(f"config field 'qk_rope_head_dim' must be even (got {s.rope})")
    if s.topk > s.experts + s.zero_experts:
        raise ReferenceError(f"config field 'moe_topk' must be at most n_routed_experts + zero_expert_num (got {s.topk})")
    if s.hidden % s.tables:
        raise ReferenceError(
            f"config field 'hidden_size' must be a multiple of the number of n-gram tables, {s.tables} (got {s.hidden})"
        )
    return s


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Checkpoint names -> shapes; exactly the tensors that `recompute` reads. Zero experts have none."""
    s = _shape(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab, s.hidden)}
    for table in range(s.tables):
        shapes[f"model.ngram_embeddings.embedders.{table}.weight"] = (s.rows(table), s.hidden // s.tables)
        shapes[f"model.ngram_embeddings.post_projs.{table}.weight"] = (s.hidden, s.hidden // s.tables)

    def mlp(name: str, width: int) -> None:
        for part in ("gate", "up"):
            shapes[f"{name}.{part}_proj.weight"] = (width, s.hidden)
        shapes[f"{name}.down_proj.weight"] = (s.hidden, width)

    for layer in range(s.layers):
        name = f"model.layers.{layer}"
        for i in range(2):
            attention = f"{name}.self_attn.{i}"
            shapes[f"{name}.input_layernorm.{i}.weight"] = (s.hidden,)
            shapes[f"{name}.post_attention_layernorm.{i}.weight"] = (s.hidden,)
            if s.q_lora is None:
                shapes[f"{attention}.q_proj.weight"] = (s.heads * (s.nope + s.rope), s.hidden)
            else:
                shapes[f"{attention}.q_a_proj.weight"] = (s.q_lora, s.hidden)
                shapes[f"{attention}.q_a_layernorm.weight"] = (s.q_lora,)
                shapes[f"{attention}.q_b_proj.weight"] = (s.heads * (s.nope + s.rope), s.q_lora)
            shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (s.kv_lora + s.rope, s.hidden)
            shapes[f"{attention}.kv_a_layernorm.weight"] = (s.kv_lora,)
            shapes[f"{attention}.kv_b_proj.weight"] = (s.heads * (s.nope + s.v), s.kv_lora)
            shapes[f"{attention}.o_proj.weight"] = (s.hidden, s.heads * s.v)
            mlp(f"{name}.mlps.{i}", s.ffn)
        shapes[f"{name}.mlp.router.classifier.weight"] = (s.experts + s.zero_experts, s.hidden)
        if s.router_bias:
            shapes[f"{name}.mlp.router.classifier.bias"] = (s.experts + s.zero_experts,)
        shapes[f"{name}.mlp.router.e_score_correction_bias"] = (s.experts + s.zero_experts,)
        for expert in range(s.experts):
            mlp(f"{name}.mlp.experts.{expert}", s.expert_ffn)
    shapes["model.norm.weight"] = (s.hidden,)
    shapes["lm_head.weight"] = (s.vocab, s.hidden)
    return shapes


def ngram_ids(config: Config, tokens: Sequence[int]) -> Tensor:
    """Row of every table for every token, int64 [tables, T]."""
    s = _shape(config)
    eos = config.get("eos_token_id")
    ends = set(eos) if isinstance(eos, (list, tuple)) else {eos}
    rows = []
    for g in range(2, s.neighbours + 1):
        previous = [[0] * len(tokens) for _ in range(g)]  # previous[s][p]; previous[0] is not used
        for p in range(len(tokens)):
            for back in range(1, g):
                if back > p or tokens[p - back] in ends:
                    break  # so that everything further back stays 0, too
                previous[back][p] = tokens[p - back]
        for table in range((g - 2) * s.splits, (g - 1) * s.splits):
            ids = torch.as_tensor(tokens, dtype=torch.int64)
            for back in range(1, g):
                ids = ids + torch.as_tensor(previous[back], dtype=torch.int64) * pow(s.vocab, back, s.rows(table))
            rows.append(ids % s.rows(table))
    return torch.stack(rows)


def _rotary(config: Config, width: int, dtype: torch.dtype) -> tuple[Tensor, float, float]:
    """Radians per token for each pair [width / 2], the factor on cos and sin, the factor on the softmax scale."""
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 5e6)
    frequency = theta ** -(torch.arange(0, width, 2, dtype=dtype) / width)
    if kind == "default":
        return frequency, 1.0, 1.0
    if kind != "yarn":
        raise ReferenceError(f"rope_type must be 'default' or 'yarn' (got {kind!r})")
    unknown = {name for name, value in rope.items() if name not in _ROPE | _YARN and value is not None}
    if unknown:
        raise ReferenceError(f"rope_type 'yarn' with {min(unknown)!r} is not computed here (got {rope[min(unknown)]!r})")
    missing = {"factor", "original_max_position_embeddings"} - rope.keys()
    if missing:
        raise ReferenceError(f"rope_type 'yarn' needs {sorted(missing)[0]!r}")
    factor, trained = float(rope["factor"]), float(rope["original_max_position_embeddings"])

    def index(turns: float) -> float:  # of the pair that makes so many turns within the trained length
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    first = max(math.floor(index(rope.get("beta_fast") or 32)), 0)
    last = min(math.ceil(index(rope.get("beta_slow") or 1)), width - 1)
    slow = ((torch.arange(width // 2, dtype=dtype) - first) / (last - first or 0.001)).clamp(0, 1)
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    cos_factor = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1)
    return slow * frequency / factor + (1 - slow) * frequency, cos_factor, magnitude(all_dim) ** 2 if all_dim else 1.0


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.to(wide(x.dtype))
    return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of x [heads, T, rope]."""
    even, odd = x[..., 0::2].to(cos.dtype), x[..., 1::2].to(cos.dtype)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


def recompute(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Recompute:
    """Logits [T, vocab] of one full forward over `tokens`, in `dtype`, the router in at least float32; differentiable.

    Margins [T]: the least gap, over the layers, between the last chosen and the first unchosen corrected score.
    """
    s = _shape(config)
    named = {canonical(name): tensor for name, tensor in weights.items()}
    if len(named) != len(weights):
        raise ReferenceError("the n-gram embedding's tensors are there in both spellings")
    weights = named
    length = len(tokens)
    high = wide(dtype)
    frequency, cos_factor, scale_factor = _rotary(config, s.rope, high)
    angle = torch.arange(length, dtype=high)[:, None] * frequency  # [T, rope / 2]
    cos, sin = angle.cos() * cos_factor, angle.sin() * cos_factor
    scale = (s.nope + s.rope) ** -0.5 * scale_factor
    q_scale = math.sqrt(s.hidden / s.q_lora) if config.get("mla_scale_q_lora", True) and s.q_lora else 1.0
    kv_scale = math.sqrt(s.hidden / s.kv_lora) if config.get("mla_scale_kv_lora", True) else 1.0
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    margins = torch.full((length,), math.inf, dtype=high)
    choices: list[Tensor] = []  # of each layer [T, topk]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"].to(dtype))

    def norm(x: Tensor, name: str, eps: float = s.eps) -> Tensor:
        return _rms(x, weights[f"{name}.weight"].to(dtype), eps)

    def attend(h: Tensor, name: str) -> Tensor:
        if s.q_lora is None:
            q = linear(h, f"{name}.q_proj")
        else:
            q = linear(norm(linear(h, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", _LATENT_EPS), f"{name}.q_b_proj") * q_scale
        q_nope, q_rope = q.view(length, s.heads, -1).transpose(0, 1).split([s.nope, s.rope], -1)  # [heads, T, nope], ...
        latent, k_rope = linear(h, f"{name}.kv_a_proj_with_mqa").split([s.kv_lora, s.rope], -1)
        latent = norm(latent, f"{name}.kv_a_layernorm", _LATENT_EPS) * kv_scale  # [T, kv_lora]
        k_nope, v = linear(latent, f"{name}.kv_b_proj").view(length, s.heads, -1).transpose(0, 1).split([s.nope, s.v], -1)
        k_rope = _rotate(k_rope[None], cos, sin).expand(s.heads, -1, -1)
        q, k = torch.cat([q_nope, _rotate(q_rope, cos, sin)], -1), torch.cat([k_nope, k_rope], -1)
        scores = (q @ k.transpose(1, 2)) * scale  # [heads, T, T]
        attention = scores.masked_fill(future, -math.inf).to(high).softmax(-1).to(dtype)
        return linear((attention @ v).transpose(0, 1).reshape(length, -1), f"{name}.o_proj")

    def mlp(h: Tensor, name: str) -> Tensor:
        return linear(F.silu(linear(h, f"{name}.gate_proj")) * linear(h, f"{name}.up_proj"), f"{name}.down_proj")

    def route(p: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Weight of every expert for every token [T, experts + zero_experts], 0 where not chosen; margins [T]."""
        bias = weights[f"{name}.classifier.bias"].to(high) if s.router_bias else None
        scores = F.linear(p.to(high), weights[f"{name}.classifier.weight"].to(high), bias).softmax(-1)
        corrected, order = (scores + weights[f"{name}.e_score_correction_bias"].to(high)).sort(-1, descending=True)
        choices.append(order[:, : s.topk].sort(-1).values)
        chosen = torch.zeros_like(scores).scatter(-1, order[:, : s.topk], 1.0) * scores
        if config.get("norm_topk_prob", False):
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        if s.topk == scores.shape[-1]:
            return chosen * config.get("routed_scaling_factor", 1.0), torch.full_like(margins, math.inf)
        return chosen * config.get("routed_scaling_factor", 1.0), corrected[:, s.topk - 1] - corrected[:, s.topk]

    def moe(p: Tensor, name: str) -> Tensor:
        nonlocal margins
        weight, gap = route(p, f"{name}.router")
        margins = torch.minimum(margins, gap.detach())
        out = weight[:, s.experts :].sum(-1, keepdim=True) * p.to(high)  # zero experts are the identity
        for expert in range(s.experts):
            rows = weight[:, expert].nonzero().squeeze(-1)
            if len(rows):
                own = mlp(p[rows], f"{name}.experts.{expert}").to(high) * weight[rows, expert, None]
                out = out.index_add(0, rows, own)
        return out.to(dtype)

    x = weights["model.embed_tokens.weight"][torch.as_tensor(tokens, dtype=torch.long)].to(dtype)  # [T, hidden]
    for table, ids in enumerate(ngram_ids(config, tokens)):
        rows = weights[f"model.ngram_embeddings.embedders.{table}.weight"][ids].to(dtype)  # [T, hidden / tables]
        x = x + linear(rows, f"model.ngram_embeddings.post_projs.{table}")
    x = x / (1 + s.tables)
    for layer in range(s.layers):
        name = f"model.layers.{layer}"
        h = x + attend(norm(x, f"{name}.input_layernorm.0"), f"{name}.self_attn.0")
        p = norm(h, f"{name}.post_attention_layernorm.0")
        shortcut = moe(p, f"{name}.mlp")
        h = h + mlp(p, f"{name}.mlps.0")
        h = h + attend(norm(h, f"{name}.input_layernorm.1"), f"{name}.self_attn.1")
        x = h + mlp(norm(h, f"{name}.post_attention_layernorm.1"), f"{name}.mlps.1") + shortcut
    return Recompute(linear(norm(x, "model.norm"), "lm_head"), margins, torch.cat(choices, -1))


def logits(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of `recompute`: [T, vocab]."""
    return recompute(config, weights, tokens, dtype=dtype).logits
