"""Nemotron-H and Nemotron 3: one mixer a layer, by a pattern. Full forward, no cache; Mamba2 by its plain recurrence.

    x += mixer(rms(x));  logits = head(rms(x))

    M  Mamba2:   z, xBC, dt = W_in h;  xBC = silu(causal depthwise convolution(xBC));  x, B, C = xBC
                 dt = softplus(dt + dt_bias), held to time_step_limit;  S = exp(-dt exp(A_log)) S + dt x B^T;  y = S C + D x
                 W_out(w * rms(y * silu(z)))             gated first, then normed in n_groups parts
    *  attention causal, grouped queries, no positions at all
    -  MLP       W_down relu(W_up h)^2
    E  experts   p = sigmoid(W h) in float32; the top k by p + correction bias, within the topk_group best of n_group groups (by
                 the sum of their two best), weighted by p, over their sum where norm_topk_prob, times routed_scaling_factor;
                 an expert is an MLP, between W_fc1 and W_fc2 where moe_latent_size is set; a shared MLP is always added

The MTP head (`mtp`) guesses one token further: W_eh [rms(embedding of token t + 1), rms(hidden of token t)], layers as
above, a norm, the same head.

Sources: Nemotron-H (arXiv 2504.03624), Nemotron 3 Nano's config.json and tensor names, Mamba2 (2405.21060), DeepSeek-V3
(2412.19437) for the choice of groups and for multi-token prediction.
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

__all__ = ["Guess", "head", "hidden_states", "logits", "mtp", "mtp_parameters", "parameters", "recompute", "renamed"]

_KINDS = {
    **{"M": "M", "mamba": "M", "mamba2": "M", "linear_attention": "M"},
    **{"*": "*", "A": "*", "attention": "*", "full_attention": "*"},
    **{"-": "-", "mlp": "-", "E": "E", "moe": "E"},
}
_COMPUTED = {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "sliding_window": ()}


class _Shape(NamedTuple):
    pattern: str
    hidden: int
    vocab: int
    eps: float
    tied: bool
    # attention; the rest is zero where the pattern has no such layer
    heads: int
    kv_heads: int
    head_dim: int
    # Mamba2
    mamba_heads: int
    mamba_dim: int
    state: int
    groups: int
    kernel: int
    least: float  # of the time step
    most: float
    # MLP and experts
    intermediate: int
    experts: int
    topk: int
    expert_groups: int
    kept_groups: int
    expert_width: int
    shared_width: int
    latent: int

    @property
    def inner(self) -> int:
        return self.mamba_heads * self.mamba_dim

    @property
    def conv(self) -> int:
        return self.inner + 2 * self.groups * self.state


def _text(config: Config) -> Config:
    for name in ("llm_config", "text_config"):
        if isinstance(config.get(name), Mapping):
            return config[name]
    return config


def _count(config: Config, name: str, default: int | None = None, least: int = 1) -> int:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ReferenceError(f"config field {name!r} must be an integer of at least {least} (got {value!r})")
    return value


def _pattern(config: Config, names: Sequence[str]) -> str:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        layers = value.strip() if isinstance(value, str) else value
        if not layers or not all(isinstance(kind, str) and kind in _KINDS for kind in layers):
            raise ReferenceError(f"config field {name!r} must list layers of {', '.join(_KINDS)} (got {value!r:.80})")
        return "".join(_KINDS[kind] for kind in layers)
    raise ReferenceError(f"config field {names[0]!r} is missing: it says what each layer is")


def _number(value: Any) -> float:
    if isinstance(value, Mapping):  # {"__float__": "Infinity"}
        value = value.get("__float__")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ReferenceError(f"config field 'time_step_limit' must hold two numbers (got {value!r})") from None


def _limit(config: Config) -> tuple[float, float]:
    value = config.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ReferenceError(f"config field 'time_step_limit' must hold two numbers (got {value!r})")
    least, most = map(_number, value)
    if not 0 <= least <= most:
        raise ReferenceError(f"config field 'time_step_limit' must be ascending and not negative (got {value!r})")
    return least, most


def _shape(config: Config, pattern: str | None = None) -> _Shape:
    config = _text(config)
    pattern = pattern or _pattern(config, ("hybrid_override_pattern", "layers_block_type", "layer_types"))
    for name, values in _COMPUTED.items():
        if config.get(name) is not None and config[name] not in values:
            raise ReferenceError(f"config field {name!r} = {config[name]!r} is not computed here")
    mamba, moe = "M" in pattern, "E" in pattern
    hidden = _count(config, "hidden_size")
    heads = _count(config, "num_attention_heads") if "*" in pattern else 0
    experts = _count(config, "n_routed_experts") if moe else 0
    expert_groups = _count(config, "n_group", 1)
    least, most = _limit(config)
    s = _Shape(
        pattern=pattern,
        hidden=hidden,
        vocab=_count(config, "vocab_size"),
        eps=float(next((config[n] for n in ("layer_norm_epsilon", "rms_norm_eps") if config.get(n) is not None), 1e-5)),
        tied=bool(config.get("tie_word_embeddings", False)),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", heads) if heads else 0,
        head_dim=_count(config, "head_dim", config.get("attention_head_dim") or hidden // heads) if heads else 0,
        mamba_heads=_count(config, "mamba_num_heads", 128) if mamba else 0,
        mamba_dim=_count(config, "mamba_head_dim", 64) if mamba else 0,
        state=_count(config, "ssm_state_size", 128) if mamba else 0,
        groups=_count(config, "n_groups", 1) if mamba else 1,
        kernel=_count(config, "conv_kernel", 4) if mamba else 0,
        least=least,
        most=most,
        intermediate=_count(config, "intermediate_size") if "-" in pattern else 0,
        experts=experts,
        topk=_count(config, "num_experts_per_tok") if moe else 0,
        expert_groups=expert_groups,
        kept_groups=_count(config, "topk_group", expert_groups),
        expert_width=_count(config, "moe_intermediate_size") if moe else 0,
        shared_width=_count(config, "moe_shared_expert_intermediate_size")
        if moe and _count(config, "n_shared_experts", 1, 0)
        else 0,
        latent=_count(config, "moe_latent_size", 0, 0) if moe else 0,
    )
    divides = (
        ("num_key_value_heads", s.kv_heads, "num_attention_heads", s.heads),
        ("n_groups", s.groups, "mamba_num_heads", s.mamba_heads),
        ("n_group", s.expert_groups, "n_routed_experts", s.experts),
    )
    for name, part, whole_name, whole in divides:
        if part and whole % part:
            raise ReferenceError(f"config field {name!r} ({part}) must divide {whole_name} ({whole})")
    if s.kept_groups > s.expert_groups or s.topk > s.experts * s.kept_groups // s.expert_groups:
        raise ReferenceError(
            f"config fields 'topk_group' ({s.kept_groups}) and 'num_experts_per_tok' ({s.topk}) choose more than there is"
        )
    return s


def _layer_parameters(s: _Shape, config: Config, kind: str, name: str) -> dict[str, tuple[int, ...]]:
    """Norm and mixer of one layer."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}.norm.weight": (s.hidden,)}
    mixer = f"{name}.mixer"

    def linear(part: str, rows: int, columns: int, flag: str) -> None:
        shapes[f"{mixer}.{part}.weight"] = (rows, columns)
        if config.get(flag):
            shapes[f"{mixer}.{part}.bias"] = (rows,)

    def mlp(part: str, width: int, size: int, flag: str = "mlp_bias") -> None:
        linear(f"{part}up_proj", width, size, flag)
        linear(f"{part}down_proj", size, width, flag)

    if kind == "M":
        linear("in_proj", s.inner + s.conv + s.mamba_heads, s.hidden, "use_bias")
        linear("out_proj", s.hidden, s.inner, "use_bias")
        shapes[f"{mixer}.conv1d.weight"] = (s.conv, 1, s.kernel)
        if config.get("use_conv_bias", True):
            shapes[f"{mixer}.conv1d.bias"] = (s.conv,)
        shapes |= {f"{mixer}.{part}": (s.mamba_heads,) for part in ("A_log", "D", "dt_bias")}
        shapes[f"{mixer}.norm.weight"] = (s.inner,)
    elif kind == "*":
        for part, rows in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            linear(f"{part}_proj", rows * s.head_dim, s.hidden, "attention_bias")
        linear("o_proj", s.hidden, s.heads * s.head_dim, "attention_bias")
    elif kind == "-":
        mlp("", s.intermediate, s.hidden)
    else:
        shapes[f"{mixer}.gate.weight"] = (s.experts, s.hidden)
        shapes[f"{mixer}.gate.e_score_correction_bias"] = (s.experts,)
        for expert in range(s.experts):
            mlp(f"experts.{expert}.", s.expert_width, s.latent or s.hidden, "")
        if s.shared_width:
            mlp("shared_experts.", s.shared_width, s.hidden)
        if s.latent:
            linear("fc1_latent_proj", s.latent, s.hidden, "mlp_bias")
            linear("fc2_latent_proj", s.hidden, s.latent, "mlp_bias")
    return shapes


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Checkpoint names -> shapes; what `recompute` reads, with such biases as the file has beyond these."""
    s = _shape(config)
    shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (s.vocab, s.hidden)}
    for layer, kind in enumerate(s.pattern):
        shapes |= _layer_parameters(s, _text(config), kind, f"backbone.layers.{layer}")
    shapes["backbone.norm_f.weight"] = (s.hidden,)
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab, s.hidden)
    return shapes


def _mtp_shape(config: Config) -> _Shape | None:
    text = _text(config)
    if not _count(text, "num_nextn_predict_layers", 0, 0):
        return None
    pattern = _pattern(text, ("mtp_hybrid_override_pattern", "mtp_layers_block_type"))
    if "M" in pattern:
        raise ReferenceError("config field 'mtp_hybrid_override_pattern': an MTP head without recurrent layers only (got 'M')")
    return _shape(config, pattern)


def mtp_parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Checkpoint names -> shapes of the MTP head, beside `parameters`; empty where the config has none."""
    s = _mtp_shape(config)
    if s is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {f"mtp.layers.0.{name}.weight": (s.hidden,) for name in ("enorm", "hnorm")}
    shapes["mtp.layers.0.eh_proj.weight"] = (s.hidden, 2 * s.hidden)
    for layer, kind in enumerate(s.pattern):
        shapes |= _layer_parameters(s, _text(config), kind, f"mtp.layers.{layer}")
    return shapes | {f"mtp.layers.{len(s.pattern) - 1}.final_layernorm.weight": (s.hidden,)}


