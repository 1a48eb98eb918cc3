"""engine/layers/mapped.py: products with experts give the same on every path, for every format, shape and choice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.pack import quantised
from engine.checkpoint.policy import FORMATS
from engine.counting import counting
from engine.layers.mapped import GATHER_VALUES, PATHS, BlockMap, moe_gather_qmm_mapped, values_of
from engine.layers.moe import GatedExperts
from engine.layers.quantised import QuantisedTensor, Weight, dense
from engine.layers.weights import Weights

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
# Of the largest output: float32 sums of 64, and one rounding of the output, or of the weights too, in the narrow ones.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}


def experts(form: str | None, shape: tuple[int, int, int], dtype: str = "float32", scale: Any = None) -> Weight:
    values = mx.array(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    if form is None:
        return values.astype(DTYPES[dtype])
    tensor = quantised(values, FORMATS[form])
    parts = {name: getattr(tensor, name) for name in tensor.__dataclass_fields__} | {"global_scale": scale}
    return QuantisedTensor(**parts)


def choices(rows: int, k: int, of: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, of)).argsort(axis=1)[:, :k].astype(np.int32)


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def expected(x: np.ndarray, weight: Weight, ids: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The weighted sum, row by row in float64."""
    values = wide(dense(weight))
    out = np.zeros((ids.shape[0], values.shape[1]))
    for row, (chosen, share) in enumerate(zip(ids, shares, strict=True)):
        for expert, part in zip(chosen, share, strict=True):
            if expert < len(values):
                out[row] += part * (values[expert] @ x[row])
    return out


def check(weight: Weight, ids: np.ndarray, dtype: str = "float32", bias: np.ndarray | None = None) -> None:
    """Every path against float64."""
    random = np.random.default_rng(2)
    x = mx.array(random.normal(size=(ids.shape[0], weight.shape[2])).astype(np.float32)).astype(DTYPES[dtype])
    shares = random.uniform(0.1, 1.0, size=ids.shape).astype(np.float32)
    right = expected(wide(x), weight, ids, shares)
    if bias is not None:
        live = np.where(ids < weight.shape[0], shares, 0.0)
        right += np.einsum("tk,tko->to", live, bias[np.minimum(ids, weight.shape[0] - 1)])
    for path in PATHS:
        blocks = BlockMap(mx.array(ids), weight.shape[0], 1, path)
        held = None if bias is None else mx.array(bias.astype(np.float32)).astype(x.dtype)
        out = moe_gather_qmm_mapped(blocks.gather(x), weight, blocks, held)
        assert out.dtype == x.dtype, path
        got = blocks.combine(out, mx.array(shares))
        assert got.shape == right.shape and got.dtype == mx.float32
        limit = TOLERANCE[dtype] * max(np.abs(right).max(), 1e-6)
        np.testing.assert_allclose(wide(got), right, rtol=0, atol=limit, err_msg=path)


@pytest.mark.parametrize("rows", [1, 2, 7, 63, 64, 80, 96, 300])
@pytest.mark.parametrize("form", [None, *FORMATS])
def test_paths_are_equal_in_every_format(form: str | None, rows: int):
    check(experts(form, (5, 24, 64)), choices(rows, 2, 5))


