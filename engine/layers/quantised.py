"""Weights as packed integers with scales, in MLX's modes, and what a product with them is.

| mode | bits | group | scale of a group | value |
|---|---|---|---|---|
| affine | 2, 3, 4, 5, 6, 8 | 32, 64, 128 | float, with a bias | scale * code + bias |
| mxfp4 | 4 (e2m1) | 32 | e8m0: 2^(byte - 127) | code * scale |
| mxfp8 | 8 (e4m3) | 32 | e8m0 | code * scale |
| nvfp4 | 4 (e2m1) | 16 | e4m3 | code * scale (* global scale) |

MX formats: OCP Microscaling Formats 1.0. Groups lie along the inputs. Codes are packed into uint32, the first
in the lowest bits.

A **global scale** multiplies the whole tensor, or each row of it, on top of the groups' scales. MLX's products have no argument
for it, so the product is scaled after: it is linear in the scale. The unscaled product is larger by 1 / scale (1e4 to 1e5 for
nvfp4, whose group scales lie near 448), which float16 does not hold. A float16 input is therefore widened to float32 where a
global scale is there; bfloat16 has float32's range. Folding the scale into the input instead would push it below float16's
normal numbers, and folding it into the e4m3 scales would underflow these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from engine.counting import count
from engine.layers import unpacking

__all__ = ["MODES", "Format", "QuantisedTensor", "Weight", "dense", "matmul", "stack"]

UNPACK_ROWS = 8  # on a CPU: unpacking costs what 2 to 10 rows of a packed product do, by mode


@dataclass(frozen=True)
class Format:
    """What MLX offers of one mode."""

    group_sizes: tuple[int, ...]
    bits: tuple[int, ...]


MODES = {
    "affine": Format((32, 64, 128), (2, 3, 4, 5, 6, 8)),
    "mxfp4": Format((32,), (4,)),
    "mxfp8": Format((32,), (8,)),
    "nvfp4": Format((16,), (4,)),
}


@dataclass(frozen=True)
class QuantisedTensor:
    """A matrix [out, in] or a stack of them [..., out, in]; groups along `in`. Raises ValueError where its parts do not fit."""

    weight: mx.array  # uint32 [..., out, in * bits / 32]
    scales: mx.array  # [..., out, in / group_size]: floating for affine, else the bytes, uint8
    biases: mx.array | None  # as scales, for affine; else None
    group_size: int
    bits: int
    mode: str
    global_scale: mx.array | None = None  # float32 [...]: one per matrix, or [..., out]: one per row
    dtype: mx.Dtype = mx.float32  # of the dequantised values

    def __post_init__(self) -> None:
        known = MODES.get(self.mode)
        if known is None or self.group_size not in known.group_sizes or self.bits not in known.bits:
            raise ValueError(f"no mode {self.mode} with groups of {self.group_size} and {self.bits} bits")
        floating = self.scales.dtype in (mx.float32, mx.float16, mx.bfloat16)
        if self.weight.dtype != mx.uint32 or (self.scales.dtype != mx.uint8 and self.mode != "affine"):
            raise ValueError(f"{self.mode} needs uint32 codes and uint8 scales (got {self.weight.dtype}, {self.scales.dtype})")
        if self.mode == "affine" and (self.biases is None or not floating or self.biases.shape != self.scales.shape):
            raise ValueError("affine needs floating scales, and biases of their shape")
        if self.mode != "affine" and self.biases is not None:
            raise ValueError(f"{self.mode} has no biases")
        if self.weight.ndim < 2 or self.scales.shape != (*self.shape[:-1], self.shape[-1] // self.group_size):
            raise ValueError(f"{self.mode}: scales {self.scales.shape} do not fit codes {self.weight.shape}")
        scale = self.global_scale
        if scale is not None and (scale.dtype != mx.float32 or scale.shape not in (self.shape[:-2], self.shape[:-1])):
            raise ValueError(f"a global scale must be float32, one per matrix or row of {self.shape} (got {scale.shape})")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values: [..., out, in]."""
        return (*self.weight.shape[:-1], self.weight.shape[-1] * 32 // self.bits)

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """All parts, to evaluate them."""
        return [part for part in (self.weight, self.scales, self.biases, self.global_scale) if part is not None]

    def bound(self) -> float:
        """What no value's magnitude exceeds, but for rounding; from the largest scale, bias, code and global scale."""
        scales, biases = self._float_scales()
        if self.mode == "affine":
            assert biases is not None
            most = ((1 << self.bits) - 1) * _largest(scales) + _largest(biases)
        else:
            known = unpacking.E4M3 if self.mode == "nvfp4" else unpacking.E8M0
            codes = unpacking.E4M3 if self.bits == 8 else unpacking.E2M1
            most = float(np.nanmax(codes)) * float(np.abs(known[np.asarray(scales)]).max())
        return most if self.global_scale is None else most * _largest(self.global_scale)

    def __getitem__(self, indices: int | mx.array) -> QuantisedTensor:
        """Along the first axis: matrices of a stack, or rows of a matrix (indices an array, then)."""

        def picked(part: mx.array | None) -> mx.array | None:
            return part if part is None or part.ndim == 0 else part[indices]

        weight, scales = self.weight[indices], self.scales[indices]
        return replace(self, weight=weight, scales=scales, biases=picked(self.biases), global_scale=picked(self.global_scale))

    def dequantise(self, dtype: mx.Dtype | None = None) -> mx.array:
        """The values [..., out, in] in `dtype` (default: the tensor's), computed in float32 and rounded once. Lazy."""
        scales, biases = self._float_scales()
        even = self._even_rows
        values = mx.dequantize(
            even(self.weight),
            even(scales),
            None if biases is None else even(biases),
            self.group_size,
            self.bits,
            self.mode,
            dtype=mx.float32,
        )
        return self._scaled(values[: math.prod(self.shape[:-1])].reshape(self.shape), dtype)

    @staticmethod
    def _even_rows(part: mx.array) -> mx.array:
        """As a matrix, with its first row once more behind an odd number: MLX takes whole runs of 32 values, two rows of 16."""
        part = part.reshape(-1, part.shape[-1])
        return mx.concatenate([part, part[:1]]) if part.shape[0] % 2 else part

    def unpack(self, dtype: mx.Dtype | None = None) -> mx.array:
        """The same, at once where that is faster: on a CPU. For weights, which wait for nothing."""
        if mx.default_device().type != mx.DeviceType.cpu:
            return self.dequantise(dtype)
        scales, biases = self._float_scales()
        offsets = None if biases is None else np.asarray(biases)
        values = unpacking.values(np.asarray(self.weight), np.asarray(scales), offsets, self.bits, self.mode)
        return self._scaled(mx.array(values), dtype)

    def _float_scales(self) -> tuple[mx.array, mx.array | None]:
        if self.biases is None:
            return self.scales, None
        return self.scales.astype(mx.float32), self.biases.astype(mx.float32)

    def _scaled(self, values: mx.array, dtype: mx.Dtype | None) -> mx.array:
        if self.global_scale is not None:
            values = values * self._per_row(self.global_scale)[..., None]
        return values.astype(self.dtype if dtype is None else dtype)

    def _per_row(self, scale: mx.array) -> mx.array:
        """A global scale in a shape that meets the rows [..., out]."""
        return scale if scale.ndim == self.ndim - 1 else scale[..., None]

    def matmul(self, x: mx.array) -> mx.array:
        """x [..., in] times the transpose of this matrix [out, in]: [..., out] in x's dtype."""
        out = mx.quantized_matmul(
            self.widened(x), self.weight, self.scales, self.biases, True, self.group_size, self.bits, self.mode
        )
        if self.global_scale is not None:
            out = out.astype(mx.float32) * self._per_row(self.global_scale)
        return out.astype(x.dtype)

    def widened(self, x: mx.array) -> mx.array:
        """x in a dtype that holds the product before it is scaled."""
        return x.astype(mx.float32) if self.global_scale is not None and x.dtype == mx.float16 else x


def _largest(values: mx.array) -> float:
    return float(np.abs(np.asarray(values)).max())


Weight = mx.array | QuantisedTensor


def matmul(x: mx.array, weight: Weight) -> mx.array:
    """x [..., in] times the transpose of a weight [out, in]: [..., out]."""
    if not isinstance(weight, QuantisedTensor):
        return x @ weight.T
    if math.prod(x.shape[:-1]) >= UNPACK_ROWS and mx.default_device().type == mx.DeviceType.cpu:
        count("unpacked_matmuls")
        return x @ weight.unpack(x.dtype).T
    count("quantised_matmuls")
    return weight.matmul(x)


def dense(weight: Weight) -> mx.array:
    """A weight's values, for what is no product (a matrix that is cut into heads)."""
    return weight.unpack() if isinstance(weight, QuantisedTensor) else weight


def stack(weights: Sequence[Weight]) -> Weight:
    """Weights of one shape, one on another: [len(weights), ...]; by their values where their formats differ."""
    quantised = [weight for weight in weights if isinstance(weight, QuantisedTensor)]
    if len(quantised) < len(weights) or len({(w.mode, w.group_size, w.bits) for w in quantised}) > 1:
        return mx.stack([dense(weight) for weight in weights])
    first = quantised[0]
    biases = [weight.biases for weight in quantised if weight.biases is not None]
    scales = [weight.global_scale for weight in quantised]
    return replace(
        first,
        weight=mx.stack([weight.weight for weight in quantised]),
        scales=mx.stack([weight.scales for weight in quantised]),
        biases=mx.stack(biases) if biases else None,
        global_scale=_stacked_scales(scales, first.shape),
    )


def _stacked_scales(scales: Sequence[mx.array | None], shape: tuple[int, ...]) -> mx.array | None:
    """Global scales of matrices of this shape; one that has none has 1. One per row where any of them has one per row."""
    found = [scale.ndim for scale in scales if scale is not None]
    if not found:
        return None
    per_row = max(found) == len(shape) - 1
    wide = [mx.array(1.0) if scale is None else scale for scale in scales]
    if per_row:
        wide = [scale if scale.ndim == len(shape) - 1 else scale[..., None] for scale in wide]
    return mx.stack([mx.broadcast_to(scale, shape[:-1] if per_row else shape[:-2]) for scale in wide])
