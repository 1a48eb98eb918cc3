"""Loading quantised checkpoints: every format's values, the plans, and errors that name tensor and field in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from engine.checkpoint import load
from engine.checkpoint.pack import pack, parts, quantised
from engine.checkpoint.policy import FORMATS
from engine.checkpoint.safetensors import read_header
from engine.checkpoint.write import Writer
from engine.errors import CheckpointError, ConfigError, EngineError, Refused
from engine.layers.quantised import QuantisedTensor, dense
from engine.models import family
from harness.cases import formats
from harness.cases.build import build
from reference_models import loading

CASES = {case.id: case for case in formats.CASES}
FIRST = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> dtype, shape, data


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Callable[[str], Path]:
    """The checkpoint of a case, built once; not to be written to."""
    found: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in found:
            found[name] = build(CASES[name], 0, tmp_path_factory.mktemp("case"))
        return found[name]

    return get


@pytest.fixture
def changed(built, tmp_path) -> Callable[..., Path]:
    """A copy of a case's checkpoint with config, hf_quant_config or tensors edited."""

    def make(
        name: str,
        tensors: Callable[[Tensors], Any] = lambda tensors: None,
        config: Callable[[dict[str, Any]], Any] = lambda config: None,
        hf_quant_config: Callable[[dict[str, Any]], Any] = lambda config: None,
    ) -> Path:
        source = built(name)
        for file, edit in (("config.json", config), ("hf_quant_config.json", hf_quant_config)):
            if (source / file).is_file():
                value = json.loads((source / file).read_text())
                edit(value)
                (tmp_path / file).write_text(json.dumps(value))
        path = source / "model.safetensors"
        data = path.read_bytes()
        found = {n: (h.dtype, h.shape, data[h.offset : h.offset + h.nbytes]) for n, h in read_header(path).items()}
        tensors(found)
        with Writer(tmp_path / "model.safetensors", {n: (dtype, shape) for n, (dtype, shape, _) in found.items()}) as writer:
            for n, (_, _, content) in found.items():
                writer.write(n, content)
        return tmp_path

    return make


