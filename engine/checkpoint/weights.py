"""A family's parameters from the tensors of a checkpoint: accounted for on headers, then read one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.checkpoint.bounded import shown
from engine.checkpoint.packed import Packed, find_packed, weight_shapes
from engine.checkpoint.plan import Plan
from engine.checkpoint.read import COMPUTE_DTYPES, read_tensor, require_finite
from engine.checkpoint.residency import Kind, unpacked
from engine.checkpoint.tensors import TensorHeader, account
from engine.checkpoint.unpack import unpack
from engine.errors import CheckpointError
from engine.layers.quantised import QuantisedTensor, Weight

__all__ = ["FLOATS", "Accounted", "account_for", "completed", "read_weights"]

FLOATS = frozenset({"F32", "F16", "BF16"})
_PARTS_SHOWN = 16
_FILE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def completed(family: Any, config: Any, headers: Mapping[str, TensorHeader], plan: Plan | None) -> Any:
    """The config with what only the files say, for a family that defines `complete(config, shapes)`; shapes by parameter."""
    if not hasattr(family, "complete"):
        return config
    return family.complete(config, weight_shapes(headers, plan, getattr(family, "canonical", lambda name: name)))


@dataclass(frozen=True)
class Accounted:
    """What the files hold of a family's parameters, after the accounting.

    packed, plain: by parameter, copies that a file may hold included; plain also has the tensors that are not used.
    """

    parameters: Mapping[str, tuple[int, ...]]
    duplicates: Mapping[str, str]  # copies that the files hold -> parameter
    packed: Mapping[str, Packed]
    plain: Mapping[str, TensorHeader]

    def stored(self, name: str) -> list[TensorHeader]:
        """The tensors that hold a parameter."""
        return list(self.packed[name].parts.values()) if name in self.packed else [self.plain[name]]


def account_for(
    family: Any,
    config: Any,
    headers: Mapping[str, TensorHeader],
    *,
    plan: Plan | None = None,
    dtypes: frozenset[str] = FLOATS,
) -> Accounted:
    """Every parameter is in the files once, as the config and the plan say, and the files hold nothing else.

    plan: the formats of packed tensors; dtypes: of plain ones. A family may define `ignored(config, name)` and
    `duplicates(config)` (see account), `canonical(name)`, the parameter that a tensor of another spelling is, and
    `inputs_first(name)`, whether a parameter is a matrix [.., in, out] (a quantised one is [.., out, in]).
    Raises CheckpointError.
    """
    parameters = family.parameters(config)
    duplicates = family.duplicates(config) if hasattr(family, "duplicates") else {}
    canonical = getattr(family, "canonical", lambda name: name)
    inputs_first = getattr(family, "inputs_first", lambda name: False)
    copies = {copy: parameters[name] for copy, name in duplicates.items()}
    packed, rest = find_packed(parameters | copies, headers, plan, canonical=canonical, inputs_first=inputs_first)
    if plan is not None and not packed:
        raise CheckpointError(f"{plan.source} describes quantised weights, and no tensor is one; do they belong together?")
    plain = _renamed(rest, canonical)

    def ignored(name: str) -> bool:
        return hasattr(family, "ignored") and family.ignored(config, name)

    account(
        {name: shape for name, shape in parameters.items() if name not in packed},
        plain,
        ignored=ignored,
        duplicates={copy: name for copy, name in duplicates.items() if name not in packed},
        dtypes=dtypes,
    )
    found = {copy: name for copy, name in duplicates.items() if copy in packed or copy in plain}
    return Accounted(parameters, found, packed, plain)


def read_weights(
    family: Any,
    config: Any,
    headers: Mapping[str, TensorHeader],
    *,
    plan: Plan | None = None,
    dtypes: frozenset[str] = FLOATS,
    dtype: str | None = None,
    quantised: str | None = None,
    arrange: Callable[[str], Callable[[mx.array], mx.array] | None] = lambda name: None,
) -> tuple[dict[str, Weight], str, list[str]]:
    """Returns the parameters, evaluated, the compute dtype that was chosen, and notes of what was chosen and why.

    See account_for; quantised: see engine.checkpoint.residency; arrange: for a parameter, what reorders its rows. A family may
    define `keep_float32(name)`, whether a parameter is float32 in every compute dtype.
    """
    accounted = account_for(family, config, headers, plan=plan, dtypes=dtypes)
    packed, plain, parameters = accounted.packed, accounted.plain, accounted.parameters
    keep_float32 = getattr(family, "keep_float32", lambda name: False)
    used, notes = _choose_dtype(dtype, [header for name in parameters for header in accounted.stored(name)])
    formats, why = unpacked(packed, used, quantised)
    notes += why

    def read(name: str) -> Weight:
        is_wide = keep_float32(accounted.duplicates.get(name, name))
        kept = "float32" if is_wide else used
        if name in packed:
            return _unpacked(packed[name], kept, None if is_wide else formats)
        return read_tensor(plain[name], kept, arrange(name))

    weights = {name: read(name) for name in parameters}
    for copy, name in accounted.duplicates.items():
        if not _equal(read(copy), weights[name]):
            raise CheckpointError(
                f"tensor {shown(copy)} differs from {shown(name)}, of which the config says that it is a copy; "
                "is tie_word_embeddings right?"
            )
    left = [name for name in plain if name not in parameters]
    if left:
        parts = Counter(name.partition(".")[0] for name in left)
        notes.append(
            f"{len(left)} tensors of the files are not used (copies, rotary tables, draft layers, towers of other media), "
            f"first {shown(left[0])}; by the first part of their names: "
            + ", ".join(f"{shown(part)} {count}" for part, count in sorted(parts.items())[:_PARTS_SHOWN])
        )
    return weights, used, notes


def _unpacked(parameter: Packed, dtype: str, formats: set[Kind] | None) -> Weight:
    """The parameter, with its values in place of codes where its format is among `formats`; None is all formats."""
    weight = unpack(parameter, dtype)
    if isinstance(weight, QuantisedTensor):
        if formats is not None and (weight.mode, weight.group_size, weight.bits) not in formats:
            if weight.bound() > mx.finfo(COMPUTE_DTYPES[dtype]).max:  # seldom: only then are the values worth looking at
                require_finite(weight.unpack(), parameter.name, dtype)
            return weight
        weight = weight.unpack()
        mx.eval(weight)
        require_finite(weight, parameter.name, dtype)
    return weight.swapaxes(-1, -2) if parameter.inputs_first else weight


def _equal(one: Weight, other: Weight) -> bool:
    if isinstance(one, QuantisedTensor) != isinstance(other, QuantisedTensor):
        return False
    ones = one.arrays() if isinstance(one, QuantisedTensor) else [one]
    others = other.arrays() if isinstance(other, QuantisedTensor) else [other]
    return len(ones) == len(others) and all(bool(mx.array_equal(a, b).item()) for a, b in zip(ones, others, strict=True))


def _renamed(headers: Mapping[str, TensorHeader], canonical: Callable[[str], str]) -> dict[str, TensorHeader]:
    renamed: dict[str, TensorHeader] = {}
    for spelled, header in headers.items():
        name = canonical(spelled)
        if name in renamed:
            raise CheckpointError(f"tensors {shown(renamed[name].name)} and {shown(header.name)} are two spellings of one")
        renamed[name] = header
    return renamed


def _choose_dtype(dtype: str | None, headers: list[TensorHeader]) -> tuple[str, list[str]]:
    sizes: dict[str, int] = {}
    for header in headers:
        sizes[header.dtype] = sizes.get(header.dtype, 0) + header.nbytes
    stored = max(sizes, key=lambda name: sizes[name])
    if dtype is not None:
        return dtype, [f"weights held in {dtype} as asked (stored: {stored})"]
    if mx.default_device().type == mx.DeviceType.cpu:
        return "float32", [f"weights held in float32: MLX's CPU kernels for narrower types are slow (stored: {stored})"]
    used = _FILE_DTYPES.get(stored, "bfloat16")
    why = "as stored" if stored in _FILE_DTYPES else "dequantised"
    return used, [f"weights held in {used}: {why} (stored: {stored})"]