@pytest.mark.parametrize("form", [None, "nvfp4", "affine4"])
def test_paths_are_equal_on_5000_rows(form: str | None):
    check(experts(form, (4, 8, 64)), choices(5000, 2, 4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", [None, "nvfp4", "mxfp8", "mxfp4", "affine4"])
def test_paths_are_equal_in_narrow_dtypes(form: str | None, dtype: str):
    for rows in (1, 5, 70):
        check(experts(form, (4, 24, 64), dtype), choices(rows, 2, 4), dtype)


@pytest.mark.parametrize("form", [None, "nvfp4"])
def test_paths_are_equal_with_empty_experts_one_expert_and_repeated_choices(form: str | None):
    check(experts(form, (6, 8, 64)), np.full((9, 1), 4, np.int32))  # five of six are empty
    check(experts(form, (1, 8, 64)), np.zeros((9, 1), np.int32))  # there is one
    check(experts(form, (3, 8, 64)), np.array([[2, 2], [0, 0], [1, 2]], np.int32))  # ties that chose one twice
    check(experts(form, (3, 8, 64)), choices(7, 3, 3))  # every token chooses all


@pytest.mark.parametrize("form", [None, "nvfp4"])
def test_choices_of_experts_without_weights_take_no_part(form: str | None):
    check(experts(form, (3, 8, 64)), choices(40, 3, 6))
    check(experts(form, (3, 8, 64)), np.full((5, 2), 3, np.int32))  # no choice has weights
    check(experts(form, (3, 8, 64)), choices(40, 3, 6), bias=np.random.default_rng(3).normal(size=(3, 8)))


def test_an_infinite_row_spoils_no_other():
    weight, ids = experts(None, (2, 4, 8)), np.array([[0, 2], [2, 1], [2, 3]], np.int32)
    x = np.ones((3, 8), np.float32)
    x[0] = np.inf
    for path in PATHS:
        blocks = BlockMap(mx.array(ids), 2, 1, path)
        got = np.array(blocks.combine(moe_gather_qmm_mapped(blocks.gather(mx.array(x)), weight, blocks), mx.ones((3, 2))))
        assert np.isfinite(got[1:]).all() and (got[2] == 0).all(), path


@pytest.mark.parametrize("form", [None, "nvfp4", "affine4"])
def test_biases_follow_their_expert(form: str | None):
    for rows in (1, 6, 90):
        check(experts(form, (5, 24, 64)), choices(rows, 2, 5), bias=np.random.default_rng(4).normal(size=(5, 24)))


@pytest.mark.parametrize("form", FORMATS)
def test_supports_gather_qmm(form: str):
    """Every mode has the gathering product, with and without a global scale."""
    for scale in (None, mx.array(np.linspace(0.1, 2, 4).astype(np.float32))):
        weight = experts(form, (4, 24, 64), scale=scale)
        blocks = BlockMap(mx.array(choices(3, 2, 4)), 4, 1, "gather")
        counters: Counter[str] = Counter()
        with counting(counters):
            moe_gather_qmm_mapped(blocks.gather(mx.ones((3, 64))), weight, blocks)
        assert counters == {"moe_gather": 1}
        check(weight, choices(3, 2, 4))


SCALES = {
    "per expert": np.array([0.1, 1.0, 3.0, 0.5], np.float32),
    "per row": np.random.default_rng(5).uniform(0.1, 2, size=(4, 24)).astype(np.float32),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_apply_expert_weight_global_scale(scale: np.ndarray):
    for rows in (1, 6, 90):
        check(experts("nvfp4", (4, 24, 64), scale=mx.array(scale)), choices(rows, 2, 4))


def test_an_unscaled_expert_product_beyond_float16_does_not_overflow():
    scale = mx.full((3,), 1e-6)
    tensor = experts("nvfp4", (3, 8, 64), scale=scale)
    parts = {name: getattr(tensor, name) for name in tensor.__dataclass_fields__}
    check(QuantisedTensor(**(parts | {"scales": mx.full(tensor.scales.shape, 0x7E, mx.uint8)})), choices(20, 2, 3), "float16")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_choices_of_any_shape_give_the_same_on_every_path(data: st.DataObject):
    count = data.draw(st.integers(1, 9), "experts")
    zero = data.draw(st.integers(0, 3), "experts without weights")
    k = data.draw(st.integers(1, count + zero), "k")
    rows = data.draw(st.integers(1, 40), "rows")
    form = data.draw(st.sampled_from([None, "nvfp4", "mxfp8", "affine3"]), "format")
    ids = data.draw(st.lists(st.lists(st.integers(0, count + zero - 1), min_size=k, max_size=k), min_size=rows, max_size=rows))
    check(experts(form, (count, 5, 64)), np.array(ids, np.int32))


def test_rows_of_a_map_are_choices_by_expert_in_the_order_of_tokens():
    blocks = BlockMap(mx.array([[2, 0], [0, 3], [1, 2]]), 3, 1, "grouped")
    assert blocks.blocks == [(0, 0, 2), (1, 2, 3), (2, 3, 5)]
    assert np.array(blocks.order).tolist() == [1, 2, 4, 0, 5]
    x = mx.array([[1.0], [2.0], [3.0]])
    assert np.array(blocks.gather(x)).ravel().tolist() == [1, 2, 3, 1, 3]


def test_one_token_is_gathered_and_a_prompt_is_grouped_on_a_cpu():
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("a CPU's paths")
    assert BlockMap(mx.zeros((1, 8), mx.int32), 16, 1 << 24).path == "gather"
    assert BlockMap(mx.zeros((2, 2), mx.int32), 16, GATHER_VALUES // 4).path == "gather"
    assert BlockMap(mx.zeros((2, 2), mx.int32), 16, GATHER_VALUES // 4 + 1).path == "grouped"
    assert BlockMap(mx.zeros((512, 4), mx.int32), 16, 512 * 512).path == "grouped"


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match="path must be one of"):
        BlockMap(mx.zeros((1, 1), mx.int32), 1, 1, "fastest")


@pytest.mark.parametrize(
    ("path", "form", "dtype", "counted"),
    [
        ("gather", None, "float32", {"moe_gather": 1}),
        ("sorted", "nvfp4", "float32", {"moe_sorted": 1}),
        ("gather", None, "bfloat16", {"moe_generic": 1}),
        ("grouped", None, "float32", {"moe_grouped": 1}),
        ("grouped", "nvfp4", "float32", {"moe_grouped": 1, "unpacked_matmuls": 2}),
    ],
)
def test_the_path_taken_is_a_counter(path: str, form: str | None, dtype: str, counted: dict[str, int]):
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("a CPU's paths")
    blocks = BlockMap(mx.array([[0], [1]] * 20), 2, 1, path)
    counters: Counter[str] = Counter()
    with counting(counters):
        moe_gather_qmm_mapped(blocks.gather(mx.ones((40, 64), DTYPES[dtype])), experts(form, (2, 8, 64), dtype), blocks)
    assert counters == counted


@pytest.mark.parametrize("form", [None, "nvfp4", "mxfp8"])
def test_gated_experts_are_the_same_from_stacked_and_from_single_matrices(form: str | None):
    stacked = {
        "gate_proj.weight": experts(form, (4, 32, 64)),
        "up_proj.weight": experts(form, (4, 32, 64)),
        "down_proj.weight": experts(form, (4, 64, 32)),
    }
    single = {f"{e}.{name}": weight[e] for name, weight in stacked.items() for e in range(4)}
    x = mx.array(np.random.default_rng(6).normal(size=(50, 64)).astype(np.float32))
    ids, shares = mx.array(choices(50, 2, 4)), mx.ones((50, 2))
    layers = [GatedExperts(Weights(weights), 4) for weights in (stacked, single)]
    outs = [np.array(layer(x, ids, shares)) for layer in layers]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert values_of(stacked["gate_proj.weight"]) == 32 * 64
    w = {name: wide(dense(weight)) for name, weight in stacked.items()}
    gate = np.einsum("eoi,ti->teo", w["gate_proj.weight"], wide(x))
    up = np.einsum("eoi,ti->teo", w["up_proj.weight"], wide(x))
    every = np.einsum("eoi,tei->teo", w["down_proj.weight"], gate / (1 + np.exp(-gate)) * up)
    right = np.take_along_axis(every, np.array(ids)[..., None], 1).sum(1)
    np.testing.assert_allclose(outs[0], right, rtol=0, atol=5e-6 * np.abs(right).max())
