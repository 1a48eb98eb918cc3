"""Faults of the references of nemotron_h, gemma3 and gpt_oss, for test_power: what is replaced, by what, and in which cases."""

from __future__ import annotations

__all__ = ["GEMMA3", "GPT_OSS", "NEMOTRON_H"]

Faults = dict[str, tuple[str, str, str]]

_MAMBA = "mixed groups_1 groups_8 no_attention time_steps"
_EXPERTS = "mixed no_attention no_mamba latent limited_groups"
NEMOTRON_H: Faults = {
    "gate, xBC and dt in another order": (
        'gate, columns, dt = self.linear(h, f"{name}.in_proj").split([s.inner, s.conv, s.mamba_heads], -1)',
        'columns, gate, dt = self.linear(h, f"{name}.in_proj").split([s.conv, s.inner, s.mamba_heads], -1)',
        _MAMBA,
    ),
    "x, B and C in another order": (
        "x, b, c = mixed.split([s.inner, s.groups * s.state, s.groups * s.state], -1)",
        "b, c, x = mixed.split([s.groups * s.state, s.groups * s.state, s.inner], -1)",
        _MAMBA,
    ),
    "B and C swapped": ("x, b, c = mixed", "x, c, b = mixed", _MAMBA),
    "taps of the convolution reversed": ("[:, 0].T  # [kernel", "[:, 0].flip(-1).T  # [kernel", _MAMBA),
    "convolution one token late": ("(0, 0, s.kernel - 1, 0))", "(0, 0, s.kernel, 0))[:-1]", _MAMBA),
    "no activation after the convolution": ("mixed = F.silu(mixed).to", "mixed = (mixed).to", _MAMBA),
    "bias of the convolution left out": ("mixed = mixed + self.wide", "mixed = mixed + 0 * self.wide", "mixed groups_1"),
    "heads of a group tiled instead of repeated": (
        "t.unflatten(-1, (s.groups, s.state)).repeat_interleave(s.mamba_heads // s.groups, 1)",
        "t.unflatten(-1, (s.groups, s.state)).repeat(1, s.mamba_heads // s.groups, 1)",
        "mixed no_attention time_steps",
    ),
    "dt without its bias": ('dt.to(self.high) + self.wide(f"{name}.dt_bias")', "dt.to(self.high)", _MAMBA),
    "time steps without their limit": (".clamp(s.least, s.most)", "", "time_steps"),
    "time steps clamped at time_step_min and max": (".clamp(s.least, s.most)", ".clamp(0.001, 0.1)", _MAMBA),
    "decay without its sign": ("decay = (-dt *", "decay = (dt * -0.5 *", _MAMBA),
    "decay of A rather than of its exponential": (
        'self.wide(f"{name}.A_log").exp()).exp()',
        'self.wide(f"{name}.A_log").abs()).exp()',
        _MAMBA,
    ),
    "update without its time step": ("update = dt[..., None] * x", "update = x", _MAMBA),
    "output read before the update": (
        "rows.append((state * c[t, :, None, :]).sum(-1))",
        "rows.append(((state - update[t, :, :, None] * b[t, :, None, :]) * c[t, :, None, :]).sum(-1))",
        _MAMBA,
    ),
    "D left out": (' + self.wide(f"{name}.D")[:, None] * x', "", _MAMBA),
    "normed before it is gated": (
        'normed = _rms(gated, self.weights[f"{name}.norm.weight"], s.eps, s.groups)',
        'normed = _rms(y.flatten(1), self.weights[f"{name}.norm.weight"], s.eps, s.groups) * F.silu(gate.to(self.high))',
        _MAMBA,
    ),
    "one norm over all groups": ("s.eps, s.groups)", "s.eps, 1)", "mixed groups_8 no_attention"),
    "eps of the norms ten times too large": (
        "y.square().mean(-1, keepdim=True) + eps)",
        "y.square().mean(-1, keepdim=True) + 10 * eps)",
        _MAMBA,
    ),
    "no causal mask": (".triu(1)", ".triu(self.length)", "mixed no_mamba latent"),
    "scale of the heads left out": ("* s.head_dim**-0.5", "* 1.0", "mixed no_mamba latent"),
    "relu not squared": ('.up_proj")).square()', '.up_proj"))', _EXPERTS),
    "softmax instead of sigmoid": (".sigmoid()", ".softmax(-1)", _EXPERTS),
    "correction bias used in the weights": (
        "order_ids[:, : s.topk], 1.0) * scores",
        "order_ids[:, : s.topk], 1.0) * choice.nan_to_num(neginf=0)",
        _EXPERTS,
    ),
    "correction bias left out of the choice": (
        'choice = scores + self.wide(f"{name}.e_score_correction_bias")',
        "choice = scores",
        _EXPERTS,
    ),
    "weights not normalised": ("if self.normalise:", "if False:", "mixed no_attention no_mamba limited_groups"),
    "weights normalised although they are not": ("if self.normalise:", "if True:", "latent"),
    "routed scaling left out": ("return chosen * self.scaling", "return chosen", _EXPERTS),
    "one expert fewer": ("order_ids[:, : s.topk], 1.0)", "order_ids[:, : s.topk - 1], 1.0)", _EXPERTS),
    "groups ignored": ("if s.kept_groups < s.expert_groups:", "if False:", "limited_groups"),
    "dropped groups zeroed instead of hidden": ("dropped[..., None], -math.inf)", "dropped[..., None], 0.0)", "limited_groups"),
    "groups by their best expert alone": ("topk(min(2, grouped.shape[-1]), -1)", "topk(1, -1)", "limited_groups"),
    "shared expert left out": (
        'if f"{name}.shared_experts.up_proj.weight" in self.weights else out',
        "if False else out",
        _EXPERTS,
    ),
    "shared expert scaled as the others": (
        'return out + self.mlp(h, f"{name}.shared_experts")',
        'return out + self.scaling * self.mlp(h, f"{name}.shared_experts")',
        _EXPERTS,
    ),
    "residual not added": ("return x + mixer(", "return 0 * x + mixer(", _MAMBA + " no_mamba"),
    "last norm left out": ('return layers.norm(x, "backbone.norm_f"), ', "return x, ", _MAMBA + " no_mamba"),
}