_STACKED = re.compile(r"(.*\.experts)\.(up_proj|down_proj)(?:\.weight)?")
_ATTENTION_BIAS = re.compile(r".*\.mixer\.[qkvo]_proj\.bias")
_MTP_NAMES = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "final_layernorm",
    "mtp.shared_head.norm": "final_layernorm",
}


def renamed(config: Config, weights: Weights) -> dict[str, Tensor]:
    """The tensors of any spelling under the names and shapes of `parameters` and `mtp_parameters`; others keep their names.

    A wrapper's prefix goes, `model.` in place of `backbone.` too; experts in one tensor [experts, out, in] are taken apart; the
    convolution may have its taps last or in the middle; MTP layers may count from one and have their norms outside the layers.
    Attention that lacks the biases `attention_bias` asks for, as transformers saves it, gets biases of zero.
    """
    body = re.compile(r"(?:model\.)?(?:language_model\.)?(?:(?:model\.)?(backbone)|(model)|(mtp|lm_head))\.(.*)")
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match = body.fullmatch(name)
        if match and (match[3] or match[1] or match[4].startswith(("layers.", "embeddings.", "norm_f."))):
            name = f"{match[3] or 'backbone'}.{match[4]}"
        stacked = _STACKED.fullmatch(name)
        if stacked:
            found |= {f"{stacked[1]}.{e}.{stacked[2]}.weight": part for e, part in enumerate(tensor.unbind())}
        elif name.endswith("conv1d.weight"):
            found[name] = tensor.reshape(tensor.shape[0], 1, -1)
        else:
            found[name] = tensor
    found = _renamed_mtp(found)
    if _text(config).get("attention_bias"):
        biases = {name: shape for name, shape in parameters(config).items() if _ATTENTION_BIAS.fullmatch(name)}
        found = {name: torch.zeros(shape) for name, shape in biases.items()} | found
    return found


