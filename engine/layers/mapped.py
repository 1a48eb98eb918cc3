"""Products with experts: each token with the matrices of the experts that were chosen for it.

`moe_gather_qmm_mapped` is the one entry, for plain and quantised stacks [experts, out, in]. A `BlockMap` of the choices is made
once per layer and shared by its products: between `gather` and `combine` there is one row per choice, in the map's order. Three
paths give the same result; each product counts the one it took (`moe_gather`, `moe_sorted`, `moe_grouped`):

- gather: MLX's gathering product, a row per choice, in the order of the tokens. Lazy, so nothing waits. For few choices.
- sorted: the same on a GPU for many, after the choices were sorted by expert on the device, so that a kernel meets each
  expert's rows together.
- grouped: on a CPU for many. The choices are read on the host, which evaluates what leads to them, and each occupied expert is
  one matrix product for all its tokens: its matrix is read (and a quantised one is unpacked) once instead of once per row.

MLX's CPU `gather_mm` takes float32 only. For narrower types gathering falls back to a copy of the chosen matrices and a batched
product (`moe_generic`), which runs wherever MLX does.
"""

from __future__ import annotations

import math
from functools import cached_property

import mlx.core as mx
import numpy as np

from engine.counting import count
from engine.layers.quantised import QuantisedTensor, Weight, matmul

__all__ = ["PATHS", "BlockMap", "moe_gather_qmm_mapped", "values_of"]

PATHS = ("gather", "sorted", "grouped")
GATHER_VALUES = 1 << 17  # matrix values that may be read by gathering on a CPU: 0.1 ms, what an evaluation amid a graph costs
SORTED_CHOICES = 64  # from here on a GPU gains from sorting


