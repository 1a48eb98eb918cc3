"""The container of a GGUF file: metadata and where each tensor lies. Dequantising is the gguf package's.

Layout (little endian): magic, version 2 or 3, counts of tensors and of metadata; each metadatum a name, a type and a value;
each tensor a name, its sizes (fastest first), a type and an offset; then, aligned, the data. A reader of its own: the package's
takes ten seconds over a vocabulary, and counts and lengths of an untrusted file are to be bounded by its size.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from reference_models.recompute import ReferenceError

__all__ = ["read", "read_metadata"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_DIMENSIONS = 4


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self.data, self.at, self.tensors = data, 0, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise ReferenceError(f"the GGUF file ends at byte {len(self.data)}, within a field of {size} bytes at {self.at}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def text(self) -> str:
        return bytes(self.take(self.number("Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ReferenceError(f"GGUF value type {kind} at byte {self.at} is not known")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            return np.frombuffer(
                self.take(count * struct.calcsize(_SCALARS[inner])), np.dtype(_SCALARS[inner]).newbyteorder("<")
            )
        if inner != _STRING:
            raise ReferenceError(f"GGUF array of type {inner} at byte {self.at} is not known")
        self.take(0 if count <= (len(self.data) - self.at) // 8 else count * 8)  # each string has at least its length
        return [self.text() for _ in range(count)]


def read_metadata(path: Path) -> tuple[dict[str, Any], _Cursor]:
    """The metadata, and the cursor at the first tensor's description."""
    if not path.stat().st_size:
        raise ReferenceError(f"{path.name} is empty")
    cursor = _Cursor(np.memmap(path, np.uint8, "r").data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ReferenceError(f"{path.name} is not a GGUF file: it does not begin with GGUF")
    version, cursor.tensors = cursor.number("I"), cursor.number("Q")
    if version not in (2, 3):
        raise ReferenceError(f"GGUF version {version} is neither 2 nor 3")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.number("Q")):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.number("I"))
    return metadata, cursor


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata, and the tensors dequantised to float32 in torch's order of sizes; raises ReferenceError on a broken file."""
    metadata, cursor = read_metadata(path)
    places = []
    for _ in range(cursor.tensors):
        name, dimensions = cursor.text(), cursor.number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ReferenceError(f"GGUF tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        sizes = [cursor.number("Q") for _ in range(dimensions)]
        places.append((name, sizes[::-1], cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ReferenceError(f"GGUF field 'general.alignment' must be a positive integer (got {alignment!r})")
    start = math.ceil(cursor.at / alignment) * alignment
    arrays: dict[str, np.ndarray] = {}
    for name, shape, kind, offset in places:
        if name in arrays:
            raise ReferenceError(f"GGUF tensor {name!r} is there twice")
        arrays[name] = _tensor(cursor.data, name, shape, kind, start + offset)
    return metadata, arrays


def _tensor(data: memoryview, name: str, shape: list[int], kind: int, start: int) -> np.ndarray:
    try:
        quantisation = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[quantisation]
    except (ValueError, KeyError):
        raise ReferenceError(f"GGUF tensor {name!r} has the unknown type {kind}") from None
    if shape[-1] % block:
        raise ReferenceError(f"GGUF tensor {name!r}: rows of {shape[-1]} are not whole {quantisation.name} blocks of {block}")
    count = math.prod(shape) // block * size
    if start + count > len(data):
        raise ReferenceError(f"GGUF tensor {name!r} ends at byte {start + count}, the file at {len(data)}: it was cut")
    raw = np.frombuffer(data[start : start + count], np.uint8)[None]  # as one row: the package works on 16 rows at a time
    try:
        return gguf.dequantize(raw, quantisation).reshape(shape).astype(np.float32, copy=False)
    except NotImplementedError:
        raise ReferenceError(f"GGUF tensor {name!r}: the gguf package does not dequantise {quantisation.name}") from None
