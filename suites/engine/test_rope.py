"""engine/layers/rope.py: spellings, formulas, bounds."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.errors import ConfigError, Refused
from engine.layers.rope import Rope, RopeConfig, rotate

DIM = 16
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def inv_freq(theta: float = 10000.0) -> np.ndarray:
    return theta ** (-np.arange(0, DIM, 2) / DIM)


@pytest.mark.parametrize(
    ("rope_type", "section"),
    [
        ("default", {}),
        ("linear", {"factor": 2.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False}),
        ("yarn", YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}),
        ("yarn", YARN | {"attention_factor": 1.3}),
    ],
)
def test_both_spellings_mean_the_same(rope_type: str, section: dict[str, Any]):
    new = {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0} | section}
    old = {"rope_theta": 500.0, "rope_scaling": {"rope_type": rope_type} | section}
    oldest = {"rope_theta": 500.0, "rope_scaling": {"type": rope_type} | section}
    configs = [RopeConfig.from_dict(raw) for raw in (new, old, oldest, new | old)]
    assert all(config == configs[0] for config in configs)
    assert configs[0].rope_theta == 500.0 and configs[0].rope_type == rope_type


def test_absent_or_null_sections_are_the_default_rope():
    for raw in ({}, {"rope_scaling": None}, {"rope_parameters": None, "rope_theta": 10000}):
        assert RopeConfig.from_dict(raw) == RopeConfig()


@pytest.mark.parametrize("name", ["dynamic", "longrope", "su", "mrope"])
def test_an_unknown_type_is_refused_by_name(name: str):
    with pytest.raises(Refused, match=f"rope_type = '{name}'|type = '{name}'"):
        RopeConfig.from_dict({"rope_parameters": {"rope_type": name, "factor": 2.0}})
    with pytest.raises(Refused, match=name):
        RopeConfig.from_dict({"rope_scaling": {"type": name, "factor": 2.0}})


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_scaling": []}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn"} | YARN | {"beta_fast": 1, "beta_slow": 2}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn"} | YARN | {"truncate": 1}}, "truncate"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"rope_theta": 6.0}}, "contradict"),
    ],
)
def test_a_bad_field_is_named(raw: dict[str, Any], field: str):
    with pytest.raises(ConfigError, match=field):
        RopeConfig.from_dict(raw)


def test_linear_divides_frequencies_by_the_factor():
    config = RopeConfig.from_dict({"rope_scaling": {"type": "linear", "factor": 4.0}})
    np.testing.assert_allclose(Rope(config, DIM).inv_freq, inv_freq() / 4, rtol=1e-14)


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_blends_between():
    got = Rope(RopeConfig.from_dict({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0} | LLAMA3}), DIM).inv_freq
    expected = []
    for f in inv_freq():
        wavelength = 2 * math.pi / f
        if wavelength < 64 / 4:
            expected.append(f)
        elif wavelength > 64 / 1:
            expected.append(f / 8)
        else:
            s = (64 / wavelength - 1) / (4 - 1)
            expected.append((1 - s) * f / 8 + s * f)
    np.testing.assert_allclose(got, expected, rtol=1e-14)
    assert sum((got < inv_freq()) & (got > inv_freq() / 8)) > 0, "no frequency is blended: the test would not see the ramp"


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_between_the_dimensions_of_beta_fast_and_beta_slow(truncate: bool):
    raw = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "truncate": truncate} | YARN}
    got = Rope(RopeConfig.from_dict(raw), DIM).inv_freq
    low, high = (DIM * math.log(64 / (beta * 2 * math.pi)) / (2 * math.log(100.0)) for beta in (32, 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    ramp = np.array([min(max((i - low) / (high - low), 0), 1) for i in range(DIM // 2)])
    base = inv_freq(100.0)
    np.testing.assert_allclose(got, base / 4 * ramp + base * (1 - ramp), rtol=1e-14)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"mscale": 0.5, "mscale_all_dim": 1.0}, (0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.7, "mscale": 0.5, "mscale_all_dim": 1.0}, 1.7),
    ],
)
def test_yarn_attention_factor_is_given_or_inferred(extra: dict[str, float], expected: float):
    config = RopeConfig.from_dict({"rope_parameters": {"rope_type": "yarn"} | YARN | extra})
    assert config.attention_factor == pytest.approx(expected, rel=1e-14)
    cos, _ = Rope(config, DIM).tables(np.array([0]))
    np.testing.assert_allclose(np.array(cos), expected, rtol=1e-6)


def test_yarn_without_factor_takes_the_ratio_of_lengths():
    raw = {"max_position_embeddings": 256, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}
    assert RopeConfig.from_dict(raw).factor == 4.0


@pytest.mark.parametrize("position", [0, 1, 4095, 131071, 10_000_000])
def test_tables_are_exact_to_float32_at_any_position(position: int):
    cos, sin = Rope(RopeConfig(rope_theta=500000.0), DIM).tables(np.array([position]))
    angles = [position * 500000.0 ** (-2 * i / DIM) for i in range(DIM // 2)]
    np.testing.assert_allclose(np.array(cos)[0, 0, : DIM // 2], [math.cos(a) for a in angles], atol=1e-7)
    np.testing.assert_allclose(np.array(sin)[0, 0, DIM // 2 :], [math.sin(a) for a in angles], atol=1e-7)


def test_rotation_turns_pairs_that_are_half_a_head_apart():
    x = np.random.default_rng(0).normal(size=(5, 3, DIM)).astype(np.float32)
    positions = np.array([7, 8, 0, 1, 300])
    got = np.array(rotate(mx.array(x), *Rope(RopeConfig(), DIM).tables(positions)))
    z = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(1j * np.outer(positions, inv_freq()))[:, None]
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), atol=1e-6)
    assert rotate(mx.array(x).astype(mx.bfloat16), *Rope(RopeConfig(), DIM).tables(positions)).dtype == mx.bfloat16


@pytest.mark.parametrize("section", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": {"type": "default"}}])
def test_partial_rotation_is_refused_wherever_it_stands(section):
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        RopeConfig.from_dict({**section, "partial_rotary_factor": 0.5})
