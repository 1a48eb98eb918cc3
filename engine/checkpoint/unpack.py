"""The bytes of a packed parameter: into MLX's own packing where it has the mode, into values where it has not (FP8).

Codes keep their bytes: ModelOpt's, compressed-tensors' and gpt-oss's first code is the low half of a byte, as in MLX's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from engine.checkpoint.bounded import one_line, shown
from engine.checkpoint.packed import Packed
from engine.checkpoint.read import COMPUTE_DTYPES, require_finite
from engine.checkpoint.tensors import TensorHeader
from engine.errors import CheckpointError
from engine.layers.quantised import QuantisedTensor, Weight
from engine.layers.unpacking import E4M3

__all__ = ["unpack"]

NAN_E4M3, NAN_E8M0 = 0x7F, 0xFF
_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"), "F8_E4M3": np.dtype("u1"), "F8_E8M0": np.dtype("u1"),
}  # fmt: skip


def unpack(packed: Packed, dtype: str) -> Weight:
    """The parameter [..., out, in], evaluated: quantised in MLX's modes, an array in compute dtype `dtype` for FP8.

    Raises CheckpointError for a scale that is no finite number.
    """
    data = {part: _read(header) for part, header in packed.parts.items()}
    _check_scales(packed, data)
    if packed.scheme.mode in ("fp8", "fp8-block"):
        values = mx.array(_fp8(packed, data)).astype(COMPUTE_DTYPES[dtype])
        mx.eval(values)
        require_finite(values, packed.name, dtype)
        return values
    rows = packed.shape[:-1]
    codes = np.ascontiguousarray(data["codes"]).reshape(*rows, -1)
    tensor = QuantisedTensor(
        weight=mx.array(codes if codes.dtype == np.uint32 else codes.view("<u4")),
        scales=_array(data["scales"], packed.parts["scales"]),
        biases=_array(data["biases"], packed.parts["biases"]) if "biases" in data else None,
        group_size=packed.scheme.group_size,
        bits=packed.scheme.bits,
        mode=packed.scheme.mode,
        global_scale=mx.array(_per_matrix_or_row(data["global_scale"], packed.shape)) if "global_scale" in data else None,
        dtype=COMPUTE_DTYPES[dtype],
    )
    mx.eval(tensor.arrays())
    return tensor


def _read(header: TensorHeader) -> np.ndarray:
    kind = _NUMPY[header.dtype]
    try:
        data = np.fromfile(header.file, kind, header.nbytes // kind.itemsize, offset=header.offset)
        return data.reshape(header.shape)
    except (OSError, ValueError) as error:  # the file changed since its header was checked
        raise CheckpointError(f"cannot read tensor {shown(header.name)} of {header.file}: {one_line(error)}") from None


def _array(data: np.ndarray, header: TensorHeader) -> mx.array:
    return mx.array(data).view(mx.bfloat16) if header.dtype == "BF16" else mx.array(data)


def _floats(data: np.ndarray, header: TensorHeader) -> np.ndarray:
    if header.dtype == "BF16":  # the upper half of float32
        return (data.astype("<u4") << 16).view("<f4")
    return data.astype(np.float32)


def _check_scales(packed: Packed, data: dict[str, np.ndarray]) -> None:
    """Every scale is a finite number. A global scale becomes float32, that of compressed-tensors its reciprocal."""
    for part, header in packed.parts.items():
        values = data[part]
        if part == "codes":
            bad = header.dtype == "F8_E4M3" and (values & 0x7F == NAN_E4M3).any()
        elif header.dtype == "F8_E4M3":
            bad = (values & 0x7F == NAN_E4M3).any()
        elif header.dtype in ("U8", "F8_E8M0"):
            bad = (values == NAN_E8M0).any()
        else:
            bad = not np.isfinite(_floats(values, header)).all()
        if bad:
            raise CheckpointError(f"tensor {shown(header.name)} in {header.file.name} holds what is no finite number")
    if "global_scale" in data and packed.scheme.layout == "compressed-tensors":
        header = packed.parts["global_scale"]
        with np.errstate(divide="ignore", over="ignore"):
            data["global_scale"] = np.float32(1) / data["global_scale"]
        if not np.isfinite(data["global_scale"]).all():
            raise CheckpointError(f"tensor {shown(header.name)} in {header.file.name} is a divisor and must not be 0")


def _per_matrix_or_row(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A scale in the shape that QuantisedTensor and _fp8 have it in: [...] or [..., out]."""
    lead, rows = shape[:-2], shape[:-1]
    count = int(np.prod(lead))
    if scale.size == count or scale.size == 1:
        return np.broadcast_to(scale.reshape(-1), (count,)).reshape(lead).copy()
    return scale.reshape(rows)


def _fp8(packed: Packed, data: Mapping[str, np.ndarray]) -> np.ndarray:
    """float32 values [..., out, in] = e4m3 * scale."""
    values = E4M3[data["codes"]]
    scales = _floats(data["scales"], packed.parts["scales"])
    if packed.scheme.mode == "fp8":
        scale = _per_matrix_or_row(scales, packed.shape)
        values *= scale[..., None] if scale.ndim == values.ndim - 1 else scale[..., None, None]
        return values
    rows, columns = packed.scheme.block
    outputs, inputs = packed.shape[-2:]
    for row in range(scales.shape[-2]):
        block = slice(row * rows, min((row + 1) * rows, outputs))
        values[..., block, :] *= np.repeat(scales[..., row, None, :], columns, axis=-1)[..., :inputs]
    return values
