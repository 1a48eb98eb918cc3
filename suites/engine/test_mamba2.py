"""engine/layers/mamba2.py and what it is made of: recurrence, convolution, gated norm, padding and boundary states."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.layers import ssd
from engine.layers.causal_conv import CausalConv
from engine.layers.mamba2 import Mamba2, gated_group_norm
from engine.layers.weights import Weights
from engine.state import RecurrentState, Span
from suites.engine.memory import active_memory
from suites.engine.tiny_nemotron_h import RAW, config, weights

CONFIG = config(RAW).mamba
H, P, G, N = CONFIG.mamba_num_heads, CONFIG.mamba_head_dim, CONFIG.n_groups, CONFIG.ssm_state_size
TAIL, CHANNELS = CONFIG.conv_kernel - 1, CONFIG.conv_dim


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def scan_inputs(T: int, heads: int = H, groups: int = G, size: int = N, dt: float = 1.0) -> list[np.ndarray]:
    """x, dt, A, B, C, state."""
    steps, decay = np.abs(normal(1, T, heads)) * dt, -np.exp(normal(2, heads))
    return [
        normal(0, T, heads, P),
        steps,
        decay,
        normal(3, T, groups, size),
        normal(4, T, groups, size),
        normal(5, 1, heads, P, size),
    ]


def recurrence(x: Any, dt: Any, A: Any, B: Any, C: Any, state: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """y and the state after each token, in float64."""
    x, dt, A, B, C, h = (np.asarray(a, np.float64) for a in (x, dt, A, B, C, state[0]))
    outs, states, share = [], [], x.shape[1] // B.shape[1]
    for t in range(len(x)):
        b, c = np.repeat(B[t], share, 0), np.repeat(C[t], share, 0)
        h = np.exp(dt[t] * A)[:, None, None] * h + (dt[t, :, None] * x[t])[:, :, None] * b[:, None]
        outs.append((h * c[:, None]).sum(-1))
        states.append(h)
    return np.array(outs), states


def scan(inputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    y, state = ssd.scan(*map(mx.array, inputs))
    return np.array(y), np.array(state)[0]


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


Q = ssd.CHUNK
LENGTHS = [1, 2, 3, Q - 1, Q, Q + 1, 2 * Q, 2 * Q + 5, ssd.CHUNKS * Q, ssd.CHUNKS * Q + 1]


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("dt", [1e-4, 1.0, 100.0])
def test_mamba2_scan_reference(T: int, dt: float):
    inputs = scan_inputs(T, dt=dt)
    y, state = scan(inputs)
    expected, states = recurrence(*inputs)
    assert relative(y, expected) < 1e-5 and relative(state, states[-1]) < 1e-5


@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 1, 7), (6, 6, 7), (8, 4, 32), (4, 2, 31), (1, 1, 1)])
def test_mamba2_scan_grouped_and_of_shapes_that_kernels_do_not_support(heads: int, groups: int, size: int):
    inputs = scan_inputs(Q + 9, heads, groups, size)
    y, state = scan(inputs)
    expected, states = recurrence(*inputs)
    assert relative(y, expected) < 1e-5 and relative(state, states[-1]) < 1e-5


def test_mamba2_scan_keeps_small_decays_after_large_ones():
    """Sums over an interval are not differences of running sums: those would be of size 1e5 here, 0.01 apart."""
    inputs = scan_inputs(Q)
    inputs[1][: Q // 2] = 1e4
    inputs[1][Q // 2 :] *= 1e-3
    y, state = scan(inputs)
    expected, states = recurrence(*inputs)
    assert np.abs(y - expected)[Q // 2 :].max() / np.abs(expected[Q // 2 :]).max() < 1e-5
    assert relative(state, states[-1]) < 1e-5


def test_mamba2_scan_capture_all_per_token():
    inputs = scan_inputs(9)
    _, states = recurrence(*inputs)
    state = inputs[5]
    for t in range(9):
        _, state = ssd.scan(*(mx.array(inputs[i] if i == 2 else inputs[i][t : t + 1]) for i in range(5)), mx.array(state))
        assert relative(np.array(state)[0], states[t]) < 1e-5


def test_mamba2_scan_padded_row_identity_is_bit_for_bit():
    inputs = scan_inputs(Q + 10)
    for i in (0, 1, 4):
        inputs[i][20:] = 0.0
    y, state = scan(inputs)
    assert not y[20:].any()
    shorter = [*(a if i == 2 else a[:20] for i, a in enumerate(inputs[:5])), inputs[5]]
    assert relative(state, scan(shorter)[1]) < 1e-6
    only = [*(a if i == 2 else a[20:] for i, a in enumerate(inputs[:5])), inputs[5]]
    np.testing.assert_array_equal(scan(only)[1], inputs[5][0])


def test_mamba2_step_takes_several_sequences_at_once():
    rows = [scan_inputs(1)[i] for i in (0, 1, 3, 4, 5)]
    batch = [np.concatenate([a, a * 2, a * 3]) for a in rows]
    A = mx.array(scan_inputs(1)[2])
    x, dt, B, C, state = map(mx.array, batch)
    y, state = ssd.step(x, dt, A, B, C, state)
    for i in range(3):
        one = [a * (i + 1) for a in rows]
        expected, states = recurrence(one[0], one[1], np.array(A), one[2], one[3], one[4])
        assert relative(np.array(y[i]), expected[0]) < 1e-5 and relative(np.array(state[i]), states[0]) < 1e-5


CONV_SHAPES = [(1, 5, 4), (2, 5, 4), (3, 64, 4), (4, 192, 4), (33, 20, 2), (128, 96, 4), (7, 9, 1)]  # n, channels, kernel


def conv(channels: int, kernel: int, bias: bool, channels_last: bool = False) -> CausalConv:
    weight = mx.array(normal(6, channels, kernel))
    arrays = {"weight": weight.reshape(channels, kernel, 1) if channels_last else weight.reshape(channels, 1, kernel)}
    return CausalConv(Weights(arrays | ({"bias": mx.array(normal(7, channels))} if bias else {})))


@pytest.mark.parametrize(("n", "channels", "kernel"), CONV_SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_depthwise_conv_silu(n: int, channels: int, kernel: int, bias: bool, dtype: mx.Dtype):
    """Inputs that were computed in any dtype; the convolution is float32."""
    window = mx.array(normal(8, n + kernel - 1, channels)).astype(dtype).astype(mx.float32)
    got = conv(channels, kernel, bias)(window)
    assert got.dtype == mx.float32 and got.shape == (n, channels)
    wide, taps = np.array(window).astype(np.float64), normal(6, channels, kernel).astype(np.float64)
    expected = sum(wide[k : k + n] * taps[:, k] for k in range(kernel)) + (normal(7, channels) if bias else 0.0)
    expected = expected / (1 + np.exp(-expected))
    np.testing.assert_allclose(np.array(got), expected, atol=2e-6)
    np.testing.assert_array_equal(np.array(conv(channels, kernel, bias, channels_last=True)(window)), np.array(got))


def test_depthwise_conv_silu_one_token_is_a_row_of_many():
    window = mx.array(normal(8, 20, 9))
    many = np.array(conv(9, 4, True)(window))
    for t in range(17):
        np.testing.assert_allclose(np.array(conv(9, 4, True)(window[t : t + 4]))[0], many[t], atol=1e-6)


def test_conv_bias_takes_the_path_of_none():
    window = mx.array(normal(8, 20, 9))
    arrays = {"weight": mx.array(normal(6, 9, 1, 4))}
    plain = CausalConv(Weights(arrays))(window)
    biased = CausalConv(Weights(arrays | {"bias": mx.zeros(9)}))(window)
    np.testing.assert_array_equal(np.array(biased), np.array(plain))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_gated_group_rms_norm(groups: int):
    """Gate first, then a norm over each group, then the weight, which varies over groups."""
    y, z, weight = normal(0, 5, 30), normal(1, 5, 30), normal(2, 30)
    gated = (y * z / (1 + np.exp(-z))).astype(np.float64)
    parts = gated.reshape(5, groups, -1)
    expected = (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-3)).reshape(5, 30) * weight
    got = gated_group_norm(mx.array(y), mx.array(z), mx.array(weight), groups, 1e-3)
    np.testing.assert_allclose(np.array(got), expected, atol=1e-5)


@pytest.fixture(scope="module")
def mixer() -> Mamba2:
    drawn = weights(config(RAW))
    return Mamba2(CONFIG, Weights({name: mx.array(w) for name, w in drawn.items()}).at("backbone.layers.0.mixer"), slot=0)


def rows_of(n: int) -> tuple[mx.array, mx.array]:
    return mx.array(normal(10, n, CHANNELS)), mx.array(np.abs(normal(11, n, H)))


def states() -> tuple[mx.array, mx.array]:
    return mx.array(normal(12, 1, TAIL, CHANNELS)), mx.array(normal(13, 1, H, P, N))


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=2e-5)


def test_step_sizes_do_not_overflow_and_keep_to_their_limit(mixer: Mamba2):
    raw = np.array([-200.0, -20.0, 0.0, 20.0, 89.0, 1e30], np.float32)
    dt = np.array(mixer.step_sizes(mx.array(raw)[:, None] - mixer.dt_bias))
    expected = [0.0, 2.0611537e-09, 0.6931472, 20.0, 89.0, 1e30]
    np.testing.assert_allclose(dt[:, 0], expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("left", [0, 1, 3, 8])
@pytest.mark.parametrize("right", [0, 1, 3, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 20])
def test_conv_padded_row(mixer: Mamba2, left: int, right: int, n: int):
    """Padding on either side, whatever it holds, leaves outputs and states as they are without; its own output is 0."""
    rows, dt = rows_of(n)
    conv, ssm = states()
    y, [conv_end], [ssm_end] = mixer.mix(rows, dt, conv, ssm)
    junk = partial(np.full, fill_value=1e4, dtype=np.float32)
    padded = mx.concatenate([mx.array(junk((left, CHANNELS))), rows, mx.array(junk((right, CHANNELS)))])
    steps = mx.concatenate([mx.array(junk((left, H))), dt, mx.array(junk((right, H)))])
    got, [conv_padded], [ssm_padded] = mixer.mix(padded, steps, conv, ssm, left=left, right=right)
    close(got[left : left + n], y)
    close(ssm_padded, ssm_end)
    np.testing.assert_array_equal(np.array(conv_padded), np.array(conv_end))
    assert not np.array(got)[:left].any() and not np.array(got)[left + n :].any()


def test_padding_of_nan_does_not_spread(mixer: Mamba2):
    rows, dt = rows_of(6)
    y, [_], [ssm] = mixer.mix(rows[:4], dt[:4], *states())
    nan = mx.full((2, CHANNELS), float("nan"))
    got, [_], [padded] = mixer.mix(mx.concatenate([rows[:4], nan]), mx.concatenate([dt[:4], nan[:, :H]]), *states(), right=2)
    close(got[:4], y)
    close(padded, ssm)


def test_a_forward_of_padding_alone_changes_no_state(mixer: Mamba2):
    rows, dt = rows_of(5)
    conv, ssm = states()
    y, [conv_end], [ssm_end] = mixer.mix(rows, dt, conv, ssm, right=5)
    np.testing.assert_array_equal(np.array(conv_end), np.array(conv))
    np.testing.assert_array_equal(np.array(ssm_end), np.array(ssm))
    assert not np.array(y).any()


@pytest.mark.parametrize("splits", [[1], [1, 2, 3], [2, 11], [4, 5, 19], [19]])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 5), (3, 0), (2, 4)])
def test_conv_and_scan_segment_equivalence_single(mixer: Mamba2, splits: list[int], left: int, right: int):
    """A split forward is the whole one, and each boundary state is that of the prefix alone."""
    n = 20
    rows, dt = rows_of(left + n + right)
    whole, [conv_end], [ssm_end] = mixer.mix(rows, dt, *states(), left=left, right=right)
    y, convs, ssms = mixer.mix(rows, dt, *states(), splits=splits, left=left, right=right)
    close(y, whole)
    assert len(convs) == len(ssms) == len(splits) + 1
    np.testing.assert_array_equal(np.array(convs[-1]), np.array(conv_end))
    close(ssms[-1], ssm_end)
    for split, conv, ssm in zip(splits, convs, ssms, strict=False):
        _, [conv_prefix], [ssm_prefix] = mixer.mix(rows[left : left + split], dt[left : left + split], *states())
        np.testing.assert_array_equal(np.array(conv), np.array(conv_prefix))
        close(ssm, ssm_prefix)


def test_boundary_states_do_not_keep_the_forward_alive(mixer: Mamba2):
    rows, dt = rows_of(3000)
    mx.eval(rows, dt)

    def prefilled() -> RecurrentState:
        state = CONFIG.make_state()
        state.prepare_snapshots([1000, 2000, 3000])
        mixer._prefill(rows, dt, Span(0, 3000, 0, [state]))
        mx.eval(state.arrays())
        return state

    prefilled()  # what the scan makes once in a process: masks of its chunks
    before = active_memory()
    state = prefilled()
    size = sum(array.nbytes for array in state.arrays())
    assert active_memory() - before < size + 6 * 16384  # small slices share a buffer of at most 16 KiB more


class Scheduled(RecurrentState):
    """A state with captures at these offsets of its next forward."""

    def __init__(self, offsets: list[int]) -> None:
        state = CONFIG.make_state()
        super().__init__(state.conv_shape, state.ssm_shape)
        self.offsets, self.captured = offsets, []

    def splits(self, n: int) -> list[int]:
        return self.offsets

    def put(self, n: int, conv_states: Any, ssm_states: Any) -> None:
        self.captured = list(zip(conv_states, ssm_states, strict=True))
        self.offsets = []
        super().put(n, conv_states[-1:], ssm_states[-1:])


def test_conv_and_scan_segment_equivalence_batched_ragged(mixer: Mamba2):
    x = mx.array(normal(14, 33, RAW["hidden_size"]))
    lengths, schedules, padding = [9, 1, 17, 6], [[4], [], [1, 5, 16], [2]], [0, 0, 0, 3]
    scheduled = [Scheduled(offsets) for offsets in schedules]
    plain = [CONFIG.make_state() for _ in lengths]

    def run(slots: list[Any]) -> mx.array:
        spans, start = [], 0
        for length, slot, pad in zip(lengths, slots, padding, strict=True):
            spans.append(Span(start, length, 0, [slot], pad))
            start += length
        return mixer(x, spans)

    close(run(scheduled)[:30], run(plain)[:30])
    start = 0
    for length, state, offsets, pad in zip(lengths, scheduled, schedules, padding, strict=True):
        assert state.length == length - pad
        for end, (conv, ssm) in zip([*offsets, length - pad], state.captured, strict=True) if offsets else []:
            alone = CONFIG.make_state()
            mixer(x[start : start + end], [Span(0, end, 0, [alone])])
            close(conv, alone.get()[0])
            close(ssm, alone.get()[1])
        start += length
