"""engine/layers/{quantised,unpacking,linear,embedding}.py: what codes and scales stand for, and products with them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.checkpoint.pack import quantised
from engine.checkpoint.policy import Format
from engine.errors import Refused
from engine.layers import unpacking
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.quantised import UNPACK_ROWS, QuantisedTensor, dense, matmul, stack
from engine.layers.weights import Weights

FORMATS = [
    *(Format("affine", group, bits) for group, bits in [(32, 2), (64, 3), (64, 4), (128, 4), (32, 5), (64, 6), (64, 8)]),
    Format("mxfp4", 32, 4),
    Format("mxfp8", 32, 8),
    Format("nvfp4", 16, 4),
]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]  # OCP MX 1.0, table 5


def ids(form: Format) -> str:
    return f"{form.mode}{form.bits}g{form.group_size}"


def e4m3(byte: int) -> float:
    """One byte by the definition: sign, exponent of bias 7, three bits of fraction."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    magnitude = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return float("nan") if byte & 0x7F == 0x7F else -magnitude if byte & 0x80 else magnitude


def decoded(tensor: QuantisedTensor) -> np.ndarray:
    """The values one by one, from the stream of bits of each row: float64 [..., out, in]."""
    rows = np.array(tensor.weight).reshape(-1, tensor.weight.shape[-1])
    scales = np.array(tensor.scales.astype(mx.float32)).reshape(rows.shape[0], -1)
    biases = None if tensor.biases is None else np.array(tensor.biases.astype(mx.float32)).reshape(scales.shape)
    out = np.empty((rows.shape[0], tensor.shape[-1]))
    for row, words in enumerate(rows):
        stream = int.from_bytes(words.astype("<u4").tobytes(), "little")
        for column in range(out.shape[1]):
            code = stream >> (tensor.bits * column) & ((1 << tensor.bits) - 1)
            scale = scales[row, column // tensor.group_size]
            if tensor.mode == "affine":
                out[row, column] = code * float(scale) + float(biases[row, column // tensor.group_size])
                continue
            step = e4m3(int(scale)) if tensor.mode == "nvfp4" else 2.0 ** (int(scale) - 127)
            out[row, column] = (e4m3(code) if tensor.bits == 8 else E2M1[code]) * step
    return out.reshape(tensor.shape)


def random(shape: tuple[int, ...], form: Format, seed: int = 0, **changes: Any) -> QuantisedTensor:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    tensor = quantised(mx.array(values), form)
    return QuantisedTensor(**({name: getattr(tensor, name) for name in tensor.__dataclass_fields__} | changes))


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


@pytest.mark.parametrize("form", FORMATS, ids=ids)
@pytest.mark.parametrize("shape", [(6, 128), (5, 256), (3, 5, 128), (1, 128)])
def test_values_are_what_the_format_says_code_by_code(form: Format, shape: tuple[int, ...]):
    tensor = random(shape, form)
    expected = decoded(tensor)
    tolerance = 2e-7 * np.abs(expected).max() if form.mode == "affine" else 0.0  # one rounding; the others are exact
    for got in (tensor.dequantise(), tensor.unpack()):
        assert got.shape == shape and got.dtype == mx.float32
        np.testing.assert_allclose(wide(got), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_an_odd_number_of_groups_is_decoded(rows: int):
    tensor = random((rows, 16), Format("nvfp4", 16, 4))
    np.testing.assert_array_equal(wide(tensor.dequantise()), decoded(tensor))


def test_tables_of_small_floats_equal_their_definition():
    np.testing.assert_array_equal(unpacking.E2M1, E2M1)
    np.testing.assert_array_equal(unpacking.E4M3, [e4m3(byte) for byte in range(256)])
    np.testing.assert_array_equal(unpacking.E8M0[:255], [np.float32(2.0 ** (byte - 127)) for byte in range(255)])
    assert np.isnan(unpacking.E8M0[255]) and unpacking.E4M3[0x7E] == 448.0


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_every_byte_of_a_scale_and_every_code_decode_alike_here_and_in_mlx(mode: str):
    group, bits = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
    scales = np.array([byte for byte in range(256) if byte not in (0x7F, 0xFF)], np.uint8)[:, None]
    codes = np.arange(group) % (1 << bits) if bits == 4 else np.arange(group) * 7 % 127
    octets = (codes[::2] | codes[1::2] << 4 if bits == 4 else codes).astype(np.uint8)
    words = mx.array(np.tile(octets, (len(scales), 1)).view(np.uint32))
    tensor = QuantisedTensor(words, mx.array(scales), None, group, bits, mode)
    np.testing.assert_array_equal(np.array(tensor.unpack()), np.array(tensor.dequantise()))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.array(tensor.unpack()), decoded(tensor).astype(np.float32))


@pytest.mark.parametrize("form", FORMATS, ids=ids)
@pytest.mark.parametrize("rows", [1, UNPACK_ROWS - 1, UNPACK_ROWS, 70])
def test_a_quantised_product_equals_that_with_the_values(form: Format, rows: int):
    tensor = random((33, 256), form)
    x = mx.array(np.random.default_rng(1).normal(size=(rows, 256)).astype(np.float32))
    expected = wide(x) @ decoded(tensor).T
    np.testing.assert_allclose(wide(matmul(x, tensor)), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("inputs", [32, 96, 160])
def test_inner_sizes_that_are_no_whole_tile_are_right(inputs: int):
    for form in (Format("affine", 32, 4), Format("mxfp8", 32, 8), Format("nvfp4", 16, 4)):
        tensor = random((40, inputs), form)
        for rows in (1, 3, 64, 80, 96):
            x = mx.array(np.random.default_rng(rows).normal(size=(rows, inputs)).astype(np.float32))
            expected = wide(x) @ decoded(tensor).T
            np.testing.assert_allclose(wide(matmul(x, tensor)), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


SCALES = {"none": None, "scalar": np.float32(0.25), "per row": np.linspace(0.1, 2.0, 33).astype(np.float32)}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_dequantize_global_scale(scale: Any):
    tensor = random((33, 64), Format("nvfp4", 16, 4), global_scale=None if scale is None else mx.array(scale))
    factor = 1.0 if scale is None else np.asarray(scale, np.float64).reshape(-1, 1)
    expected = decoded(tensor) * factor
    for got in (tensor.dequantise(), tensor.unpack()):
        np.testing.assert_allclose(wide(got), expected, rtol=1e-7)
    for rows in (1, 20):
        x = mx.array(np.random.default_rng(2).normal(size=(rows, 64)).astype(np.float32))
        y = wide(x) @ expected.T
        np.testing.assert_allclose(wide(matmul(x, tensor)), y, rtol=0, atol=2e-6 * np.abs(y).max())


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("scale", [1e-6, 1e-4])
def test_an_unscaled_product_beyond_float16_does_not_overflow(rows: int, scale: float):
    tensor = random((33, 64), Format("nvfp4", 16, 4), scales=mx.full((33, 4), 0x7E, mx.uint8), global_scale=mx.array(scale))
    x = mx.full((rows, 64), 8.0, mx.float16)
    expected = np.full((rows, 64), 8.0) @ (decoded(tensor) * scale).T
    assert np.abs(expected / scale).max() > 65504  # it would
    got = matmul(x, tensor)
    assert got.dtype == mx.float16
    np.testing.assert_allclose(wide(got), expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_product_has_its_inputs_dtype(dtype: mx.Dtype):
    for form in (Format("affine", 64, 4), Format("nvfp4", 16, 4)):
        for scale in (None, mx.array(0.5)):
            tensor = random((8, 64), form, global_scale=scale)
            assert all(matmul(mx.ones((rows, 64), dtype), tensor).dtype == dtype for rows in (1, 20))


def test_mxfp4_linear_equals_the_dequantised_one():
    tensor = random((24, 64), Format("mxfp4", 32, 4))
    bias = mx.array(np.random.default_rng(3).normal(size=24).astype(np.float32))
    x = mx.array(np.random.default_rng(4).normal(size=(5, 64)).astype(np.float32))
    packed = Linear(Weights({"weight": tensor, "bias": bias}), bias=True)(x)
    plain = Linear(Weights({"weight": tensor.dequantise(), "bias": bias}), bias=True)(x)
    np.testing.assert_allclose(wide(packed), wide(plain), atol=1e-5)


def test_the_bias_is_added_after_the_global_scale():
    tensor = random((8, 64), Format("nvfp4", 16, 4), global_scale=mx.array(0.25))
    bias = mx.full((8,), 3.0)
    layer = Linear(Weights({"weight": tensor, "bias": bias}), bias=True)
    np.testing.assert_allclose(wide(layer(mx.zeros((2, 64)))), 3.0)


EMBEDDINGS = {
    "dense": lambda: mx.array(np.random.default_rng(5).normal(size=(33, 64)).astype(np.float32)),
    "quantised": lambda: random((33, 64), Format("affine", 64, 4)),
    "global scale": lambda: random((33, 64), Format("nvfp4", 16, 4), global_scale=mx.array(0.25)),
    "global scale per row": lambda: random((33, 64), Format("nvfp4", 16, 4), global_scale=mx.array(SCALES["per row"])),
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_embedding_layer(kind: str):
    weight = EMBEDDINGS[kind]()
    values = wide(dense(weight))
    embedding = Embedding(Weights({"weight": weight}))
    tokens = np.array([3, 0, 32, 3, 7], np.int32)
    np.testing.assert_allclose(wide(embedding(mx.array(tokens))), values[tokens], rtol=1e-7)
    x = mx.array(np.random.default_rng(6).normal(size=(3, 64)).astype(np.float32))
    expected = wide(x) @ values.T
    np.testing.assert_allclose(wide(embedding.as_head(x)), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_stacked_weights_keep_each_ones_scale():
    scales = [mx.array(0.5), None, mx.array(2.0)]
    tensors = [random((8, 64), Format("nvfp4", 16, 4), seed, global_scale=scale) for seed, scale in enumerate(scales)]
    stacked = stack(tensors)
    assert isinstance(stacked, QuantisedTensor) and stacked.shape == (3, 8, 64)
    for index, tensor in enumerate(tensors):
        np.testing.assert_array_equal(np.array(stacked.unpack()[index]), np.array(tensor.unpack()))
        np.testing.assert_array_equal(np.array(stacked[index].unpack()), np.array(tensor.unpack()))


def test_stacked_scales_of_rows_and_of_matrices_mix():
    rows = mx.array(np.linspace(0.5, 2, 8).astype(np.float32))
    tensors = [random((8, 64), Format("nvfp4", 16, 4), seed, global_scale=s) for seed, s in enumerate([rows, mx.array(3.0)])]
    stacked = stack(tensors)
    for index, tensor in enumerate(tensors):
        np.testing.assert_array_equal(np.array(stacked[index].unpack()), np.array(tensor.unpack()))


def test_stacked_weights_of_different_formats_become_values():
    tensors = [random((8, 64), Format("nvfp4", 16, 4)), random((8, 64), Format("mxfp8", 32, 8)), mx.ones((8, 64))]
    stacked = stack(tensors)
    assert isinstance(stacked, mx.array)
    np.testing.assert_array_equal(np.array(stacked), np.stack([np.array(dense(tensor)) for tensor in tensors]))


def test_a_quantised_tensor_where_an_array_is_needed_is_named():
    with pytest.raises(Refused, match=r"layers\.0\.norm\.weight is quantised"):
        Weights({"layers.0.norm.weight": random((8, 64), FORMATS[0])}).at("layers.0")["norm.weight"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bits": 7}, "bits"),
        ({"group_size": 0}, "groups of 0"),
        ({"mode": "nvfp8"}, "nvfp8"),
        ({"scales": mx.zeros((8, 3), mx.uint8)}, "do not fit"),
        ({"scales": mx.zeros((8, 4))}, "uint8"),
        ({"weight": mx.zeros((8, 8), mx.int32)}, "uint32"),
        ({"biases": mx.zeros((8, 4))}, "no biases"),
        ({"global_scale": mx.zeros((3,))}, "global scale"),
        ({"global_scale": mx.array(1, mx.int32)}, "global scale"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        random((8, 64), Format("nvfp4", 16, 4), **changes)


def test_bytes_are_those_of_all_parts():
    tensor = random((8, 64), Format("nvfp4", 16, 4), global_scale=mx.array(0.5))
    assert tensor.nbytes == 8 * 32 + 8 * 4 + 4