_LOCAL = "local_global scaled_global"
GEMMA3: Faults = {
    "window one too short": ("back >= s.window)", "back >= s.window - 1)", f"{_LOCAL} all_local"),
    "window one too long": ("back >= s.window)", "back > s.window)", f"{_LOCAL} all_local"),
    "window on every layer": ("{False: back < 0, ", "{False: (back < 0) | (back >= s.window), ", _LOCAL),
    "window on no layer": ("True: (back < 0) | (back >= s.window)}", "True: back < 0}", f"{_LOCAL} all_local"),
    "rotary bases swapped": ("frequencies[kind == _LOCAL]", "frequencies[kind != _LOCAL]", f"{_LOCAL} all_local"),
    "one rotary base for all": ("*turns[local])", "*turns[True])", _LOCAL),
    "scaling left out": ('if scaling == "linear"', "if False", "scaled_global"),
    "scaling on local layers too": (
        "kinds = {kind: dict(new.get(kind) or {}) for kind in (_LOCAL, _GLOBAL)}",
        "kinds = {kind: dict(new.get(kind) or old) for kind in (_LOCAL, _GLOBAL)}",
        "scaled_global",
    ),
    "norm weights without the one": ("* (1 + weight.to(y.dtype))", "* weight.to(y.dtype)", f"{_LOCAL} all_local"),
    "scale of the head size": (
        '_positive(config, "query_pre_attn_scalar", 256) ** -0.5',
        "head_dim ** -0.5",
        f"{_LOCAL} all_local",
    ),
    "embedding not scaled": ("x = x * torch.tensor(math.sqrt(s.hidden), dtype=dtype)", "x = x * 1", f"{_LOCAL} all_local"),
    "queries and keys not normed": (
        '_rotate(norm(t, f"{name}.{part}_norm"), *turns',
        "_rotate(t, *turns",
        f"{_LOCAL} all_local",
    ),
    "norms of queries and keys swapped": ('((q, "q"), (k, "k"))', '((q, "k"), (k, "q"))', f"{_LOCAL} all_local"),
    "exact gelu": ('approximate="tanh"', 'approximate="none"', f"{_LOCAL} all_local"),
    "gate and up swapped": (
        'linear(h, f"{name}.gate_proj"), approximate="tanh")\n        return linear(gate * linear(h, f"{name}.up_proj")',
        'linear(h, f"{name}.up_proj"), approximate="tanh")\n        return linear(gate * linear(h, f"{name}.gate_proj")',
        f"{_LOCAL} all_local",
    ),
    "norm after attention left out": (
        'x = x + norm(h, f"{name}.post_attention_layernorm")',
        "x = x + h",
        f"{_LOCAL} all_local",
    ),
    "norm after the MLP left out": (
        'x = x + norm(h, f"{name}.post_feedforward_layernorm")',
        "x = x + h",
        f"{_LOCAL} all_local",
    ),
    "norm before the MLP that of attention": (
        'f"{name}.pre_feedforward_layernorm"',
        'f"{name}.input_layernorm"',
        f"{_LOCAL} all_local",
    ),
    "eps of the norms ten times too large": ("keepdim=True) + eps)", "keepdim=True) + 10 * eps)", f"{_LOCAL} all_local"),
    "rope in pairs instead of halves": (
        "x.to(cos.dtype).chunk(2, -1)",
        "x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)",
        f"{_LOCAL} all_local",
    ),
    "key heads tiled instead of repeated": (
        "t.repeat_interleave(s.heads // s.kv_heads, 0)",
        "t.repeat(s.heads // s.kv_heads, 1, 1)",
        f"{_LOCAL} all_local",
    ),
    "tied head although it has its own": ('"model.embed_tokens" if s.tied', '"model.embed_tokens" if True', "scaled_global"),
}

