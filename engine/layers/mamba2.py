"""Mamba-2 mixer https://arxiv.org/abs/2405.21060, with its weights as in Nemotron-H checkpoints.

One projection gives, in this order, the gate z, the inputs xBC of a causal convolution, and the raw step sizes dt. What the
convolution makes of xBC are the recurrence's x, B and C. Its output is gated before it is normalised, in groups.
Convolution, step sizes and recurrence are float32 in every compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.layers.activations import silu
from engine.layers.causal_conv import CausalConv
from engine.layers.linear import Linear
from engine.layers.ssd import scan, step
from engine.layers.weights import Weights
from engine.state import RecurrentState, Span

__all__ = ["Mamba2", "Mamba2Config", "gated_group_norm"]


@dataclass(frozen=True)
class Mamba2Config:
    """Head h uses the B and C of group h // (mamba_num_heads / n_groups). time_step_limit: bounds of the step size dt."""

    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    conv_kernel: int
    time_step_limit: tuple[float, float]
    layer_norm_epsilon: float

    @property
    def inner(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner + 2 * self.n_groups * self.ssm_state_size

    def make_state(self) -> RecurrentState:
        c = self
        return RecurrentState((c.conv_kernel - 1, c.conv_dim), (c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size))


class Mamba2:
    """Keeps one recurrent state, that at index `slot` of a span's slots: the last conv_kernel - 1 raw xBC, the SSM state."""

    def __init__(self, config: Mamba2Config, weights: Weights, slot: int) -> None:
        self.config = config
        self.slot = slot
        self.in_proj = Linear.of(weights.at("in_proj"))  # [inner + conv_dim + heads, hidden]
        self.conv1d = CausalConv(weights.at("conv1d"))
        self.dt_bias = weights["dt_bias"]  # float32 [heads], as A and D
        self.A = -mx.exp(weights["A_log"])
        self.D = weights["D"][:, None]
        self.norm = weights["norm.weight"]  # [inner]
        self.out_proj = Linear.of(weights.at("out_proj"))  # [hidden, inner]
        mx.eval(self.A)

    def __call__(self, x: mx.array, spans: Sequence[Span]) -> mx.array:
        """x [T, hidden] -> [T, hidden], in x's dtype; advances each span's state by its tokens without padding."""
        c = self.config
        z, rows, dt = mx.split(self.in_proj(x), (c.inner, c.inner + c.conv_dim), axis=-1)
        rows, dt = rows.astype(mx.float32), self.step_sizes(dt)
        if all(span.length == 1 and not span.padding for span in spans):
            y = self._decode(rows, dt, [span.slots[self.slot] for span in spans])
        else:
            parts = [self._prefill(rows[span.start : span.stop], dt[span.start : span.stop], span) for span in spans]
            y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        y = gated_group_norm(y.reshape(-1, c.inner), z, self.norm, c.n_groups, c.layer_norm_epsilon)
        return self.out_proj(y.astype(x.dtype))

    def step_sizes(self, dt: mx.array) -> mx.array:
        """softplus(dt + dt_bias) within time_step_limit, float32: log(e^0 + e^x), which does not overflow."""
        dt = mx.logaddexp(dt.astype(mx.float32) + self.dt_bias, 0.0)
        low, high = self.config.time_step_limit
        return dt if low <= 0.0 and math.isinf(high) else mx.clip(dt, low, high)

    def mix(
        self,
        rows: mx.array,
        dt: mx.array,
        conv: mx.array,
        ssm: mx.array,
        *,
        splits: Sequence[int] = (),
        left: int = 0,
        right: int = 0,
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """Convolution and recurrence over n tokens of one sequence, of which the first `left` and last `right` are padding.

        rows [n, conv_dim] raw xBC, dt [n, heads] step sizes, conv [1, conv_kernel - 1, conv_dim] and ssm [1, heads, head_dim,
        state] before them; all float32. Padding passes as identity steps, with output 0.
        Returns y [n, heads, head_dim], and the conv and ssm states after each of `splits` (offsets in the n - left - right true
        tokens) and after the last true one.
        """
        c, n = self.config, rows.shape[0]
        if left or right:
            place = mx.arange(n)[:, None]
            is_token = (place >= left) & (place < n - right)
            rows, dt = mx.where(is_token, rows, 0.0), mx.where(is_token, dt, 0.0)
        window = mx.concatenate([rows[:left], conv[0], rows[left:]])  # the tail stands right before the first true token
        mixed = self.conv1d(window)
        if left or right:
            mixed = mx.where(is_token, mixed, 0.0)
        x, B, C = self._split(mixed)
        ends = [left + split for split in splits] + [n - right]
        conv_states = [window[None, end : end + c.conv_kernel - 1] for end in ends]
        outs, ssm_states, start = [], [], 0
        for stop in [*ends[:-1], n]:
            part = slice(start, stop)
            y, ssm = scan(x[part], dt[part], self.A, B[part], C[part], ssm)
            outs.append(y)
            ssm_states.append(ssm)
            start = stop
        y = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        return y + self.D * x, conv_states, ssm_states

    def _prefill(self, rows: mx.array, dt: mx.array, span: Span) -> mx.array:
        state: RecurrentState = span.slots[self.slot]
        length = span.length - span.padding
        y, *states = self.mix(rows, dt, *state.get(), splits=state.splits(length), right=span.padding)
        state.put(length, *states)
        return y

    def _decode(self, rows: mx.array, dt: mx.array, states: Sequence[RecurrentState]) -> mx.array:
        """One token of each of several sequences: rows [batch, conv_dim], dt [batch, heads] -> y [batch, heads, head_dim]."""
        conv, ssm = (_stacked(parts) for parts in zip(*(state.get() for state in states), strict=True))
        window = mx.concatenate([conv, rows[:, None]], axis=1)  # [batch, conv_kernel, conv_dim]
        x, B, C = self._split(self.conv1d(window).squeeze(1))
        y, ssm = step(x, dt, self.A, B, C, ssm)
        batch = len(states)
        for state, *parts in zip(states, mx.split(window[:, 1:], batch), mx.split(ssm, batch), strict=True):
            state.put(1, *([part] for part in parts))
        return y + self.D * x

    def _split(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """[n, conv_dim] -> x [n, heads, head_dim], B and C [n, groups, state]."""
        c, n = self.config, mixed.shape[0]
        x, B, C = mx.split(mixed, (c.inner, c.inner + c.n_groups * c.ssm_state_size), axis=-1)
        return x.reshape(n, c.mamba_num_heads, -1), B.reshape(n, c.n_groups, -1), C.reshape(n, c.n_groups, -1)


def gated_group_norm(y: mx.array, z: mx.array, weight: mx.array, groups: int, eps: float) -> mx.array:
    """y silu(z), then RMS norm over each of `groups` equal parts, then times weight: float32 [T, inner]."""
    gated = y * silu(z.astype(mx.float32))
    return mx.fast.rms_norm(gated.reshape(*y.shape[:-1], groups, -1), None, eps).reshape(y.shape) * weight


def _stacked(parts: tuple[mx.array, ...]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
