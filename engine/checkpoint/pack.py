"""A matrix's values into a packed format, as parts with the names and dtypes of a file layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.checkpoint.policy import Format
from engine.errors import CheckpointError, Refused
from engine.layers.quantised import QuantisedTensor

__all__ = ["LAYOUTS", "Part", "pack", "parts", "quantised", "require_mode"]

LAYOUTS = {  # layout -> modes that it has
    "mlx": ("affine", "mxfp4", "mxfp8", "nvfp4"),
    "modelopt": ("mxfp8", "nvfp4"),
    "gpt-oss": ("mxfp4",),
}
E2M1_MAX, E4M3_MAX = 6.0, 448.0


@dataclass(frozen=True)
class Part:
    """One tensor of a packed matrix: what its name ends with after the module's, its dtype and shape."""

    end: str
    dtype: str
    shape: tuple[int, ...]


def require_mode(layout: str, form: Format) -> None:
    """Raise Refused where the layout, one of LAYOUTS, has no such mode."""
    if form.mode not in LAYOUTS[layout]:
        raise Refused(f"layout {layout} has no mode {form.mode} (it has {', '.join(LAYOUTS[layout])}; layout mlx has all)")


def parts(layout: str, form: Format, shape: tuple[int, ...], scale_dtype: str) -> tuple[Part, ...]:
    """The tensors of a matrix [..., out, in]; scale_dtype: of affine scales. Raises Refused for a mode that a layout lacks."""
    require_mode(layout, form)
    rows, inputs = shape[:-1], shape[-1]
    groups = (*rows, inputs // form.group_size)
    if layout == "modelopt":
        if form.mode == "mxfp8":
            return (Part(".weight", "F8_E4M3", shape), Part(".weight_scale", "U8", groups))
        return (
            Part(".weight", "U8", (*rows, inputs // 2)),
            Part(".weight_scale", "F8_E4M3", groups),
            Part(".weight_scale_2", "F32", shape[:-2]),
        )
    if layout == "gpt-oss":
        return (Part("_blocks", "U8", (*groups, form.group_size // 2)), Part("_scales", "U8", groups))
    codes = Part(".weight", "U32", (*rows, inputs * form.bits // 32))
    if form.mode != "affine":
        return (codes, Part(".scales", "U8", groups))
    return (codes, Part(".scales", scale_dtype, groups), Part(".biases", scale_dtype, groups))


def pack(layout: str, form: Format, values: mx.array, name: str) -> Mapping[str, bytes]:
    """End of name -> bytes, for values [..., out, in]. Raises CheckpointError for values that are not finite."""
    if not mx.isfinite(values).all().item():
        raise CheckpointError(f"tensor {name!r:.120} has values that are not finite; a quantised format cannot hold them")
    if layout == "modelopt" and form.mode == "nvfp4":
        wide = values.astype(mx.float32)
        # The largest value is the largest code times the largest scale; a matrix of zeros has any scale.
        whole = mx.abs(wide).max(axis=(-2, -1)) / (E2M1_MAX * E4M3_MAX)
        whole = mx.where(whole > 0, whole, 1.0)
        codes, scales = _quantised(wide / whole[..., None, None], form)
        return {".weight": _bytes(codes), ".weight_scale": _bytes(scales), ".weight_scale_2": _bytes(whole)}
    packed = [_bytes(part) for part in _quantised(values, form)]
    return {part.end: data for part, data in zip(parts(layout, form, values.shape, "F32"), packed, strict=True)}


def quantised(values: mx.array, form: Format) -> QuantisedTensor:
    """Values [..., out, in] as they multiply: what the engine makes of a checkpoint in layout mlx."""
    codes, scales, *biases = _quantised(values, form)
    return QuantisedTensor(
        codes, scales, biases[0] if biases else None, form.group_size, form.bits, form.mode, dtype=values.dtype
    )


def _quantised(values: mx.array, form: Format) -> list[mx.array]:
    *rows, inputs = values.shape
    flat = values.reshape(-1, inputs)
    odd = flat.shape[0] % 2  # MLX's quantiser takes whole runs of 32 values: two rows of 16
    if odd:
        flat = mx.concatenate([flat, mx.zeros((1, inputs), flat.dtype)])
    packed = mx.quantize(flat, group_size=form.group_size, bits=form.bits, mode=form.mode)
    return [part[: part.shape[0] - odd].reshape(*rows, -1) for part in packed]


def _bytes(part: mx.array) -> bytes:
    return np.asarray(part.view(mx.uint8) if part.ndim else part).tobytes()