_BOTH = "sinks clamped"
GPT_OSS: Faults = {
    "sink left out": ("torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]", "scores.softmax(-1)", _BOTH),
    "sink scaled as a score": (
        'sinks = weights[f"{name}.sinks"].to(high)',
        'sinks = s.head_dim**-0.5 * weights[f"{name}.sinks"].to(high)',
        _BOTH,
    ),
    "sinks of other heads": ("[:, None, None].expand", "[:, None, None].flip(0).expand", _BOTH),
    "window one too short": ("back >= s.window)", "back >= s.window - 1)", _BOTH),
    "window one too long": ("back >= s.window)", "back > s.window)", _BOTH),
    "window on every layer": ("{False: back < 0, ", "{False: (back < 0) | (back >= s.window), ", _BOTH),
    "windows on the other layers": ("local=[kind == _LOCAL", "local=[kind != _LOCAL", _BOTH),
    "ramp of YaRN rounded": ('if rope.get("truncate", True):', "if True:", "sinks"),
    "ramp of YaRN not rounded": ('if rope.get("truncate", True):', "if False:", "clamped"),
    "magnitude of YaRN left out": ("angle.cos() * magnitude, angle.sin() * magnitude", "angle.cos(), angle.sin()", _BOTH),
    "YaRN left out": ('if kind == "default":', "if True:", _BOTH),
    "gate and up in halves": (
        "both[:, 0::2].clamp(max=s.limit), both[:, 1::2]",
        "both[:, : s.intermediate].clamp(max=s.limit), both[:, s.intermediate :]",
        _BOTH,
    ),
    "gate and up swapped": (
        "both[:, 0::2].clamp(max=s.limit), both[:, 1::2]",
        "both[:, 1::2].clamp(max=s.limit), both[:, 0::2]",
        _BOTH,
    ),
    "gate not clamped": ("both[:, 0::2].clamp(max=s.limit)", "both[:, 0::2]", "clamped"),
    "gate clamped below too": ("both[:, 0::2].clamp(max=s.limit)", "both[:, 0::2].clamp(-0.5, s.limit)", _BOTH),
    "up not clamped": ("both[:, 1::2].clamp(-s.limit, s.limit)", "both[:, 1::2]", "clamped"),
    "up clamped above only": ("both[:, 1::2].clamp(-s.limit, s.limit)", "both[:, 1::2].clamp(max=s.limit)", "clamped"),
    "up without the one": ("return ((up + 1) * gate", "return (up * gate", _BOTH),
    "silu without its gain": ("torch.sigmoid(s.alpha * gate)", "torch.sigmoid(gate)", _BOTH),
    "bias of gate and up left out": ("both = h @ up_weight + up_bias", "both = h @ up_weight", _BOTH),
    "bias of down left out": ("@ down_weight + down_bias", "@ down_weight", _BOTH),
    "softmax over all experts": (
        "shares = ordered[:, : s.topk].softmax(-1)",
        "shares = ordered.softmax(-1)[:, : s.topk]",
        _BOTH,
    ),
    "bias of the router left out": ("ordered, order = linear(h, name, True)", "ordered, order = linear(h, name, False)", _BOTH),
    "biases of attention left out": (
        'linear((seen @ v).transpose(0, 1).reshape(length, -1), f"{name}.o_proj", s.attention_bias)',
        'linear((seen @ v).transpose(0, 1).reshape(length, -1), f"{name}.o_proj", False)',
        _BOTH,
    ),
    "experts fed before the norm": (
        'moe(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")',
        'moe(x, f"{name}.mlp")',
        _BOTH,
    ),
    "rope in pairs instead of halves": (
        "x.to(cos.dtype).chunk(2, -1)",
        "x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)",
        _BOTH,
    ),
    "scale of the heads left out": ("@ k.transpose(1, 2)) * s.head_dim**-0.5)", "@ k.transpose(1, 2)))", _BOTH),
}
