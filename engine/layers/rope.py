"""Rotary position embedding: default, linear, llama3 and yarn; half-split or interleaved pairs.

RoFormer https://arxiv.org/abs/2104.09864; YaRN https://arxiv.org/abs/2309.00071; llama3 as in the config of Llama 3.1.

Angles are made on the host in float64 from integer positions, once per forward, and serve all layers: cos and sin are
exact to float32 at any position, which float32 angles are not (at position 100,000 they are off by 4e-3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.errors import ConfigError
from engine.fields import Fields

__all__ = ["Rope", "RopeConfig", "rotate", "rotate_interleaved", "yarn_mscale"]

_TYPES = ("default", "linear", "llama3", "yarn")
_MAX_POSITIONS = 1 << 30


@dataclass(frozen=True)
class RopeConfig:
    """One meaning for both spellings of a config; names are the checkpoints' own. Unused fields keep their defaults."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # what cos and sin are multiplied by
    mscale_all_dim: float = 0.0  # yarn, for families that put a temperature on all of the softmax scale

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], default_theta: float = 10000.0) -> RopeConfig:
        """Read `rope_parameters`, or `rope_theta` + `rope_scaling`; where a config has both they must mean the same.

        Raises ConfigError (missing, out of bounds, contradictory) or Refused (a rope type that is not supported).
        """
        return cls.from_fields(Fields(raw), default_theta)

    @classmethod
    def from_fields(
        cls,
        fields: Fields,
        default_theta: float = 10000.0,
        *,
        layer_type: str | None = None,
        theta_field: str = "rope_theta",
        scaled: bool = True,
    ) -> RopeConfig:
        """The same, for one layer type of a model whose layer types rotate differently.

        layer_type: the section of `rope_parameters` to read; None: it has no sections. theta_field, scaled: where a config
        without `rope_parameters` has the base of this layer type, and whether its `rope_scaling` is this layer type's.
        """
        _refuse_partial(fields)
        theta = _theta(fields, default_theta, theta_field)
        found = {}
        if fields.has("rope_parameters"):
            rope = fields.section("rope_parameters")
            found["rope_parameters"] = _from_section(fields, rope if layer_type is None else rope.section(layer_type), theta)
        if scaled and fields.has("rope_scaling"):
            found["rope_scaling"] = _from_section(fields, fields.section("rope_scaling"), theta)
        if len(set(found.values())) > 1:
            raise ConfigError("config fields rope_parameters and rope_scaling contradict each other; remove one of the two")
        for config in found.values():
            return config
        return cls(rope_theta=theta)


def _theta(fields: Fields, default: float, name: str = "rope_theta") -> float:
    return fields.number(name, 1.0 + 1e-6, 1e15, default)


def _refuse_partial(fields: Fields) -> None:
    """In a section of its own spelling, or directly in the config as older ones have it."""
    if fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "must be 1, partial rotation is not supported")


def _from_section(fields: Fields, rope: Fields, default_theta: float) -> RopeConfig:
    if any(isinstance(value, Mapping) for value in rope.raw.values()):
        raise rope.error("rope_type", "must stand directly in the section; parameters by layer type are not supported")
    rope_type = rope.choice("rope_type", _TYPES, rope.choice("type", _TYPES, "default"))
    theta = _theta(rope, default_theta)
    _refuse_partial(rope)
    if rope_type == "default":
        return RopeConfig(rope_theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type, theta, rope.number("factor", 1.0, 1e6))
    # The pretraining length stands in the section or, in a few families, next to it, and then takes precedence.
    outside = fields.integer("original_max_position_embeddings", 1, _MAX_POSITIONS, None)
    inside = rope.integer("original_max_position_embeddings", 1, _MAX_POSITIONS, None)
    longest = fields.integer("max_position_embeddings", 1, _MAX_POSITIONS, None)
    original = outside or inside or longest
    if original is None:
        raise rope.error("original_max_position_embeddings", "is needed")
    if rope_type == "llama3":
        low = rope.number("low_freq_factor", 1e-6, 1e6)
        high = rope.number("high_freq_factor", 1e-6, 1e6)
        if low >= high:
            raise rope.error("low_freq_factor", f"must be less than high_freq_factor {high:g}")
        return RopeConfig(
            rope_type, theta, rope.number("factor", 1.0, 1e6), original, low_freq_factor=low, high_freq_factor=high
        )
    if not rope.has("factor") and longest is not None:
        factor = max(1.0, longest / original)
    else:
        factor = rope.number("factor", 1.0, 1e6)
    fast = rope.number("beta_fast", 1e-6, 1e6, 32.0)
    slow = rope.number("beta_slow", 1e-6, 1e6, 1.0)
    if fast < slow:
        raise rope.error("beta_fast", f"must not be less than beta_slow {slow:g}")
    mscale = rope.number("mscale", 0.0, 1e3, 0.0)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, 1e3, 0.0)
    inferred = yarn_mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        inferred = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return RopeConfig(
        rope_type,
        theta,
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", 1e-6, 1e6, inferred),
        mscale_all_dim=mscale_all_dim,
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature: 0.1 m ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


class Rope:
    """cos and sin for positions; `inv_freq` is float64 [dim / 2]. interleaved: pairs are (2i, 2i + 1), not (i, i + dim / 2)."""

    def __init__(self, config: RopeConfig, dim: int, interleaved: bool = False) -> None:
        self.inv_freq = _inverse_frequencies(config, dim)
        self.attention_factor = config.attention_factor
        self.interleaved = interleaved

    def tables(self, positions: np.ndarray) -> tuple[mx.array, mx.array]:
        """positions: integers [T]. Returns cos and sin for `rotate` (interleaved: for `rotate_interleaved`).

        float32 [T, 1, dim], to broadcast over heads.
        """
        angles = positions.astype(np.float64)[:, None, None] * self.inv_freq
        cos, sin = np.cos(angles) * self.attention_factor, np.sin(angles) * self.attention_factor
        axis = -1 if self.interleaved else -2
        tables = (np.stack(pair, axis).reshape(*angles.shape[:2], -1) for pair in ((cos, cos), (-sin, sin)))
        cos, sin = (mx.array(table.astype(np.float32)) for table in tables)
        return cos, sin


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate pairs (i, i + dim / 2) of x [T, heads, dim]; computed in float32, returned in x's dtype."""
    half = x.shape[-1] // 2
    swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
    return (x * cos + swapped * sin).astype(x.dtype)


def rotate_interleaved(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate pairs (2i, 2i + 1) of x [T, heads, dim]; computed in float32, returned in x's dtype."""
    swapped = x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    return (x * cos + swapped * sin).astype(x.dtype)


def _inverse_frequencies(config: RopeConfig, dim: int) -> np.ndarray:
    inv_freq = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.rope_type == "linear":
        return inv_freq / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, inv_freq)
    if config.rope_type == "yarn":
        return _yarn(config, inv_freq, dim)
    return inv_freq


def _llama3(config: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    # Wavelengths below original/high are kept, above original/low divided by factor, between them interpolated.
    rotations = config.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (1.0 - kept) * inv_freq / config.factor + kept * inv_freq


def _yarn(config: RopeConfig, inv_freq: np.ndarray, dim: int) -> np.ndarray:
    def dimension_of(rotations: float) -> float:
        """The (fractional) dimension that turns this often over the pretraining length."""
        length = config.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a division by zero
    interpolated = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return interpolated * inv_freq / config.factor + (1.0 - interpolated) * inv_freq
