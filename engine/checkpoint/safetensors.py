"""The header of a safetensors file, checked within bounds before MLX sees the file.

Format: 8 bytes little-endian header length N, N bytes JSON {name: {dtype, shape, data_offsets: [begin, end]}}, then the data;
offsets count from the start of the data, tensors are contiguous and fill the file (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from engine.checkpoint.bounded import one_line, parse_json, shown
from engine.checkpoint.tensors import TensorHeader
from engine.errors import CheckpointError

__all__ = ["read_header"]

MAX_HEADER_BYTES = 16 << 20  # an 11,000-tensor file has 1.3 MB
MAX_DIMENSIONS = 8
MAX_NAME = 512
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def read_header(path: Path) -> dict[str, TensorHeader]:
    """All tensors of the file by name. Raises CheckpointError, which names the file and the tensor at fault."""
    try:
        if not path.is_file():  # a pipe would block
            raise CheckpointError(f"{path} is not a file; is the checkpoint complete?")
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path.name}: the header needs {length + 8} bytes and the file has {size}; it is cut off or no safetensors"
                )
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise CheckpointError(f"{path.name}: header length {length} is not within 2 to {MAX_HEADER_BYTES} bytes")
            data = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
    entries = parse_json(data, f"{path.name}: header", max_depth=4)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path.name}: __metadata__ must map text to text (got {shown(metadata)})")
    spans: list[tuple[int, int, str]] = []
    headers: dict[str, TensorHeader] = {}
    for name, entry in entries.items():
        headers[name], begin, end = _entry(path, name, entry, 8 + length, size)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            how = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise CheckpointError(f"{path.name}: tensor {shown(name)} starts at byte {begin} and {how} ({position} expected)")
        position = end
    if position != size - 8 - length:
        raise CheckpointError(
            f"{path.name}: the header describes {position} bytes of tensors and the file has {size - 8 - length}; "
            "it is cut off or damaged: download it again"
        )
    return headers


def _entry(path: Path, name: str, entry: Any, data: int, size: int) -> tuple[TensorHeader, int, int]:
    where = f"{path.name}: tensor {shown(name)}"
    if not name or len(name) > MAX_NAME:
        raise CheckpointError(f"{where}: a name must have 1 to {MAX_NAME} characters")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets (got {shown(entry)})")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise CheckpointError(f"{where}: dtype {shown(dtype)} is unknown (known: {', '.join(ITEM_BITS)})")
    # bool is an int in Python, and JSON's true is no dimension.
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise CheckpointError(f"{where}: shape {shown(shape)} must be at most {MAX_DIMENSIONS} numbers from 0 up")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise CheckpointError(f"{where}: data_offsets {shown(offsets)} must be two numbers from 0 up")
    begin, end = offsets
    if end < begin or 8 * (end - begin) != math.prod(shape) * ITEM_BITS[dtype]:
        raise CheckpointError(f"{where}: data_offsets {shown(offsets)} do not hold {dtype} of shape {shown(shape)}")
    if data + end > size:
        raise CheckpointError(f"{where} ends at byte {data + end} and the file has {size}; it is cut off: download it again")
    return TensorHeader(name, dtype, tuple(shape), path, data + begin, end - begin), begin, end