def failure(path: Path, kind: type[EngineError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("held", ["packed", "unpacked"])
@pytest.mark.parametrize("name", CASES)
def test_values_equal_those_that_the_reference_decodes(built, name: str, held: str):
    checkpoint = load(built(name), dtype="float32", quantised=held)
    _, expected = loading.load(built(name))
    packed = [n for n, weight in checkpoint.weights.items() if isinstance(weight, QuantisedTensor)]
    assert bool(packed) == (held == "packed" and CASES[name].stored not in ("modelopt_fp8", "block_fp8"))
    for parameter, weight in checkpoint.weights.items():
        values, right = np.array(dense(weight), np.float64), expected[parameter].to(torch.float64).numpy()
        if isinstance(weight, QuantisedTensor) and name == "gpt_oss/mxfp4":  # plain files hold these from inputs to outputs
            right = right.swapaxes(-1, -2)
        np.testing.assert_allclose(values, right, rtol=1.3e-7, err_msg=parameter)  # float32, and a product of two in it


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_same_packed_and_unpacked(built, name: str):
    from engine.engine import Engine

    rows, counted = [], []
    for held in ("packed", "unpacked"):
        checkpoint = load(built(name), dtype="float32", quantised=held)
        engine = Engine(family(checkpoint.model_type).Model(checkpoint.config, checkpoint.weights))
        sequence = engine.open()
        engine.prefill(sequence, list(range(3, 40)))
        rows.append(np.array(engine.step({sequence: 5})))
        counted.append(engine.counters)
    np.testing.assert_allclose(rows[0], rows[1], rtol=0, atol=2e-5 * np.abs(rows[1]).max())
    if CASES[name].stored not in ("modelopt_fp8", "block_fp8"):
        assert sum(counted[0][c] for c in ("quantised_matmuls", "unpacked_matmuls", "moe_gather", "moe_grouped")) > 0
    assert counted[1]["quantised_matmuls"] == counted[1]["unpacked_matmuls"] == 0


def test_a_small_model_stays_packed_on_a_cpu_without_a_measurement(built):
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("a CPU's choice")
    checkpoint = load(built("llama/mlx_nvfp4"))
    assert any("nvfp4 held packed" in note and "too small to time" in note for note in checkpoint.notes)
    assert any(isinstance(weight, QuantisedTensor) for weight in checkpoint.weights.values())


def test_residency_can_be_forced_by_the_environment(built, monkeypatch):
    monkeypatch.setenv("DECODEGATE_QUANTISED", "packed")
    checkpoint = load(built("llama/mlx_nvfp4"))
    assert any("held packed as asked" in note for note in checkpoint.notes)
    assert isinstance(checkpoint.weights[f"{FIRST}.weight"], QuantisedTensor)
    monkeypatch.setenv("DECODEGATE_QUANTISED", "crushed")
    assert "crushed" in failure(built("llama/mlx_nvfp4"), Refused)


def test_scales_of_activations_and_of_the_kv_cache_are_left_out(changed):
    def edit(tensors: Tensors) -> None:
        for end in ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "mlp.up_proj.input_scale"):
            tensors[f"model.layers.0.{end}"] = ("F32", (), np.float32(0.5).tobytes())

    load(changed("llama/modelopt_nvfp4", edit))


def drop(*ends: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for end in ends:
            del tensors[f"{FIRST}{end}"]

    return edit


def put(end: str, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Callable[[Tensors], None]:
    """Another dtype or shape under the end of a name, new or not; all its bytes are 1."""

    def edit(tensors: Tensors) -> None:
        old = tensors.get(f"{FIRST}{end}", ("F32", (), b""))
        new_dtype, new_shape = dtype or old[0], old[1] if shape is None else shape
        size = {"F32": 4, "U32": 4, "BF16": 2, "F16": 2, "I32": 4}.get(new_dtype, 1)
        tensors[f"{FIRST}{end}"] = (new_dtype, new_shape, b"\x01" * (size * int(np.prod(new_shape, dtype=int))))

    return edit


def rename(end: str, new: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{FIRST}{new}"] = tensors.pop(f"{FIRST}{end}")

    return edit


DAMAGED: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "missing scale": ("llama/mlx_nvfp4", drop(".scales"), "scales is missing"),
    "missing biases": ("llama/affine_4", drop(".biases"), "biases is missing"),
    "renamed scale": ("llama/modelopt_nvfp4", rename(".weight_scale", ".weight_scales"), "weight_scale is missing"),
    "missing second scale": ("llama/modelopt_nvfp4", drop(".weight_scale_2"), "weight_scale_2 is missing"),
    "missing reciprocal": ("llama/compressed_nvfp4", drop(".weight_global_scale"), "weight_global_scale is missing"),
    "missing block scale": ("llama/block_fp8", drop(".weight_scale_inv"), "weight_scale_inv is missing"),
    "extra scale": ("llama/mlx_mxfp4", put(".weight_scale", "F32"), "weight_scale"),
    "extra biases": ("llama/mlx_mxfp8", put(".biases", "U8", (64, 2)), "biases"),
    "scales of no group": ("llama/mlx_nvfp4", put(".scales", shape=(64, 2)), "needs [64, 4]"),
    "transposed scales": ("llama/mlx_nvfp4", put(".scales", shape=(4, 64)), "needs [64, 4]"),
    "scales of another dtype": ("llama/modelopt_nvfp4", put(".weight_scale", "U8"), "F8_E4M3"),
    "codes of another dtype": ("llama/modelopt_nvfp4", put(".weight", "F8_E4M3", (64, 64)), "U8"),
    "codes of another width": ("llama/mlx_nvfp4", put(".weight", shape=(64, 16)), "needs [64, 8]"),
    "second scale of odd shape": ("llama/modelopt_nvfp4", put(".weight_scale_2", shape=(3,)), "weight_scale_2"),
    "blocks of another size": ("llama/block_fp8", put(".weight_scale_inv", shape=(1, 1)), "weight_scale_inv"),
    "integer weights": ("llama/mlx_nvfp4", put(".weight", "I32", (64, 8)), "I32"),
    "plain weight with a scale": ("llama/modelopt_nvfp4", put(".weight", "F32", (64, 64)), "not part of the model"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_packed_parameter_that_is_not_what_the_plan_says_is_named(changed, damage: str):
    name, edit, text = DAMAGED[damage]
    found = failure(changed(name, edit))
    assert text in found and FIRST in found


def scale_of(end: str, value: Any) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        dtype, shape, data = tensors[f"{FIRST}{end}"]
        content = bytearray(data)
        content[: len(value)] = value
        tensors[f"{FIRST}{end}"] = (dtype, shape, bytes(content))

    return edit


NAN = {
    "e4m3 scale": ("llama/modelopt_nvfp4", scale_of(".weight_scale", b"\x7f")),
    "negative e4m3 NaN": ("llama/compressed_nvfp4", scale_of(".weight_scale", b"\xff")),
    "e8m0 scale": ("llama/mlx_mxfp8", scale_of(".scales", b"\xff")),
    "e4m3 weight": ("llama/block_fp8", scale_of(".weight", b"\x7f")),
    "mxfp8 weight": ("llama/modelopt_mxfp8", scale_of(".weight", b"\x7f")),
    "second scale": ("llama/modelopt_nvfp4", scale_of(".weight_scale_2", np.float32(np.inf).tobytes())),
    "block scale": ("llama/block_fp8", scale_of(".weight_scale_inv", np.float32(np.nan).tobytes())),
    "affine bias": ("llama/affine_4", scale_of(".biases", np.float32(np.nan).tobytes())),
}


@pytest.mark.parametrize("which", NAN)
def test_what_is_no_finite_number_is_named(changed, which: str):
    name, edit = NAN[which]
    text = failure(changed(name, edit))
    assert "no finite number" in text and FIRST in text


def test_a_reciprocal_of_zero_is_named(changed):
    text = failure(changed("llama/compressed_nvfp4", scale_of(".weight_global_scale", np.float32(0).tobytes())))
    assert "must not be 0" in text and FIRST in text


def mlx_plan(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["quantization"].update(fields)


def block(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["quantization_config"].update(fields)


PLANS: dict[str, tuple[str, dict[str, Any], str, type[EngineError]]] = {
    "bits 0": ("llama/affine_4", {"config": mlx_plan(bits=0)}, "quantization.bits", ConfigError),
    "bits 7": ("llama/affine_4", {"config": mlx_plan(bits=7)}, "quantization.bits", ConfigError),
    "bits text": ("llama/affine_4", {"config": mlx_plan(bits="4")}, "quantization.bits", ConfigError),
    "group 0": ("llama/affine_4", {"config": mlx_plan(group_size=0)}, "quantization.group_size", ConfigError),
    "group 48": ("llama/affine_4", {"config": mlx_plan(group_size=48)}, "quantization.group_size", ConfigError),
    "group 2^40": ("llama/affine_4", {"config": mlx_plan(group_size=2**40)}, "quantization.group_size", ConfigError),
    "wrong group": ("llama/affine_4", {"config": mlx_plan(group_size=64)}, "needs [", CheckpointError),
    "wrong bits": ("llama/affine_4", {"config": mlx_plan(bits=8)}, "needs [", CheckpointError),
    "unknown mode": ("llama/affine_4", {"config": mlx_plan(mode="nf4")}, "nf4", Refused),
    "mode of other bits": ("llama/affine_8", {"config": mlx_plan(mode="nvfp4")}, "quantization.", ConfigError),
    "module's bits": ("llama/affine_4", {"config": mlx_plan(**{FIRST: {"bits": 1}})}, f"{FIRST}.bits", ConfigError),
    "module of text": ("llama/affine_4", {"config": mlx_plan(**{FIRST: "no"})}, FIRST, ConfigError),
    "module left out": ("llama/affine_4", {"config": mlx_plan(**{FIRST: False})}, "not quantised", CheckpointError),
    "plan of text": ("llama/affine_4", {"config": lambda c: c.update(quantization=[4])}, "quantization", ConfigError),
    "unknown method": ("llama/block_fp8", {"config": block(quant_method="gptq")}, "gptq", Refused),
    "block of zero": ("llama/block_fp8", {"config": block(weight_block_size=[0, 128])}, "weight_block_size", ConfigError),
    "block of one": ("llama/block_fp8", {"config": block(weight_block_size=[128])}, "weight_block_size", ConfigError),
    "no block": ("llama/block_fp8", {"config": block(weight_block_size=None)}, "weight_block_size", Refused),
    "other block": ("llama/block_fp8", {"config": block(weight_block_size=[64, 128])}, "weight_scale_inv", CheckpointError),
    "ignored module": ("llama/block_fp8", {"config": block(modules_to_not_convert=[FIRST])}, "not quantised", CheckpointError),
    "backtracking": ("llama/compressed_nvfp4", {"config": block(ignore=["re:(a+)+$"])}, "repeats a group", Refused),
    "ignored of text": ("llama/compressed_nvfp4", {"config": block(ignore="lm_head")}, "ignore", ConfigError),
    "long pattern": ("llama/compressed_nvfp4", {"config": block(ignore=["x" * 300])}, "ignore", ConfigError),
    "unknown packing": ("llama/compressed_nvfp4", {"config": block(format="marlin-24")}, "marlin-24", Refused),
    "no groups": ("llama/compressed_nvfp4", {"config": block(config_groups={})}, "config_groups", ConfigError),
    "algorithm": (
        "llama/modelopt_nvfp4",
        {"hf_quant_config": lambda c: c["quantization"].update(quant_algo="INT4_AWQ")},
        "INT4_AWQ",
        Refused,
    ),
    "other algorithm": (
        "llama/modelopt_nvfp4",
        {"hf_quant_config": lambda c: c["quantization"].update(quant_algo="FP8", group_size=None)},
        "modelopt fp8",
        CheckpointError,
    ),
    "declared group": (
        "llama/modelopt_nvfp4",
        {"hf_quant_config": lambda c: c["quantization"].update(group_size=32)},
        "group_size",
        ConfigError,
    ),
    "excluded by wildcard": (
        "llama/modelopt_nvfp4",
        {"hf_quant_config": lambda c: c["quantization"].update(exclude_modules=["model.*.q_proj"])},
        "not quantised",
        CheckpointError,
    ),
    "mixed without layers": (
        "llama/modelopt_nvfp4",
        {"hf_quant_config": lambda c: c["quantization"].update(quant_algo="MIXED_PRECISION")},
        "quantized_layers",
        ConfigError,
    ),
}


@pytest.mark.parametrize("which", PLANS)
def test_a_plan_out_of_bounds_names_field_and_value(changed, which: str):
    name, edits, text, kind = PLANS[which]
    assert text in failure(changed(name, **edits), kind)


def test_codes_without_a_plan_are_no_parameters(changed):
    def bare(config: dict[str, Any]) -> None:
        config.pop("quantization"), config.pop("quantization_config")

    text = failure(changed("llama/mlx_nvfp4", config=bare))
    assert (".scales" in text or ".biases" in text) and "not part of the model" in text


def test_a_scalar_scale_may_be_stored_with_an_axis(changed, built):
    path = changed("llama/modelopt_nvfp4", lambda t: t.update({f"{FIRST}.weight_scale_2": one_axis(t)}))
    got, right = (load(p, quantised="unpacked").weights[f"{FIRST}.weight"] for p in (path, built("llama/modelopt_nvfp4")))
    np.testing.assert_array_equal(np.array(got), np.array(right))


def one_axis(tensors: Tensors) -> tuple[str, tuple[int, ...], bytes]:
    dtype, _, data = tensors[f"{FIRST}.weight_scale_2"]
    return dtype, (1,), data


def test_scales_of_rows_multiply_their_rows(changed, built):
    factors = np.linspace(0.5, 2, 64).astype(np.float32)

    def edit(tensors: Tensors) -> None:
        whole = np.frombuffer(tensors[f"{FIRST}.weight_scale_2"][2], np.float32)
        tensors[f"{FIRST}.weight_scale_2"] = ("F32", (64, 1), (whole * factors).tobytes())

    path = changed("llama/modelopt_nvfp4", edit)
    got, right = (load(p, quantised="unpacked").weights[f"{FIRST}.weight"] for p in (path, built("llama/modelopt_nvfp4")))
    np.testing.assert_allclose(np.array(got), np.array(right) * factors[:, None], rtol=3e-7)


def test_a_router_that_a_file_holds_packed_is_unpacked_into_float32(changed):
    routers: dict[str, np.ndarray] = {}

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("mixer.gate.weight")]:
            dtype, shape, data = tensors.pop(name)
            assert dtype == "F32"
            values = mx.array(np.frombuffer(data, np.float32).reshape(shape))
            form, base = FORMATS["nvfp4"], name.removesuffix(".weight")
            packed = pack("mlx", form, values, name)
            for part in parts("mlx", form, shape, "F32"):
                tensors[base + part.end] = (part.dtype, part.shape, packed[part.end])
            routers[name] = np.array(quantised(values, form).dequantise())

    checkpoint = load(changed("nemotron_h/mlx_nvfp4", edit), quantised="packed", dtype="bfloat16")
    assert routers
    for name, values in routers.items():
        weight = checkpoint.weights[name]
        assert isinstance(weight, mx.array) and weight.dtype == mx.float32
        np.testing.assert_array_equal(np.array(weight), values)


def test_weights_in_float16_that_its_range_does_not_hold_are_named(changed):
    path = changed("llama/modelopt_fp8", scale_of(".weight_scale", np.float32(1e4).tobytes()))
    with pytest.raises(CheckpointError, match="beyond float16") as caught:
        load(path, dtype="float16")
    assert FIRST in str(caught.value)


@pytest.mark.parametrize("held", ["packed", "unpacked"])
@pytest.mark.parametrize("name", ["llama/modelopt_nvfp4", "llama/mlx_mxfp4", "llama/affine_4"])
def test_values_that_float32_does_not_hold_are_named_however_the_weights_are_held(changed, name: str, held: str):
    end, part = {
        "llama/modelopt_nvfp4": (".weight_scale_2", lambda size: np.float32(3e38).tobytes()),
        "llama/mlx_mxfp4": (".scales", lambda size: bytes([254]) * size),
        "llama/affine_4": (".scales", lambda size: np.full(size // 4, 3e38, np.float32).tobytes()),
    }[name]

    def damage(tensors: Tensors) -> None:
        dtype, shape, data = tensors[FIRST + end]
        tensors[FIRST + end] = dtype, shape, part(len(data))

    with pytest.raises(CheckpointError, match="beyond float32; its scales are damaged") as caught:
        load(changed(name, damage), dtype="float32", quantised=held)
    assert FIRST in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_value_exceeds_the_bound_of_its_tensor(built, name: str):
    weights = load(built(name), dtype="float32", quantised="packed").weights
    for weight in weights.values():
        if isinstance(weight, QuantisedTensor):
            assert mx.abs(weight.unpack()).max().item() <= weight.bound() * (1 + 1e-6) < 1e6


def test_a_plan_may_name_modules_as_the_files_or_as_the_model(tmp_path):
    """Wrapped checkpoints put a prefix before the names of their tensors; lists of modules have it or not."""
    path = build(CASES["nemotron_h/modelopt_mixed"], 0, tmp_path / "plain")
    right = load(path, quantised="unpacked")
    data = (path / "model.safetensors").read_bytes()
    found = {
        n: (h.dtype, h.shape, data[h.offset : h.offset + h.nbytes]) for n, h in read_header(path / "model.safetensors").items()
    }
    inner = json.loads((path / "config.json").read_text())
    for prefix in ("", "language_model."):
        config = json.loads(json.dumps(inner))
        layers = config["quantization_config"]["quantized_layers"]
        config["quantization_config"]["quantized_layers"] = {f"{prefix}{name}": value for name, value in layers.items()}
        plan = config.pop("quantization_config")
        out = tmp_path / f"out{prefix}"
        out.mkdir()
        wrapped = {"model_type": "NemotronH_Nano_VL_V2", "llm_config": config, "quantization_config": plan}
        (out / "config.json").write_text(json.dumps(wrapped))
        with Writer(out / "model.safetensors", {f"language_model.{n}": t[:2] for n, t in found.items()}) as writer:
            for n, (_, _, content) in found.items():
                writer.write(f"language_model.{n}", content)
        got = load(out, quantised="unpacked")
        assert got.weights.keys() == right.weights.keys()
        for name, weight in got.weights.items():
            np.testing.assert_array_equal(np.array(weight), np.array(right.weights[name]), err_msg=name)
