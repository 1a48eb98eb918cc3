"""Encoders of the quantised formats that reference_models.quantised decodes, in torch: what a case's file holds.

They round to the nearest code and store scales as published files do. No engine has a part in them, so that a fault in an
engine's own quantiser does not hide one in its decoder.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference_models.quantised import E2M1, E4M3, E8M0

__all__ = ["MLX_MODES", "affine", "block_fp8", "compressed_nvfp4", "fp8", "gpt_oss_mxfp4", "mlx", "mxfp8", "nvfp4", "packed"]

Parts = dict[str, Tensor]  # what is put after the name of a weight -> tensor
MLX_MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # group size, bits
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] as bytes [..., n * bits / 8]: a stream of codes, the lowest bit first."""
    single = (codes.to(torch.uint8)[..., None] >> torch.arange(bits, dtype=torch.uint8)) & 1
    octets = single.flatten(-2).unflatten(-1, (-1, 8))
    return (octets << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _words(octets: Tensor) -> Tensor:
    return octets.contiguous().view(torch.uint32)


def _e2m1(values: Tensor) -> Tensor:
    return (values.to(torch.float64)[..., None] - E2M1).abs().argmin(-1)


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float32).to(torch.float8_e4m3fn)


def _grouped(weight: Tensor, size: int) -> Tensor:
    return weight.to(torch.float64).unflatten(-1, (-1, size))


def _exponents(groups: Tensor, largest: int) -> Tensor:
    """e8m0 codes [...] of groups [..., size]: the element format's largest exponent is `largest`."""
    return (groups.abs().amax(-1).log2().floor() - largest + 127).clamp(0, 254).to(torch.uint8)


def affine(weight: Tensor, group_size: int, bits: int) -> Parts:
    """MLX's affine: scale and bias of a group are float32 with bfloat16 values."""
    groups = _grouped(weight, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / (2**bits - 1)).to(torch.bfloat16).to(torch.float32)
    bias = low.to(torch.bfloat16).to(torch.float32)
    codes = ((groups - bias[..., None]) / scale[..., None]).round().clamp(0, 2**bits - 1)
    return {".weight": _words(packed(codes.flatten(-2), bits)), ".scales": scale, ".biases": bias}


def mlx(weight: Tensor, mode: str) -> Parts:
    """MLX's mxfp4, mxfp8 and nvfp4."""
    size, bits = MLX_MODES[mode]
    groups = _grouped(weight, size)
    if mode == "nvfp4":
        scales = _e4m3(groups.abs().amax(-1) / _E2M1_MAX).view(torch.uint8)
        steps = E4M3[scales.to(torch.int64)]
    else:
        scales = _exponents(groups, 2 if mode == "mxfp4" else 8)
        steps = E8M0[scales.to(torch.int64)]
    scaled = groups / steps[..., None]
    codes = _e4m3(scaled).view(torch.uint8) if mode == "mxfp8" else packed(_e2m1(scaled).flatten(-2), bits)
    return {".weight": _words(codes.flatten(-2) if mode == "mxfp8" else codes), ".scales": scales}


def _two_level(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed e2m1, e4m3 scales of groups of 16, and the float32 scale of all."""
    whole = (weight.abs().max() / (_E2M1_MAX * _E4M3_MAX)).to(torch.float32)
    groups = _grouped(weight, 16)
    scales = _e4m3(groups.abs().amax(-1) / _E2M1_MAX / whole)
    steps = E4M3[scales.view(torch.uint8).to(torch.int64)] * whole
    return packed(_e2m1(groups / steps[..., None]).flatten(-2), 4), scales, whole


def nvfp4(weight: Tensor) -> Parts:
    """ModelOpt's NVFP4, with the scale of activations that such files have too."""
    codes, scales, whole = _two_level(weight)
    return {".weight": codes, ".weight_scale": scales, ".weight_scale_2": whole, ".input_scale": torch.tensor(0.7)}


def compressed_nvfp4(weight: Tensor) -> Parts:
    """compressed-tensors' nvfp4-pack-quantized: the scale of all is stored as its reciprocal."""
    codes, scales, whole = _two_level(weight)
    return {
        ".weight_packed": codes,
        ".weight_scale": scales,
        ".weight_global_scale": (1 / whole).reshape(1),
        ".input_global_scale": torch.tensor([3.0]),
    }


def mxfp8(weight: Tensor) -> Parts:
    """MXFP8 as ModelOpt stores it: e4m3 and one exponent for 32 values."""
    groups = _grouped(weight, 32)
    scales = _exponents(groups, 8)
    values = _e4m3(groups / E8M0[scales.to(torch.int64)][..., None])
    return {".weight": values.flatten(-2), ".weight_scale": scales}


def fp8(weight: Tensor) -> Parts:
    """ModelOpt's FP8: one scale a tensor."""
    scale = (weight.abs().max() / _E4M3_MAX).to(torch.float32)
    return {".weight": _e4m3(weight / scale), ".weight_scale": scale, ".input_scale": torch.tensor(0.7)}


def block_fp8(weight: Tensor, rows: int, columns: int) -> Parts:
    """One scale a block; the last blocks of a row and a column may be smaller."""
    height, width = weight.shape
    scale = torch.empty(-(-height // rows), -(-width // columns))
    values = torch.empty(height, width, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[block].abs().max() / _E4M3_MAX
            values[block] = _e4m3(weight[block] / scale[i, j])
    return {".weight": values, ".weight_scale_inv": scale}


def gpt_oss_mxfp4(experts: Tensor) -> Parts:
    """Experts [experts, in, out] as published: [experts, out, in / 32, 16] of packed e2m1, and an exponent for 32 values."""
    groups = _grouped(experts.transpose(-1, -2), 32)
    scales = _exponents(groups, 2)
    return {"_blocks": packed(_e2m1(groups / E8M0[scales.to(torch.int64)][..., None]), 4), "_scales": scales}


Encoder = Callable[[Tensor], Parts]
