"""A safetensors file of dtypes that numpy lacks, tensor by tensor: the header is known before the first is computed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from engine.checkpoint.safetensors import ITEM_BITS

__all__ = ["Writer"]

_ALIGNMENT = 8


class Writer:
    """Writes `path` through a file beside it that takes its name when all tensors are there.

    tensors: name -> dtype as safetensors spells it, shape. In the file the widest items come first, so that each tensor is
    aligned; they may be written in any order.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.path = path
        self.places: dict[str, tuple[int, int]] = {}  # name -> first byte, bytes
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # what readers of Hugging Face files ask for
        position = 0
        for name in sorted(tensors, key=lambda name: (-ITEM_BITS[tensors[name][0]], name)):
            dtype, shape = tensors[name]
            size = math.prod(shape) * ITEM_BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
            self.places[name] = (position, size)
            position += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._data = 8 + len(text)
        self._partial = path.with_name(f".{path.name}.partial")
        self._file = self._partial.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + position)
        self._left = set(tensors)

    def write(self, name: str, data: bytes) -> None:
        """Raises ValueError for a tensor of another size, written before, or not in the header."""
        position, size = self.places[name]
        if len(data) != size or name not in self._left:
            raise ValueError(f"{name}: {len(data)} bytes for {size}, or written twice")
        self._file.seek(self._data + position)
        self._file.write(data)
        self._left.remove(name)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()
        if kind is not None:
            self._partial.unlink()
            return
        if self._left:
            self._partial.unlink()
            raise ValueError(f"{len(self._left)} tensors were not written, first {min(self._left)}")
        self._partial.replace(self.path)