def _renamed_mtp(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    numbers = sorted({int(match[1]) for name in weights if (match := re.match(r"mtp\.layers\.(\d+)\.", name))})
    if not numbers:
        return weights
    first, last = 0, len(numbers) - 1
    renamed = {}
    for name, tensor in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem in _MTP_NAMES:
            part = _MTP_NAMES[stem]
            name = f"mtp.layers.{last if part == 'final_layernorm' else first}.{part}.{kind}"
        elif match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.*)", name):
            name = f"mtp.layers.{numbers.index(int(match[1]))}.{match[2]}"
        renamed[name] = tensor
    return renamed


def _rms(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """Each of `groups` equal parts of the last axis is normed by itself."""
    y = x.to(wide(x.dtype)).unflatten(-1, (groups, -1))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (weight.to(y.dtype) * y.flatten(-2)).to(x.dtype)


class _Layers:
    """The mixers over one sequence, in one dtype.

    `margins` [T]: the least so far of any choice of experts or groups. `choices`: the experts of each layer so far [T, topk].
    """

    def __init__(self, s: _Shape, weights: Weights, length: int, dtype: torch.dtype, scaling: float, normalise: bool) -> None:
        self.s, self.weights, self.dtype, self.high = s, weights, dtype, wide(dtype)
        self.scaling, self.normalise = scaling, normalise
        self.length = length
        self.margins = torch.full((length,), math.inf, dtype=self.high)
        self.choices: list[Tensor] = []

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return F.linear(x, self.weights[f"{name}.weight"].to(self.dtype), None if bias is None else bias.to(self.dtype))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return _rms(x, self.weights[f"{name}.weight"], self.s.eps)

    def wide(self, name: str) -> Tensor:
        return self.weights[name].to(self.high)

    def block(self, x: Tensor, kind: str, name: str) -> Tensor:
        mixer = {"M": self.mamba, "*": self.attention, "-": self.mlp, "E": self.moe}[kind]
        return x + mixer(self.norm(x, f"{name}.norm"), f"{name}.mixer")

    def mamba(self, h: Tensor, name: str) -> Tensor:
        s = self.s
        gate, columns, dt = self.linear(h, f"{name}.in_proj").split([s.inner, s.conv, s.mamba_heads], -1)
        taps = self.wide(f"{name}.conv1d.weight")[:, 0].T  # [kernel, conv]
        padded = F.pad(columns.to(self.high), (0, 0, s.kernel - 1, 0))
        mixed = sum((padded[k : k + self.length] * taps[k] for k in range(s.kernel)), torch.zeros((), dtype=self.high))
        if f"{name}.conv1d.bias" in self.weights:
            mixed = mixed + self.wide(f"{name}.conv1d.bias")
        mixed = F.silu(mixed).to(self.dtype).to(self.high)
        x, b, c = mixed.split([s.inner, s.groups * s.state, s.groups * s.state], -1)
        x = x.unflatten(-1, (s.mamba_heads, s.mamba_dim))  # [T, heads, head_dim]
        b, c = (  # [T, heads, state]: head h reads group h // (heads / groups)
            t.unflatten(-1, (s.groups, s.state)).repeat_interleave(s.mamba_heads // s.groups, 1) for t in (b, c)
        )
        dt = F.softplus(dt.to(self.high) + self.wide(f"{name}.dt_bias"), threshold=50).clamp(s.least, s.most)  # [T, heads]
        decay = (-dt * self.wide(f"{name}.A_log").exp()).exp()
        update = dt[..., None] * x
        state = torch.zeros(s.mamba_heads, s.mamba_dim, s.state, dtype=self.high)
        rows = []
        for t in range(self.length):
            state = decay[t, :, None, None] * state + update[t, :, :, None] * b[t, :, None, :]
            rows.append((state * c[t, :, None, :]).sum(-1))
        y = torch.stack(rows) + self.wide(f"{name}.D")[:, None] * x
        gated = y.flatten(1).to(self.dtype).to(self.high) * F.silu(gate.to(self.high))
        normed = _rms(gated, self.weights[f"{name}.norm.weight"], s.eps, s.groups)
        return self.linear(normed.to(self.dtype), f"{name}.out_proj")

    def attention(self, h: Tensor, name: str) -> Tensor:
        s = self.s
        q, k, v = (self.linear(h, f"{name}.{p}_proj").unflatten(-1, (-1, s.head_dim)).transpose(0, 1) for p in "qkv")
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, 0) for t in (k, v))  # [heads, T, head_dim]
        future = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2)) * s.head_dim**-0.5
        seen = scores.masked_fill(future, -math.inf).to(self.high).softmax(-1).to(self.dtype)
        return self.linear((seen @ v).transpose(0, 1).flatten(1), f"{name}.o_proj")

    def mlp(self, h: Tensor, name: str) -> Tensor:
        return self.linear(F.relu(self.linear(h, f"{name}.up_proj")).square(), f"{name}.down_proj")

    def route(self, h: Tensor, name: str) -> Tensor:
        """Weight of every expert for every token [T, experts], 0 where not chosen."""
        s = self.s
        scores = F.linear(h.to(self.high), self.wide(f"{name}.weight")).sigmoid()
        choice = scores + self.wide(f"{name}.e_score_correction_bias")
        if s.kept_groups < s.expert_groups:
            grouped = choice.unflatten(-1, (s.expert_groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)  # [T, groups]
            order = best.sort(-1, descending=True)
            self._choose(order.values, s.kept_groups)
            dropped = torch.ones_like(best, dtype=torch.bool).scatter(-1, order.indices[:, : s.kept_groups], False)
            choice = grouped.masked_fill(dropped[..., None], -math.inf).flatten(-2)
        ordered, order_ids = choice.sort(-1, descending=True)
        self._choose(ordered, s.topk)
        self.choices.append(order_ids[:, : s.topk].sort(-1).values)
        chosen = torch.zeros_like(scores).scatter(-1, order_ids[:, : s.topk], 1.0) * scores
        if self.normalise:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return chosen * self.scaling

    def _choose(self, ordered: Tensor, count: int) -> None:
        if count < ordered.shape[-1]:
            gap = ordered[:, count - 1] - ordered[:, count]
            self.margins = torch.minimum(self.margins, gap.detach())

    def moe(self, h: Tensor, name: str) -> Tensor:
        weight = self.route(h, f"{name}.gate")
        inner = self.linear(h, f"{name}.fc1_latent_proj") if self.s.latent else h
        out = torch.zeros_like(inner, dtype=self.high)
        for expert in range(self.s.experts):
            rows = weight[:, expert].nonzero().squeeze(-1)
            if len(rows):
                own = self.mlp(inner[rows], f"{name}.experts.{expert}").to(self.high) * weight[rows, expert, None]
                out = out.index_add(0, rows, own)
        out = out.to(self.dtype)
        if self.s.latent:
            out = self.linear(out, f"{name}.fc2_latent_proj")
        # By the file: transformers builds and saves shared experts also where `n_shared_experts` is 0.
        return out + self.mlp(h, f"{name}.shared_experts") if f"{name}.shared_experts.up_proj.weight" in self.weights else out


def _layers(s: _Shape, config: Config, weights: Weights, length: int, dtype: torch.dtype) -> _Layers:
    text = _text(config)
    scaling = 1.0 if text.get("routed_scaling_factor") is None else float(text["routed_scaling_factor"])
    normalise = bool(text.get("norm_topk_prob", True))
    return _Layers(s, weights, length, dtype, scaling, normalise)


def hidden_states(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Tensor:
    """What the head reads [T, hidden], after the last norm."""
    return _backbone(config, weights, tokens, dtype)[0]


def _backbone(config: Config, weights: Weights, tokens: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, _Layers]:
    """What `hidden_states` gives, and the layers with the choices that they made."""
    s = _shape(config)
    layers = _layers(s, config, weights, len(tokens), dtype)
    x = _embed(weights, tokens, dtype)
    for layer, kind in enumerate(s.pattern):
        x = layers.block(x, kind, f"backbone.layers.{layer}")
    return layers.norm(x, "backbone.norm_f"), layers


def _embed(weights: Weights, tokens: Sequence[int], dtype: torch.dtype) -> Tensor:
    return weights["backbone.embeddings.weight"][torch.as_tensor(tokens, dtype=torch.long)].to(dtype)


def head(config: Config, weights: Weights, hidden: Tensor) -> Tensor:
    """Logits [T, vocab] of what `hidden_states` gives.

    A head that is in the file is used, also where the config ties it to the embedding: there are files with one of their own.
    """
    tied = _shape(config).tied and "lm_head.weight" not in weights
    return F.linear(hidden, weights["backbone.embeddings.weight" if tied else "lm_head.weight"].to(hidden.dtype))


def recompute(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Recompute:
    """Logits [T, vocab] of one full forward over `tokens`, in `dtype`, router and recurrence in at least float32.

    Differentiable. Margins [T]: the least gap, over the layers, between the last chosen and the first unchosen corrected score,
    of experts and of groups; None where the pattern has no experts.
    """
    hidden, layers = _backbone(config, weights, tokens, dtype)
    logits = head(config, weights, hidden)
    return Recompute(logits, layers.margins, torch.cat(layers.choices, -1)) if layers.choices else Recompute(logits)


def logits(config: Config, weights: Weights, tokens: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of `recompute`: [T, vocab]."""
    return recompute(config, weights, tokens, dtype=dtype).logits


class Guess(NamedTuple):
    """`logits` [T, vocab]: row t is about the token after `following[t]`. `hidden` [T, hidden]: for a further step."""

    logits: Tensor
    hidden: Tensor


def mtp(config: Config, weights: Weights, hidden: Tensor, following: Sequence[int]) -> Guess:
    """The MTP head over `hidden` [T, hidden], as `hidden_states` gives it, in its dtype; following[t] is the token after t."""
    s = _mtp_shape(config)
    if s is None:
        raise ReferenceError("config field 'num_nextn_predict_layers' is 0: the checkpoint has no MTP head")
    if len(following) != len(hidden):
        raise ValueError(f"one following token for each of {len(hidden)} rows (got {len(following)})")
    layers = _layers(s, config, weights, len(hidden), hidden.dtype)
    first, last = "mtp.layers.0", f"mtp.layers.{len(s.pattern) - 1}"
    embedding = _embed(weights, following, hidden.dtype)
    both = torch.cat([layers.norm(embedding, f"{first}.enorm"), layers.norm(hidden, f"{first}.hnorm")], -1)
    x = layers.linear(both, f"{first}.eh_proj")
    for layer, kind in enumerate(s.pattern):
        x = layers.block(x, kind, f"mtp.layers.{layer}")
    x = layers.norm(x, f"{last}.final_layernorm")
    return Guess(head(config, weights, x), x)
