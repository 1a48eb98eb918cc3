"""The header of a GGUF file, read within bounds before MLX sees the file.

Format: magic, version, tensor count, key count; keys with typed values; tensor infos (name, dimensions innermost first, type,
offset); padding to `general.alignment`; data. All little-endian (github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from engine.checkpoint.bounded import one_line, shown
from engine.checkpoint.tensors import TensorHeader
from engine.errors import CheckpointError, Refused

__all__ = ["GgufHeader", "read_header"]

MAX_KEYS = 4096
MAX_TENSORS = 65536
MAX_KEY_BYTES = 65535  # the format's own limit
MAX_TENSOR_NAME_BYTES = 64  # the format's own limit
MAX_STRING_BYTES = 1 << 20
MAX_ARRAY = 1 << 21  # the largest vocabularies have 2^18 tokens
MAX_ELEMENTS = 1 << 23  # of all arrays together
MAX_DIMENSION = 1 << 31

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

# ggml type number -> (name, elements of a block, bytes of a block) of what the engine reads
SUPPORTED = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}
# ... and the names of what it does not
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class GgufHeader:
    """`metadata`: key -> number, bool, text or list of these; `tensors` by their GGUF names, shapes outermost first."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorHeader]


class _Reader:
    """Reads a file front to back and never asks for more bytes than the file has left."""

    def __init__(self, file: BinaryIO, size: int, name: str):
        self.file, self.size, self.name, self.position, self.elements = file, size, name, 0, 0

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        data = self.file.read(count)
        if len(data) != count:
            raise CheckpointError(f"{self.name}: the file ends within {what}")
        self.position += count
        return data

    def need(self, count: int, what: str) -> None:
        left = self.size - self.position
        if count > left:
            raise CheckpointError(
                f"{self.name}: {what} needs {count} bytes and {left} are left; the file is cut off or damaged"
            )

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = int.from_bytes(self.take(8, what), "little")
        if length > limit:
            raise CheckpointError(f"{self.name}: {what} is text of {length} bytes, the limit is {limit}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.name}: {what} is not UTF-8 ({one_line(error.reason)} at byte {error.start})"
            ) from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            value = self.number(_SCALARS[kind], what)
            if isinstance(value, float) and not math.isfinite(value):
                raise CheckpointError(f"{self.name}: {what} is {value}, which is not a finite number")
            return value
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise CheckpointError(f"{self.name}: {what} has value type {kind}, which GGUF does not define")
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind not in _SCALARS and kind != _STRING:
            raise CheckpointError(f"{self.name}: {what} is an array of type {kind}; only numbers and text are supported")
        self.elements += count
        if count > MAX_ARRAY or self.elements > MAX_ELEMENTS:
            raise CheckpointError(
                f"{self.name}: {what} is an array of {count}, the limit is {MAX_ARRAY} ({MAX_ELEMENTS} in all)"
            )
        if kind == _STRING:
            self.need(8 * count, what)  # each has at least its length field
            return [self.string(what) for _ in range(count)]
        form = _SCALARS[kind]
        data = self.take(count * struct.calcsize(form), what)
        return list(struct.unpack(f"<{count}{form[1]}", data))


def read_header(path: Path) -> GgufHeader:
    """Keys and tensors of a GGUF file. Raises CheckpointError (damaged) or Refused (tensor types the engine does not read)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _read(_Reader(file, size, path.name), path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or one_line(error)}") from None


def _read(reader: _Reader, path: Path) -> GgufHeader:
    if reader.take(4, "the magic") != b"GGUF":
        raise CheckpointError(f"{path.name} does not start with 'GGUF'; it is damaged or another format")
    version = reader.number("<I", "the version")
    if version not in (2, 3):
        raise CheckpointError(f"{path.name}: GGUF version {version} is not supported (2 and 3 little-endian are)")
    tensor_count, key_count = reader.number("<Q", "the tensor count"), reader.number("<Q", "the key count")
    if not 1 <= tensor_count <= MAX_TENSORS or key_count > MAX_KEYS:
        raise CheckpointError(
            f"{path.name}: {tensor_count} tensors and {key_count} keys are out of bounds "
            f"(1 to {MAX_TENSORS}, at most {MAX_KEYS})"
        )
    reader.need(13 * key_count + 32 * tensor_count, f"a header of {key_count} keys and {tensor_count} tensors")
    metadata: dict[str, Any] = {}
    for index in range(key_count):
        key = reader.string(f"key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise CheckpointError(f"{path.name}: key {shown(key)} appears twice")
        metadata[key] = reader.value(reader.number("<I", f"key {shown(key)}"), f"key {shown(key)}")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 65536 or alignment & (alignment - 1):
        raise CheckpointError(f"{path.name}: general.alignment {shown(alignment)} must be a power of two from 8 to 65536")
    infos = [_tensor_info(reader, path, index) for index in range(tensor_count)]
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorHeader] = {}
    for info in infos:
        if info.name in tensors:
            raise CheckpointError(f"{path.name}: tensor {shown(info.name)} appears twice")
        tensors[info.name] = replace(info, offset=start + info.offset)
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        where = f"{path.name}: tensor {shown(tensor.name)}"
        if tensor.offset % alignment or tensor.offset < end:
            raise CheckpointError(
                f"{where} at byte {tensor.offset} overlaps the one before it or is not at a multiple of {alignment}"
            )
        end = tensor.offset + tensor.nbytes
        if end > reader.size:
            raise CheckpointError(
                f"{where} ends at byte {end} and the file has {reader.size}; it is cut off: download it again"
            )
    return GgufHeader(metadata, tensors)


def _tensor_info(reader: _Reader, path: Path, index: int) -> TensorHeader:
    """Its `offset` still counts from the start of the data."""
    name = reader.string(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
    where = f"tensor {shown(name)}"
    count = reader.number("<I", where)
    if not 1 <= count <= 4:
        raise CheckpointError(f"{path.name}: {where} has {count} dimensions, GGUF allows 1 to 4")
    shape = tuple(reader.number("<Q", where) for _ in range(count))
    kind, offset = reader.number("<I", where), reader.number("<Q", where)
    if not all(1 <= n < MAX_DIMENSION for n in shape):
        raise CheckpointError(f"{path.name}: {where} has shape {list(shape)}; a dimension must be 1 to {MAX_DIMENSION - 1}")
    if kind not in SUPPORTED:
        if kind not in OTHER_TYPES:
            raise CheckpointError(f"{path.name}: {where} has type number {kind}, which GGUF does not define")
        raise Refused(
            f"{path.name}: {where} has type {OTHER_TYPES[kind]}, which is not supported; requantise it to one of "
            f"{', '.join(entry[0] for entry in SUPPORTED.values())} (`llama-quantize`), or use the safetensors checkpoint"
        )
    kind_name, block, block_bytes = SUPPORTED[kind]
    if shape[0] % block:
        raise CheckpointError(f"{path.name}: {where} has rows of {shape[0]}, {kind_name} needs a multiple of {block}")
    return TensorHeader(name, kind_name, shape[::-1], path, offset, math.prod(shape) // block * block_bytes)
