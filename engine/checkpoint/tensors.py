"""What a checkpoint's headers say about its tensors, and the strict accounting of it against what the model needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.bounded import shown
from engine.errors import CheckpointError

__all__ = ["TensorHeader", "account"]


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file, as its header declares it; the file module has checked that its bytes are there."""

    name: str  # in the file
    dtype: str  # as the file spells it: "BF16", "Q4_0"
    shape: tuple[int, ...]
    file: Path
    offset: int  # of its first byte in the file
    nbytes: int


def account(
    parameters: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, TensorHeader],
    *,
    ignored: Callable[[str], bool],
    duplicates: Mapping[str, str],
    dtypes: frozenset[str],
) -> None:
    """Every parameter is in the files once with its shape and a dtype of `dtypes`, and the files hold nothing else.

    `ignored(name)`: known tensors that are no parameters (rotary tables); `duplicates`: name -> parameter of which the file
    may hold a copy under that name. Runs on headers alone, before any weight is allocated. Raises CheckpointError.
    """
    missing = [name for name in parameters if name not in headers]
    extra = [name for name in headers if name not in parameters and name not in duplicates and not ignored(name)]
    if missing:
        raise CheckpointError(
            f"tensor {_names(missing)} missing from the checkpoint; do config.json and the weights belong together?"
            + (f" (and {_names(extra)} not part of the model)" if extra else "")
        )
    if extra:
        raise CheckpointError(
            f"tensor {_names(extra)} not part of the model that config.json describes, first in "
            f"{headers[extra[0]].file.name}; do config.json and the weights belong together?"
        )
    for name, header in headers.items():
        shape = parameters.get(duplicates.get(name, name))
        if shape is None:
            continue
        if header.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {shown(name)} in {header.file.name} has shape {list(header.shape)}, config.json needs {list(shape)}"
            )
        if header.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {shown(name)} in {header.file.name} has dtype {header.dtype}; a parameter must be one of "
                f"{', '.join(sorted(dtypes))} (config.json describes no quantisation)"
            )


def _names(names: list[str]) -> str:
    more = len(names) - 1
    return f"{shown(names[0], 120)} is" if not more else f"{shown(names[0], 120)} and {more} more are"
