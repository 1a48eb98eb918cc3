"""Whether quantised weights stay packed in memory. On a GPU they do: products read less. On a CPU it is measured at load.

MLX's CPU products unpack one code at a time, on one core; a BLAS reads eight times the bytes in float32 and is often five times
as fast. Which it is depends on the machine. So a product of the model's own shape and format is timed, both ways, for one row
(decoding) and for ROWS (a prompt), in at most a tenth of a second a format; packed weights stay where they are faster at both.
Matrices of fewer than SMALL values stay packed without timing: a call costs more than what it does there, and the time is
noise. Weights that would not fit into the memory that is free stay packed. DECODEGATE_QUANTISED forces one or the other: auto
(default), packed, unpacked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import mlx.core as mx
import psutil

from engine.checkpoint.packed import Packed
from engine.checkpoint.read import COMPUTE_DTYPES
from engine.errors import Refused
from engine.layers.quantised import MODES, QuantisedTensor, Weight, matmul

__all__ = ["CHOICES", "ENVIRONMENT", "Kind", "unpacked"]

ENVIRONMENT = "DECODEGATE_QUANTISED"
CHOICES = ("auto", "packed", "unpacked")
SMALL = 1 << 16
LARGEST = 1 << 20  # values of a matrix that is timed; of a larger one its first rows
ROWS = 32
REPEATS = 5
MEMORY_SHARE = 0.7  # of the free memory that unpacked weights may take; states and activations need the rest


Kind = tuple[str, int, int]  # mode, group size, bits


def unpacked(packed: Mapping[str, Packed], dtype: str, choice: str | None = None) -> tuple[set[Kind], list[str]]:
    """The formats (mode, group size, bits) whose weights are to be unpacked into `dtype`, and why, a line for each.

    choice: one of CHOICES; None takes it from the environment (ENVIRONMENT), or auto. Raises Refused for another.
    """
    choice = choice or os.environ.get(ENVIRONMENT, "auto").strip() or "auto"
    if choice not in CHOICES:
        raise Refused(f"{ENVIRONMENT} {choice!r:.80} is not supported (supported: {', '.join(CHOICES)})")
    groups: dict[Kind, list[Packed]] = {}
    for parameter in packed.values():
        scheme = parameter.scheme
        if scheme.mode in MODES:
            groups.setdefault((scheme.mode, scheme.group_size, scheme.bits), []).append(parameter)
    if not groups:
        return set(), []
    held = f"{sum(map(len, groups.values()))} quantised weights ({', '.join(_named(kind) for kind in groups)})"
    if choice != "auto":
        return (set(groups) if choice == "unpacked" else set()), [f"{held} held {choice} as asked"]
    if mx.default_device().type != mx.DeviceType.cpu:
        return set(), [f"{held} held packed: their products read less memory on a GPU"]
    needed = COMPUTE_DTYPES[dtype].size * sum(parameter.values for parameter in packed.values())
    free = psutil.virtual_memory().available
    if needed > MEMORY_SHARE * free:
        return set(), [f"{held} held packed: unpacked they take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"]
    chosen, notes = set(), []
    for kind, members in groups.items():
        is_unpacked, why = _choose(kind, members, COMPUTE_DTYPES[dtype])
        if is_unpacked:
            chosen.add(kind)
        how = f"unpacked in {dtype}" if is_unpacked else "packed"
        notes.append(f"{len(members)} weights of {_named(kind)} held {how}: {why}")
    return chosen, notes


def _named(kind: Kind) -> str:
    mode, group_size, bits = kind
    return f"{mode} {bits} bit, groups of {group_size}" if mode == "affine" else mode


def _choose(kind: Kind, members: Sequence[Packed], dtype: mx.Dtype) -> tuple[bool, str]:
    """Whether this format's weights are to be unpacked, and why; by the shape that has most of its values."""
    sizes: dict[tuple[int, ...], int] = {}
    for parameter in members:
        sizes[parameter.shape[-2:]] = sizes.get(parameter.shape[-2:], 0) + parameter.values
    outputs, inputs = max(sizes, key=lambda shape: sizes[shape])
    if outputs * inputs < SMALL:
        return False, f"matrices of {outputs} x {inputs} are too small to time"
    timed = min(outputs, max(1, LARGEST // inputs))
    tensor = _blank(kind, timed, inputs, dtype)
    values = tensor.unpack()
    mx.eval(values)
    found = []
    for rows in (1, ROWS):
        x = mx.ones((rows, inputs), dtype)
        found.append((_seconds(x, tensor), _seconds(x, values)))
    texts = [
        f"{rows} row{'s' * (rows > 1)} of {timed} x {inputs} take {1e3 * fast:.3g} ms unpacked, {1e3 * slow:.3g} ms packed"
        for rows, (slow, fast) in zip((1, ROWS), found, strict=True)
    ]
    return not all(packed < plain for packed, plain in found), ", ".join(texts)


def _blank(kind: Kind, outputs: int, inputs: int, dtype: mx.Dtype) -> QuantisedTensor:
    """A matrix of this format; its codes are all zero, which takes as long as any others."""
    mode, group_size, bits = kind
    scales = mx.ones((outputs, inputs // group_size), mx.bfloat16 if mode == "affine" else mx.uint8)
    codes, biases = mx.zeros((outputs, inputs * bits // 32), mx.uint32), scales if mode == "affine" else None
    tensor = QuantisedTensor(codes, scales, biases, group_size, bits, mode, dtype=dtype)
    mx.eval(tensor.arrays())
    return tensor


def _seconds(x: mx.array, weight: Weight) -> float:
    """The fastest of REPEATS products, after one that is not counted: what disturbs one only ever makes it slower."""
    mx.eval(matmul(x, weight))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        mx.eval(matmul(x, weight))
        times.append(time.perf_counter() - start)
    return min(times)
