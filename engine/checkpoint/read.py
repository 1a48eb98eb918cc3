"""The data of one tensor: read at its checked place in the file, dequantised, converted; one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from engine.checkpoint import gguf_header
from engine.checkpoint.bounded import one_line, shown
from engine.checkpoint.tensors import TensorHeader
from engine.errors import CheckpointError

__all__ = ["COMPUTE_DTYPES", "GGUF_DTYPES", "read_tensor", "require_finite"]

COMPUTE_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

_PLAIN: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
# ggml blocks of 32 weights: scale d, Q4_1 with minimum m; a byte of qs holds weight i in its low and i + 16 in its high half
_BLOCKS: dict[str, np.dtype[Any]] = {
    "Q4_0": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
}
_BLOCKS_AT_ONCE = 1 << 17  # 16 MiB of float32
# ... and those that the gguf package dequantises: (weights, bytes) of a block
_PACKAGE_BLOCKS = {
    name: (block, size) for name, block, size in gguf_header.SUPPORTED.values() if name not in _PLAIN and name not in _BLOCKS
}
GGUF_DTYPES = frozenset((*_PLAIN, *_BLOCKS, *_PACKAGE_BLOCKS))


def read_tensor(header: TensorHeader, dtype: str, arrange: Callable[[mx.array], mx.array] | None = None) -> mx.array:
    """The tensor in compute dtype `dtype`, evaluated; `arrange` reorders its rows before. Raises CheckpointError."""
    try:
        if header.dtype in _BLOCKS:
            array = _read_blocks(header)
        elif header.dtype in _PACKAGE_BLOCKS:
            array = _read_package_blocks(header)
        else:
            array = _read_plain(header)
    except (OSError, ValueError) as error:  # the file changed since its header was checked
        raise CheckpointError(f"cannot read tensor {shown(header.name)} of {header.file}: {one_line(error)}") from None
    if arrange is not None:
        array = arrange(array)
    array = array.astype(COMPUTE_DTYPES[dtype])
    mx.eval(array)
    if dtype == "float16" and header.dtype != "F16":
        require_finite(array, header.name, dtype)
    return array


def require_finite(array: mx.array, name: str, dtype: str) -> None:
    """Raises CheckpointError where a dtype does not hold the values of a parameter."""
    if not mx.isfinite(array).all().item():
        other = "; load it as bfloat16 or float32" if dtype == "float16" else "; its scales are damaged"
        raise CheckpointError(f"tensor {shown(name)} has values beyond {dtype}{other}")


def _read_plain(header: TensorHeader) -> mx.array:
    kind = _PLAIN[header.dtype]
    data = np.fromfile(header.file, kind, header.nbytes // kind.itemsize, offset=header.offset).reshape(header.shape)
    array = mx.array(data)
    return array.view(mx.bfloat16) if header.dtype == "BF16" else array


def _read_blocks(header: TensorHeader) -> mx.array:
    kind = _BLOCKS[header.dtype]
    count = header.nbytes // kind.itemsize
    weights = np.empty((count, 32), np.float32)
    with header.file.open("rb") as file:
        file.seek(header.offset)
        for start in range(0, count, _BLOCKS_AT_ONCE):
            blocks = np.fromfile(file, kind, min(_BLOCKS_AT_ONCE, count - start))
            _dequantise(header.dtype, blocks, weights[start : start + _BLOCKS_AT_ONCE])
    return mx.array(weights.reshape(header.shape))


def _read_package_blocks(header: TensorHeader) -> mx.array:
    import gguf  # here: K-quants are all that needs it

    block, size = _PACKAGE_BLOCKS[header.dtype]
    count = header.nbytes // size
    weights = np.empty((count, block), np.float32)
    kind, at_once = gguf.GGMLQuantizationType[header.dtype], _BLOCKS_AT_ONCE * 32 // block
    with header.file.open("rb") as file:
        file.seek(header.offset)
        for start in range(0, count, at_once):
            part = weights[start : start + at_once]
            data = np.fromfile(file, np.uint8, len(part) * size)
            with np.errstate(all="ignore"):  # scales of a damaged file may be NaN or infinite
                part[:] = gguf.dequantize(data[None], kind).reshape(part.shape)  # one row: it works row by row
    return mx.array(weights.reshape(header.shape))


def _dequantise(name: str, blocks: np.ndarray, weights: np.ndarray) -> None:
    """Blocks [n] into float32 weights [n, 32]: d * q, with q from -8 (Q4_0) or -128 (Q8_0), or d * q + m (Q4_1). Exact."""
    quants = blocks["qs"]
    if name == "Q8_0":
        weights[:] = quants
    else:
        np.bitwise_and(quants, 15, out=weights[:, :16], casting="unsafe")
        np.right_shift(quants, 4, out=weights[:, 16:], casting="unsafe")
        if name == "Q4_0":
            weights -= 8
    weights *= blocks["d"].astype(np.float32)[:, None]
    if name == "Q4_1":
        weights += blocks["m"].astype(np.float32)[:, None]
