"""Quantised checkpoints, decoded exactly: from the bytes and the definitions of the formats, in float64.

    format              tensors of module X                                                       value
    MLX affine          X.weight u32, X.scales, X.biases                                          q * scale + bias
    MLX mxfp4, mxfp8    X.weight u32, X.scales u8                                                 e2m1 or e4m3 * 2^(s - 127)
    MLX nvfp4           X.weight u32, X.scales u8                                                 e2m1 * e4m3
    ModelOpt NVFP4      X.weight u8, X.weight_scale e4m3, X.weight_scale_2                        e2m1 * e4m3 * weight_scale_2
    ModelOpt FP8        X.weight e4m3, X.weight_scale float (one, or one a row)                   e4m3 * weight_scale
    MXFP8               X.weight e4m3, X.weight_scale or X.weight_scale_inv u8                    e4m3 * 2^(s - 127)
    block FP8           X.weight e4m3, X.weight_scale_inv float (one a block)                    e4m3 * weight_scale_inv
    compressed-tensors  X.weight_packed u8, X.weight_scale e4m3, X.weight_global_scale            e2m1 * e4m3 / its global scale
    gpt-oss MXFP4       X_blocks u8, X_scales u8                                                  e2m1 * 2^(s - 127), transposed

Codes lie in the last axis, the first in the lowest bits. What a tensor is follows from its names and dtypes, module by module;
only MLX's layout needs the config, which says mode, group size and bits. Scales of activations and of the key/value cache are
set aside.

Sources: OCP Microscaling Formats 1.0 (E2M1, E4M3, E8M0), the NVFP4 description of ModelOpt, and the layouts of published files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference_models.recompute import Config, ReferenceError

__all__ = ["E2M1", "E4M3", "E8M0", "decoded", "unpacked"]


def _e4m3(code: int) -> float:
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


_HALF_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = torch.tensor(_HALF_E2M1 + [-value for value in _HALF_E2M1], dtype=torch.float64)
E4M3 = torch.tensor([_e4m3(code) for code in range(256)], dtype=torch.float64)
E8M0 = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [math.nan], dtype=torch.float64)

_UNUSED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
_FLOAT8 = (torch.float8_e4m3fn,)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_BITS = (2, 3, 4, 5, 6, 8)


class _Plan(NamedTuple):
    """How MLX packed a module."""

    mode: str
    group_size: int
    bits: int


_MODES = {  # group size, bits, table of values, table of scales
    "mxfp4": (32, 4, E2M1, E8M0),
    "mxfp8": (32, 8, E4M3, E8M0),
    "nvfp4": (16, 4, E2M1, E4M3),
}


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Codes u8 [..., n] of a tensor whose last axis is a stream of codes of `bits` bits, the lowest bit first."""
    stream = packed.contiguous().view(torch.uint8)  # little endian words
    single = (stream[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    codes = single.flatten(-2).unflatten(-1, (-1, bits))
    return (codes << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _spread(scales: Tensor, columns: int, name: str, group: int | None = None) -> Tensor:
    """Scales [..., groups] repeated over the columns of their groups."""
    width = columns // scales.shape[-1] if scales.shape[-1] else 0
    if not width or columns % scales.shape[-1] or (group is not None and width != group):
        raise ReferenceError(f"tensor {name!r}: {scales.shape[-1]} scales a row do not fit {columns} values")
    return scales.repeat_interleave(width, -1)


def _coded(table: Tensor, codes: Tensor) -> Tensor:
    return table[codes.view(torch.uint8).to(torch.int64)]


def _plan(config: Config, module: str) -> _Plan:
    settings = config.get("quantization") or config.get("quantization_config")
    if not isinstance(settings, Mapping):
        raise ReferenceError(f"tensor '{module}.scales' asks for config field 'quantization', which says how it is packed")
    own = settings.get(module)
    chosen: Mapping[str, Any] = own if isinstance(own, Mapping) else settings
    mode = chosen.get("mode", "affine")
    if mode in _MODES:
        return _Plan(mode, *_MODES[mode][:2])
    group_size, bits = chosen.get("group_size"), chosen.get("bits")
    if mode != "affine" or bits not in _BITS or not isinstance(group_size, int) or group_size < 1:
        raise ReferenceError(
            f"config field 'quantization' of {module!r} must be affine with 2 to 8 bits, or one of {', '.join(_MODES)} "
            f"(got mode {mode!r}, bits {bits!r}, group_size {group_size!r})"
        )
    return _Plan(mode, group_size, bits)


def _mlx(config: Config, module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    plan = _plan(config, module)
    name, scales = f"{module}.weight", tensors[f"{module}.scales"]
    if tensors[name].dtype is not torch.uint32:
        raise ReferenceError(f"tensor {name!r} with scales must be uint32 (got {tensors[name].dtype})")
    codes = unpacked(tensors[name], plan.bits)
    if plan.mode != "affine":
        _, _, values, of_scales = _MODES[plan.mode]
        return _coded(values, codes) * _spread(_coded(of_scales, scales), codes.shape[-1], name, plan.group_size)
    if f"{module}.biases" not in tensors:
        raise ReferenceError(f"tensor '{module}.biases' is missing beside {name!r}, which is affine")
    scale, bias = (
        _spread(t.to(torch.float64), codes.shape[-1], name, plan.group_size) for t in (scales, tensors[f"{module}.biases"])
    )
    return codes.to(torch.float64) * scale + bias


def _fitted(scale: Tensor, ndim: int) -> Tensor:
    """A scale for all, or one for each index of the first axes, as it multiplies a tensor of `ndim` axes."""
    scale = scale.to(torch.float64)
    if scale.numel() == 1:
        return scale.reshape(())
    return scale if scale.ndim == ndim else scale.reshape(*scale.shape, *(1,) * (ndim - scale.ndim))


def _nvfp4(packed: Tensor, scales: Tensor, name: str) -> Tensor:
    codes = unpacked(packed, 4)
    return _coded(E2M1, codes) * _spread(_coded(E4M3, scales), codes.shape[-1], name, 16)


def _fp8(config: Config, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    weight = _coded(E4M3, tensors[name])
    for suffix in ("_scale", "_scale_inv"):
        scale = tensors.get(name + suffix)
        if scale is None:
            continue
        if scale.dtype not in _FLOATS:  # one byte: an exponent for 32 values
            return weight * _spread(_coded(E8M0, scale), weight.shape[-1], name, 32)
        if suffix == "_scale":
            return weight * _fitted(scale, weight.ndim)
        return weight * _blocks(config, scale.to(torch.float64), weight.shape, name)
    raise ReferenceError(f"tensor {name!r} is float8 and has no scale beside it")


def _blocks(config: Config, scale: Tensor, shape: torch.Size, name: str) -> Tensor:
    """One scale a block of rows and columns [..., rows / block, columns / block], the last blocks cut off at the edge."""
    settings = config.get("quantization_config")
    size = (settings.get("weight_block_size") if isinstance(settings, Mapping) else None) or (128, 128)
    if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise ReferenceError(
            f"config field 'quantization_config.weight_block_size' must be two positive integers (got {size!r})"
        )
    expected = tuple(-(-n // block) for n, block in zip(shape[-2:], size, strict=True))
    if tuple(scale.shape[-2:]) != expected:
        raise ReferenceError(f"tensor '{name}_scale_inv' must end in {list(expected)} (got {list(scale.shape)})")
    rows = scale.repeat_interleave(size[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(size[1], -1)[..., : shape[-1]]


def decoded(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with every quantised module as one float64 weight, and without the scales; others as they are."""
    found: dict[str, Tensor] = {}
    parts: set[str] = set()
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if name.endswith(_UNUSED):
            parts.add(name)
        elif kind == "weight_packed":
            _need(tensors, name, f"{stem}.weight_scale", f"{stem}.weight_global_scale")
            plain = _nvfp4(tensor, tensors[f"{stem}.weight_scale"], name)
            found[f"{stem}.weight"] = plain / _fitted(tensors[f"{stem}.weight_global_scale"], plain.ndim)
            parts |= {name, f"{stem}.weight_scale", f"{stem}.weight_global_scale"}
        elif name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            _need(tensors, name, f"{whole}_scales")
            codes = unpacked(tensor.flatten(-2), 4)  # [experts, rows, groups, 16] -> [experts, rows, columns]
            values = _coded(E2M1, codes) * _spread(_coded(E8M0, tensors[f"{whole}_scales"]), codes.shape[-1], name, 32)
            found[whole] = values.transpose(-1, -2)
            parts |= {name, f"{whole}_scales"}
        elif f"{stem}.scales" in tensors and kind == "weight":
            found[name] = _mlx(config, stem, tensors)
            parts |= {name, f"{stem}.scales", f"{stem}.biases"}
        elif tensor.dtype is torch.uint8 and f"{name}_scale" in tensors:
            plain = _nvfp4(tensor, tensors[f"{name}_scale"], name)
            second = tensors.get(f"{name}_scale_2")
            found[name] = plain if second is None else plain * _fitted(second, plain.ndim)
            parts |= {name, f"{name}_scale", f"{name}_scale_2"}
        elif tensor.dtype in _FLOAT8 and not kind.endswith("_scale"):
            found[name] = _fp8(config, name, tensors)
            parts |= {name, f"{name}_scale", f"{name}_scale_inv"}
    plain_ones = {name: tensor for name, tensor in tensors.items() if name not in parts}
    odd = [name for name, tensor in plain_ones.items() if tensor.dtype in (torch.uint8, torch.uint32, *_FLOAT8)]
    if odd:
        raise ReferenceError(f"tensor {odd[0]!r} ({tensors[odd[0]].dtype}) belongs to no quantised module that is known here")
    return plain_ones | found


def _need(tensors: Mapping[str, Tensor], name: str, *others: str) -> None:
    for other in others:
        if other not in tensors:
            raise ReferenceError(f"tensor {other!r} is missing beside {name!r}")
