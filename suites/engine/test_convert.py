"""decodegate convert: what it writes, that it loads back, and by which policy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors import safe_open

from engine.checkpoint import load
from engine.checkpoint.convert import convert
from engine.checkpoint.policy import FORMATS, Format, nemotron, quantisation_format, uniform
from engine.checkpoint.safetensors import read_header
from engine.checkpoint.write import Writer
from engine.engine import Engine
from engine.errors import CheckpointError, Refused
from engine.layers.quantised import QuantisedTensor, dense
from engine.models import family
from harness import cases
from harness.cases.build import build
from reference_models import loading
from suites.engine.tiny_checkpoints import CONFIG, tensors, write_directory

LLAMA = CONFIG | {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture
def llama(tmp_path) -> Path:
    return write_directory(tmp_path / "llama", LLAMA, tensors(LLAMA), "BF16")


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in found:
            found[name] = build(cases.find(name), 0, tmp_path_factory.mktemp("case"))
        return found[name]

    return get


def rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


# Root mean square of the rounding, relative to normal weights': measured 0.095, 0.118, 0.027, 0.39 .. 0.006
ERRORS = {"nvfp4": 0.15, "mxfp4": 0.15, "mxfp8": 0.04, "affine2": 0.6, "affine3": 0.3, "affine4": 0.15, "affine8": 0.01}


@pytest.mark.parametrize(
    ("mode", "layout"),
    [*((mode, "mlx") for mode in ERRORS), ("nvfp4", "modelopt"), ("mxfp8", "modelopt")],
)
def test_what_is_written_loads_back_as_the_same_weights_within_the_formats_rounding(llama, tmp_path, mode: str, layout: str):
    done = convert(llama, tmp_path / "out", mode=mode, layout=layout)
    source, got = load(llama), load(tmp_path / "out", quantised="packed")
    _, reference = loading.load(tmp_path / "out")
    packed = {name for name, weight in got.weights.items() if isinstance(weight, QuantisedTensor)}
    assert packed == {f"{module}.weight" for module in done.formats} and len(packed) == 16
    for name, weight in got.weights.items():
        values, right = np.array(dense(weight)), np.array(source.weights[name])
        np.testing.assert_allclose(values, reference[name].to(torch.float64).numpy(), rtol=1.3e-7)
        if name in packed:
            assert 0 < rms(values - right) <= ERRORS[mode] * rms(right), name
        else:
            np.testing.assert_array_equal(values, right)
    assert done.bytes_after < done.bytes_before


@pytest.mark.parametrize(
    ("name", "mode", "layout"),
    [
        ("nemotron_h/mixed", "nvfp4", "modelopt"),
        ("nemotron_h/mixed", "mxfp8", "modelopt"),
        ("nemotron_h/mixed", "affine4", "mlx"),
        ("longcat_flash/plain", "nvfp4", "mlx"),
        ("gemma3/local_global", "nvfp4", "modelopt"),
        ("gpt_oss/sinks", "nvfp4", "mlx"),
        ("gpt_oss/sinks", "mxfp4", "gpt-oss"),
    ],
)
def test_families_load_back_and_the_reference_decodes_the_same(case, tmp_path, name: str, mode: str, layout: str):
    done = convert(case(name), tmp_path / "out", mode=mode, layout=layout, group_size=32 if mode == "affine4" else None)
    got = load(tmp_path / "out", dtype="float32", quantised="unpacked")
    _, reference = loading.load(tmp_path / "out")
    assert done.formats
    for parameter, values in got.weights.items():
        right = reference[parameter].to(torch.float64).numpy()
        # float32: a product, and for affine a sum that may cancel
        np.testing.assert_allclose(np.array(values), right, rtol=1.3e-7, atol=2e-7 * np.abs(right).max(), err_msg=parameter)


def test_small_parameters_stay_as_they_are_bit_for_bit(case, tmp_path):
    source = case("nemotron_h/mixed")
    convert(source, tmp_path / "out", mode="nvfp4", layout="modelopt")
    before, after = read_header(source / "model.safetensors"), read_header(tmp_path / "out/model.safetensors")
    kept = (
        "conv1d.weight",
        "conv1d.bias",
        "A_log",
        ".D",
        "dt_bias",
        "norm.weight",
        "norm_f.weight",
        "gate.weight",
        "correction_bias",
    )
    names = [name for name in before if name.endswith(kept)]
    assert {end for end in kept if any(name.endswith(end) for name in names)} == set(kept)
    for name in names:
        one, other = before[name], after[name]
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        contents = [header.file.read_bytes()[header.offset : header.offset + header.nbytes] for header in (one, other)]
        assert contents[0] == contents[1], name


def test_a_modelopt_layout_has_its_names_dtypes_and_plan(llama, tmp_path):
    convert(llama, tmp_path / "out", mode="nvfp4", layout="modelopt")
    header = read_header(tmp_path / "out/model.safetensors")
    module = "model.layers.0.mlp.up_proj"
    found = {name.removeprefix(module): (h.dtype, h.shape) for name, h in header.items() if name.startswith(f"{module}.")}
    assert found == {
        ".weight": ("U8", (128, 32)),
        ".weight_scale": ("F8_E4M3", (128, 4)),
        ".weight_scale_2": ("F32", ()),
    }
    plan = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert plan == {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": []}
    assert json.loads((tmp_path / "out/config.json").read_text()) == LLAMA
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        scale = file.get_tensor(f"{module}.weight_scale_2").item()
        assert file.get_tensor(f"{module}.weight_scale").to(torch.float32).max() == 448.0
    right = np.abs(np.array(load(llama).weights[f"{module}.weight"])).max() / (6 * 448)
    assert scale == pytest.approx(right, rel=1e-6)


def test_a_mixed_modelopt_plan_lists_every_packed_module(case, tmp_path):
    done = convert(case("nemotron_h/mixed"), tmp_path / "out", mode="nvfp4", layout="modelopt")
    plan = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert plan["quant_algo"] == "MIXED_PRECISION"
    algorithms = {module: entry["quant_algo"] for module, entry in plan["quantized_layers"].items()}
    assert algorithms == {module: form.mode.upper() for module, form in done.formats.items()}
    assert set(algorithms.values()) == {"NVFP4", "MXFP8"}
    assert plan["exclude_modules"] == sorted((*done.plain, *done.unaligned))


def test_an_mlx_layout_names_what_differs_by_module(case, tmp_path):
    done = convert(case("nemotron_h/mixed"), tmp_path / "out", mode="nvfp4")
    config = json.loads((tmp_path / "out/config.json").read_text())
    plan = config["quantization"]
    assert plan == config["quantization_config"]
    assert (plan["mode"], plan["group_size"], plan["bits"]) == ("nvfp4", 16, 4)
    listed = {name: value for name, value in plan.items() if name not in ("mode", "group_size", "bits")}
    expected = {m: {"group_size": 32, "bits": 8, "mode": "mxfp8"} for m, form in done.formats.items() if form.mode == "mxfp8"}
    assert listed == expected | dict.fromkeys((*done.plain, *done.unaligned), False)


def test_other_readers_of_safetensors_read_the_file(llama, tmp_path):
    convert(llama, tmp_path / "out", mode="mxfp8", layout="modelopt")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        codes = file.get_tensor("model.layers.0.mlp.up_proj.weight")
        scales = file.get_tensor("model.layers.0.mlp.up_proj.weight_scale")
        assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.uint8
    got = codes.to(torch.float64) * torch.exp2(scales.to(torch.float64) - 127).repeat_interleave(32, -1)
    right = np.array(dense(load(tmp_path / "out").weights["model.layers.0.mlp.up_proj.weight"]))
    np.testing.assert_array_equal(got.numpy(), right)


def test_a_matrix_of_zeros_stays_one(tmp_path):
    arrays = tensors(LLAMA)
    arrays["model.layers.0.mlp.up_proj.weight"][:] = 0
    source = write_directory(tmp_path / "source", LLAMA, arrays)
    for index, (mode, layout) in enumerate([("nvfp4", "modelopt"), ("nvfp4", "mlx"), ("mxfp8", "mlx"), ("affine4", "mlx")]):
        convert(source, tmp_path / str(index), mode=mode, layout=layout)
        assert not np.array(dense(load(tmp_path / str(index)).weights["model.layers.0.mlp.up_proj.weight"])).any()


def test_tokenizer_and_template_are_copied(llama, tmp_path):
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (llama / name).write_text("{}")
    (llama / "README.md").write_text("not this")
    convert(llama, tmp_path / "out", mode="affine4")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }


def test_rows_that_are_no_whole_groups_stay_as_they_are(tmp_path):
    config = CONFIG | {"intermediate_size": 48}  # hidden 32
    source = write_directory(tmp_path / "source", config, tensors(config))
    done = convert(source, tmp_path / "out", mode="mxfp8")
    assert done.unaligned == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    load(tmp_path / "out")


@pytest.mark.parametrize(
    ("mode", "layout", "policy", "group_size", "text"),
    [
        ("int3", "mlx", None, None, "int3"),
        ("affine4", "modelopt", None, None, "layout modelopt has no mode affine"),
        ("nvfp4", "mlx", "best", None, "best"),
        ("nvfp4", "mlx", None, 32, "groups of 32"),
        ("affine4", "mlx", None, 128, "no weight"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    tmp_path, mode: str, layout: str, policy: str | None, group_size: int | None, text: str
):
    source = write_directory(tmp_path / "source")
    with pytest.raises(Refused, match=text):
        convert(source, tmp_path / "out", mode=mode, layout=layout, policy=policy, group_size=group_size)
    assert not (tmp_path / "out").exists()


def test_a_quantised_checkpoint_is_not_converted_again(llama, tmp_path):
    convert(llama, tmp_path / "out", mode="affine4")
    with pytest.raises(Refused, match="quantised already"):
        convert(tmp_path / "out", tmp_path / "again", mode="affine4")


def test_a_directory_that_holds_something_is_left_alone(llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="no empty directory"):
        convert(llama, tmp_path / "out", mode="affine4")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_values_that_are_not_finite_are_named_and_no_file_is_left(tmp_path):
    arrays = tensors(LLAMA)
    arrays["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
    source = write_directory(tmp_path / "source", LLAMA, arrays)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        convert(source, tmp_path / "out", mode="nvfp4", layout="modelopt")
    assert not list((tmp_path / "out").iterdir())


def test_a_writer_takes_each_tensor_once_with_its_size(tmp_path):
    with (
        pytest.raises(ValueError, match="not written"),
        Writer(tmp_path / "x", {"a": ("U8", (2,)), "b": ("F32", ())}) as writer,
    ):
        writer.write("a", b"12")
        for data in (b"1", b"12"):
            with pytest.raises(ValueError, match="a:"):
                writer.write("a", data)
    assert not list(tmp_path.iterdir())


def test_quant_params():
    """The names that commands take, and their aliases."""
    expected = {
        "nvfp4": Format("nvfp4", 16, 4),
        "mxfp4": Format("mxfp4", 32, 4),
        "mxfp8": Format("mxfp8", 32, 8),
        "int4": Format("affine", 64, 4),
        "int8": Format("affine", 64, 8),
    }
    expected |= {"fp4": expected["int4"], "q4": expected["int4"], "fp8": expected["int8"], "q8": expected["int8"]}
    assert {name: quantisation_format(name) for name in expected} == expected
    assert quantisation_format("affine5", 32) == Format("affine", 32, 5)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_and_pack_factor(llama, tmp_path, name: str):
    """Words of 32 bits: 8 codes of 4 bits in each, 4 of 8."""
    form = FORMATS[name]
    convert(llama, tmp_path / "out", mode=name, policy="uniform")
    header = read_header(tmp_path / "out/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert header.dtype == "U32" and header.shape == (128, 64 * form.bits // 32)
    if form.bits in (2, 4, 8):
        assert header.shape[1] * form.pack_factor == 64


IMPORT_POLICY = [  # name, layer of 16, format for nvfp4 (None: as it is)
    ("backbone.embeddings.weight", "mxfp8"),
    ("lm_head.weight", "mxfp8"),
    *((f"backbone.layers.5.mixer.{name}_proj.weight", "mxfp8") for name in "qkvo"),
    ("backbone.layers.0.mixer.out_proj.weight", "mxfp8"),  # first eighth
    ("backbone.layers.1.mixer.down_proj.weight", "mxfp8"),
    ("backbone.layers.2.mixer.down_proj.weight", "nvfp4"),
    ("backbone.layers.3.mixer.experts.7.down_proj.weight", "nvfp4"),
    ("backbone.layers.4.mixer.experts.7.down_proj.weight", "mxfp8"),  # (4 - 2) % 3 == 2
    ("backbone.layers.4.mixer.experts.down_proj.weight", "mxfp8"),
    ("backbone.layers.5.mixer.shared_experts.down_proj.weight", "nvfp4"),
    ("backbone.layers.7.mixer.shared_experts.down_proj.weight", "mxfp8"),
    ("backbone.layers.13.mixer.out_proj.weight", "mxfp8"),  # (13 - 2) % 3 == 2
    ("backbone.layers.12.mixer.out_proj.weight", "nvfp4"),
    ("backbone.layers.14.mixer.out_proj.weight", "mxfp8"),  # last eighth
    ("backbone.layers.15.mixer.out_proj.weight", "mxfp8"),
    ("backbone.layers.0.mixer.in_proj.weight", "nvfp4"),
    ("backbone.layers.4.mixer.experts.7.up_proj.weight", "nvfp4"),
    ("backbone.layers.4.mixer.fc1_latent_proj.weight", "nvfp4"),
    ("backbone.layers.4.mixer.gate.weight", None),
    ("backbone.layers.4.mixer.gate.e_score_correction_bias", None),
    ("backbone.layers.4.mixer.conv1d.weight", None),
    ("backbone.layers.4.mixer.A_log", None),
    ("backbone.layers.4.mixer.D", None),
    ("backbone.layers.4.mixer.dt_bias", None),
    ("backbone.layers.4.mixer.norm.weight", None),
    ("backbone.norm_f.weight", None),
    ("mtp.layers.0.mixer.q_proj.weight", None),
]


@pytest.mark.parametrize(("name", "mode"), IMPORT_POLICY)
def test_import_policy_table(name: str, mode: str | None):
    for base in ("nvfp4", "mxfp4"):
        expected = None if mode is None else FORMATS[base if mode == "nvfp4" else mode]
        assert nemotron(name, FORMATS[base], 16) == expected
    eight = FORMATS["affine8"]
    expected = {None: None, "nvfp4": FORMATS["affine4"], "mxfp8": eight}[mode]
    assert nemotron(name, FORMATS["affine4"], 16) == expected
    assert nemotron(name, FORMATS["mxfp8"], 16) == (None if mode is None else FORMATS["mxfp8"])
    if not name.startswith("mtp."):
        assert uniform(name, FORMATS["nvfp4"], 16) == (None if mode is None else FORMATS["nvfp4"])


def test_modalities_are_kept_at_source_precision(case, tmp_path):
    """Towers of other media in a multimodal checkpoint are copied."""
    source = case("nemotron_h/mixed")
    path = tmp_path / "source"
    path.mkdir()
    wrapped = {"model_type": "NemotronH_Nano_Omni_Reasoning_V3", "llm_config": json.loads((source / "config.json").read_text())}
    (path / "config.json").write_text(json.dumps(wrapped))
    with safe_open(source / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    from safetensors.torch import save_file

    tower = "vision_model.blocks.0.attn.qkv.weight"
    found[tower] = torch.randn(64, 64, dtype=torch.bfloat16)
    save_file(found, path / "model.safetensors")
    convert(path, tmp_path / "out", mode="nvfp4", layout="modelopt")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert torch.equal(
            file.get_tensor("vision_model.blocks.0.attn.qkv.weight"), found["vision_model.blocks.0.attn.qkv.weight"]
        )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "decodegate", "convert", *arguments], capture_output=True, text=True)


def test_the_command_writes_and_says_what(llama, tmp_path):
    done = run(str(llama), str(tmp_path / "out"), "--mode", "nvfp4", "--layout", "modelopt", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["formats"] == {"nvfp4 4 bit, groups of 16": 16}
    load(tmp_path / "out")


def test_the_command_says_in_one_line_what_is_wrong(llama, tmp_path):
    done = run(str(tmp_path / "none"), str(tmp_path / "out"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    (llama / "model.safetensors").write_bytes(b"cut off")
    done = run(str(llama), str(tmp_path / "out"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "model.safetensors" in done.stderr


@pytest.mark.parametrize("option", [("--mode", "int3"), ("--layout", "awq"), ("--policy", "none"), ("--group-size", "7")])
def test_an_option_that_the_command_does_not_know_is_a_usage_error(llama, tmp_path, option):
    done = run(str(llama), str(tmp_path / "out"), *option)
    assert done.returncode == 2 and option[1] in done.stderr


@pytest.mark.parametrize(("mode", "layout"), [("mxfp8", "mlx"), ("affine4", "mlx"), ("nvfp4", "modelopt")])
def test_a_converted_model_answers_as_its_dequantised_weights_do(llama, tmp_path, mode: str, layout: str):
    convert(llama, tmp_path / "out", mode=mode, layout=layout)
    rows = []
    for held in ("packed", "unpacked"):
        checkpoint = load(tmp_path / "out", quantised=held)
        engine = Engine(family(checkpoint.model_type).Model(checkpoint.config, checkpoint.weights))
        sequence = engine.open()
        rows.append(np.array(engine.prefill(sequence, [1, 2, 3, 4, 5]).astype(mx.float32)))
    np.testing.assert_allclose(rows[0], rows[1], rtol=0, atol=1e-5 * np.abs(rows[1]).max())