class BlockMap:
    """The choices of T tokens, k experts each, as blocks of one expert.

    ids: int [T, k]. An id from `experts` on is an expert without weights: its choices have no part in any product.
    values: of one expert's matrices; what a path costs depends on it. path: one of PATHS; None chooses.
    """

    def __init__(self, ids: mx.array, experts: int, values: int, path: str | None = None) -> None:
        self.ids = ids
        self.experts = experts
        self.path = _choose(ids, values) if path is None else path
        if self.path not in PATHS:
            raise ValueError(f"path must be one of {', '.join(PATHS)} (got {path!r})")

    @cached_property
    def blocks(self) -> list[tuple[int, int, int]]:
        """Path grouped: (expert, start, stop) of each occupied expert, rows in the map's order."""
        counts = np.bincount(self._host_chosen[self._host_order], minlength=self.experts)
        stops = np.cumsum(counts)
        return [(e, int(stops[e] - counts[e]), int(stops[e])) for e in np.flatnonzero(counts).tolist()]

    @cached_property
    def _host_chosen(self) -> np.ndarray:
        return np.asarray(self.ids).reshape(-1)

    @cached_property
    def _host_order(self) -> np.ndarray:
        """Choices by expert, in each the tokens in order; those without weights are left out."""
        order = np.argsort(self._host_chosen, kind="stable")
        return order[: np.count_nonzero(self._host_chosen < self.experts)]

    @cached_property
    def order(self) -> mx.array:
        """The choice that each row of the map is: int32 [rows]."""
        if self.path == "grouped":
            return mx.array(self._host_order.astype(np.int32))
        if self.path == "sorted":
            return mx.argsort(self.ids.reshape(-1)).astype(mx.int32)
        return mx.arange(self.ids.size, dtype=mx.int32)

    @cached_property
    def row_experts(self) -> mx.array:
        """The expert of each row: [rows]; a choice without weights is a row of the last expert in the paths that are lazy."""
        chosen = self.ids.reshape(-1)
        return mx.minimum(chosen if self.path == "gather" else chosen[self.order], self.experts - 1)

    def gather(self, x: mx.array) -> mx.array:
        """x [T, in] -> [rows, in], each choice's token."""
        k = self.ids.shape[1]
        return mx.repeat(x, k, axis=0) if self.path == "gather" else x[self.order // k]

    def scatter(self, rows: mx.array) -> mx.array:
        """rows [rows, out] -> [T, k, out], each choice's row; any row, where an expert has no weights."""
        if self.path == "sorted":
            rows = rows[mx.argsort(self.order)]
        elif self.path == "grouped":
            place = np.zeros(self._host_chosen.size, np.int32)
            place[self._host_order] = np.arange(self._host_order.size, dtype=np.int32)
            rows = rows[mx.array(place)]
        return rows.reshape(*self.ids.shape, -1)

    def combine(self, rows: mx.array, weights: mx.array) -> mx.array:
        """The weighted sum of each token's rows: rows [rows, out], weights float32 [T, k] -> float32 [T, out]."""
        if not rows.shape[0]:
            return mx.zeros((self.ids.shape[0], rows.shape[1]), mx.float32)
        out = self.scatter(rows).astype(mx.float32)
        if self.path != "grouped" or rows.shape[0] < self.ids.size:
            out = mx.where((self.ids < self.experts)[..., None], out, 0.0)  # not a weight of 0: another's row may be infinite
        return (weights[:, None, :] @ out).squeeze(1)


def _choose(ids: mx.array, values: int) -> str:
    if mx.default_device().type != mx.DeviceType.cpu:
        return "sorted" if ids.size >= SORTED_CHOICES else "gather"
    return "gather" if ids.shape[0] == 1 or ids.size * values <= GATHER_VALUES else "grouped"


def moe_gather_qmm_mapped(x: mx.array, weight: Weight, blocks: BlockMap, bias: mx.array | None = None) -> mx.array:
    """x [rows, in] in the map's order (`BlockMap.gather`), each row times the transpose of its expert's matrix.

    weight: [experts, out, in], plain or quantised; bias: [experts, out]. Returns [rows, out] in x's dtype, in the map's order.
    """
    out = _product(x, weight, blocks)
    return out if bias is None else out + bias[blocks.row_experts]


def _product(x: mx.array, weight: Weight, blocks: BlockMap) -> mx.array:
    if blocks.path == "grouped":
        count("moe_grouped")
        return _grouped(x, weight, blocks)
    is_sorted = blocks.path == "sorted"
    if isinstance(weight, QuantisedTensor):
        count(f"moe_{blocks.path}")
        return _gather_quantised(x, weight, blocks.row_experts, is_sorted)
    if x.dtype != mx.float32 and mx.default_device().type == mx.DeviceType.cpu:
        count("moe_generic")
        return (x[:, None] @ weight[blocks.row_experts].swapaxes(-1, -2)).squeeze(1)
    count(f"moe_{blocks.path}")
    out = mx.gather_mm(x[:, None], weight.swapaxes(-1, -2), rhs_indices=blocks.row_experts, sorted_indices=is_sorted)
    return out.squeeze(1)


def _gather_quantised(x: mx.array, weight: QuantisedTensor, experts: mx.array, is_sorted: bool) -> mx.array:
    out = mx.gather_qmm(
        weight.widened(x)[:, None],
        weight.weight,
        weight.scales,
        weight.biases,
        rhs_indices=experts,
        transpose=True,
        group_size=weight.group_size,
        bits=weight.bits,
        mode=weight.mode,
        sorted_indices=is_sorted,
    ).squeeze(1)
    if weight.global_scale is not None:  # MLX has an argument for it on GPUs only, in another convention
        scale = weight.global_scale[experts]
        out = out.astype(mx.float32) * (scale if scale.ndim == 2 else scale[:, None])
    return out.astype(x.dtype)


def _grouped(x: mx.array, weight: Weight, blocks: BlockMap) -> mx.array:
    parts = []
    for expert, start, stop in blocks.blocks:
        parts.append(matmul(x[start:stop], weight[expert]))
    if not parts:
        return mx.zeros((0, weight.shape[1]), x.dtype)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def values_of(*weights: Weight) -> int:
    """Values of one expert's matrices, for BlockMap."""
    return sum(math.prod(weight.shape[1:]) for weight in weights)
