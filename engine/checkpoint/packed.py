"""Parameters that a file holds packed: which tensors belong to one, and that these are what the plan says. On headers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.checkpoint.bounded import shown
from engine.checkpoint.plan import Plan, Scheme
from engine.checkpoint.tensors import TensorHeader
from engine.errors import CheckpointError

__all__ = ["Packed", "find_packed", "weight_shapes"]

FLOATS = ("F32", "F16", "BF16")
E8M0 = ("U8", "F8_E8M0")

# End of a tensor's name -> its part. Ends with a dot follow a module's name, those of gpt-oss a parameter's.
_ENDS = {
    ".weight": "weight",
    ".weight_packed": "weight_packed",
    ".weight_scale": "weight_scale",
    ".weight_scale_2": "weight_scale_2",
    ".weight_scale_inv": "weight_scale_inv",
    ".weight_global_scale": "weight_global_scale",
    ".scales": "scales",
    ".biases": "biases",
    "_blocks": "blocks",
    "_scales": "scales",
}
_MAIN = ("weight", "weight_packed", "blocks")  # the part that holds the codes, or the values
# Scales of activations and of the KV cache, which this engine keeps in its compute dtype.
_ACTIVATIONS = (".input_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale")


@dataclass(frozen=True)
class Packed:
    """A parameter and the tensors that hold it. shape: of its values, [..., out, in], whatever way a plain file holds them."""

    name: str
    scheme: Scheme
    shape: tuple[int, ...]
    parts: Mapping[str, TensorHeader]
    inputs_first: bool  # the family has it as [..., in, out]

    @property
    def values(self) -> int:
        return math.prod(self.shape)


def find_packed(
    parameters: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, TensorHeader],
    plan: Plan | None,
    *,
    canonical: Callable[[str], str] = lambda name: name,
    inputs_first: Callable[[str], bool] = lambda name: False,
) -> tuple[dict[str, Packed], dict[str, TensorHeader]]:
    """The packed parameters among `parameters`, and the headers of all other tensors, those of activations left out.

    canonical: the parameter that a tensor of this name is; inputs_first: whether `parameters` gives its shape as [.., in, out].
    Raises CheckpointError where a packed parameter is not what the plan says: a part missing or too many, its dtype or shape.
    """
    if plan is None:
        return {}, dict(headers)
    parts: dict[str, dict[str, TensorHeader]] = {}
    rest: dict[str, TensorHeader] = {}
    for name, header in headers.items():
        if name.endswith(_ACTIVATIONS):
            continue
        found = _part(name, parameters, canonical)
        if found is None:
            rest[name] = header
            continue
        of_parameter = parts.setdefault(found[0], {})
        if found[1] in of_parameter:
            other = of_parameter[found[1]].name
            raise CheckpointError(f"tensors {shown(other)} and {shown(name)} are two spellings of one")
        of_parameter[found[1]] = header
    packed: dict[str, Packed] = {}
    for name, found_parts in parts.items():
        main = next((found_parts[key] for key in _MAIN if key in found_parts), None)
        if main is None or main.dtype in FLOATS:  # plain; a scale beside it is left for the accounting to complain of
            rest |= {header.name: header for header in found_parts.values()}
            continue
        scheme = _scheme(plan, name, main)
        shape = parameters[name]
        is_swapped = scheme.layout == "gpt-oss" or inputs_first(name)
        if is_swapped:
            shape = (*shape[:-2], shape[-1], shape[-2])
        packed[name] = Packed(name, scheme, shape, _checked(name, scheme, shape, main, found_parts), is_swapped)
    return packed, rest


def weight_shapes(
    headers: Mapping[str, TensorHeader], plan: Plan | None, canonical: Callable[[str], str]
) -> dict[str, tuple[int, ...]]:
    """Parameter-like names -> shapes of the tensors, as far as names alone say: for what only the files tell of a model.

    Of a packed parameter it is the shape of the codes; its other parts and the scales of activations are left out.
    """
    shapes = {}
    for name, header in headers.items():
        main = name
        if plan is not None:
            if name.endswith(_ACTIVATIONS):
                continue
            end, part = next(((end, part) for end, part in _ENDS.items() if name.endswith(end)), ("", "weight"))
            if part not in _MAIN:
                continue
            main = name if part == "weight" else name[: -len(end)] + (".weight" if part == "weight_packed" else "")
        shapes[canonical(main)] = header.shape
    return shapes


def _part(name: str, parameters: Mapping[str, tuple[int, ...]], canonical: Callable[[str], str]) -> tuple[str, str] | None:
    """The parameter that a tensor belongs to, and as what part; None where it is none of a matrix."""
    found = canonical(name)
    if found in parameters:
        return (found, "weight") if len(parameters[found]) > 1 else None
    for end, part in _ENDS.items():
        if name.endswith(end):
            base = name[: -len(end)]
            for owner in (canonical(f"{base}.weight"), canonical(base)):
                if owner in parameters and len(parameters[owner]) > 1:
                    return owner, part
    return None


def _module(name: str) -> str:
    for end in _ENDS:
        if name.endswith(end):
            return name[: -len(end)]
    return name


def _scheme(plan: Plan, name: str, main: TensorHeader) -> Scheme:
    # Lists of modules use the file's names; a converter may have left those of the model in them.
    scheme = plan.scheme(_module(main.name)) or plan.scheme(_module(name))
    if scheme is None:
        raise CheckpointError(
            f"tensor {shown(main.name)} in {main.file.name} has dtype {main.dtype}, and {plan.source} says that its module is "
            "not quantised; do config and weights belong together?"
        )
    return scheme


def _checked(
    name: str, scheme: Scheme, shape: tuple[int, ...], main: TensorHeader, parts: Mapping[str, TensorHeader]
) -> dict[str, TensorHeader]:
    """The parts under the names of _needed. Raises CheckpointError."""
    if scheme.group_size and shape[-1] % scheme.group_size:
        raise CheckpointError(
            f"tensor {shown(main.name)}: {scheme} has groups of {scheme.group_size}, which do not divide {shape[-1]} inputs"
        )
    needed = _needed(scheme, shape)
    checked: dict[str, TensorHeader] = {}
    left = dict(parts)
    for part, (spellings, dtypes, shapes) in needed.items():
        spelling = next((spelling for spelling in spellings if spelling in left), None)
        if spelling is None:
            raise CheckpointError(
                f"tensor {shown(main.name)} in {main.file.name} is {scheme}, and its {spellings[0]} is missing"
            )
        header = left.pop(spelling)
        where = f"tensor {shown(header.name)} in {header.file.name}"
        if header.dtype not in dtypes:
            raise CheckpointError(f"{where} has dtype {header.dtype}; {scheme} needs {' or '.join(dtypes)}")
        if header.shape not in shapes:
            raise CheckpointError(
                f"{where} has shape {list(header.shape)}; {scheme} needs {list(shapes[0])} for a parameter of {list(shape)}"
            )
        checked[part] = header
    if left:
        extra = next(iter(left.values()))
        raise CheckpointError(f"tensor {shown(extra.name)} in {extra.file.name} is no part of {scheme}; is the config right?")
    return checked


Shapes = tuple[tuple[int, ...], ...]
Need = tuple[tuple[str, ...], tuple[str, ...], Shapes]  # spellings, dtypes, shapes


def _needed(scheme: Scheme, shape: tuple[int, ...]) -> dict[str, Need]:
    """Part -> how it may be spelled, typed and shaped, for a parameter of this shape."""
    *lead, outputs, inputs = shape

    def per_group(width: int) -> Shapes:
        return ((*lead, outputs, width),)

    groups = per_group(inputs // scheme.group_size) if scheme.group_size else ()
    halves = per_group(inputs // 2)
    if scheme.layout == "mlx":
        codes: Need = (("weight",), ("U32",), per_group(inputs * scheme.bits // 32))
        if scheme.mode != "affine":
            return {"codes": codes, "scales": (("scales",), ("U8",), groups)}
        return {"codes": codes, "scales": (("scales",), FLOATS, groups), "biases": (("biases",), FLOATS, groups)}
    if scheme.layout == "gpt-oss":
        blocks = (*lead, outputs, inputs // 32)
        return {"codes": (("blocks",), ("U8",), ((*blocks, 16),)), "scales": (("scales",), ("U8",), (blocks,))}
    if scheme.mode == "nvfp4" and scheme.layout == "modelopt":
        return {
            "codes": (("weight",), ("U8",), halves),
            "scales": (("weight_scale",), ("F8_E4M3",), groups),
            "global_scale": (("weight_scale_2",), ("F32",), _scalars(shape)),
        }
    if scheme.mode == "nvfp4":
        return {
            "codes": (("weight_packed",), ("U8",), halves),
            "scales": (("weight_scale",), ("F8_E4M3",), groups),
            "global_scale": (("weight_global_scale",), ("F32",), _scalars(shape)),
        }
    if scheme.mode == "mxfp4":
        return {"codes": (("weight",), ("U8",), halves), "scales": (("weight_scale",), E8M0, groups)}
    weight: Need = (("weight",), ("F8_E4M3",), (shape,))
    if scheme.mode == "mxfp8":
        return {"codes": weight, "scales": (("weight_scale", "weight_scale_inv"), E8M0, groups)}
    if scheme.mode == "fp8":
        return {"codes": weight, "scales": (("weight_scale",), FLOATS, _scalars(shape))}
    rows, columns = scheme.block
    blocks = (*lead, -(-outputs // rows), -(-inputs // columns))
    return {"codes": weight, "scales": (("weight_scale_inv",), FLOATS, (blocks,))}


def _scalars(shape: tuple[int, ...]) -> Shapes:
    """One number for the parameter, for each matrix of a stack, or for each row."""
    *lead, outputs, _ = shape
    return ((), (1,), tuple(lead), (*lead, 1), (*lead, 1, 1), (*lead, outputs), (*lead, outputs, 1))
