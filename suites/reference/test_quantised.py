"""Quantised bytes decode to what their formats say: against mlx where it has the format, by hand where it does not."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness import cases
from harness.cases import build, quantise, stored
from reference_models.loading import load
from reference_models.quantised import E2M1, E4M3, E8M0, decoded, unpacked
from reference_models.recompute import ReferenceError


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def from_mlx(array: mx.array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def to_mlx(tensor: torch.Tensor) -> mx.array:
    return mx.array(tensor.numpy())


def test_tables_hold_every_code():
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(E4M3, codes.view(torch.float8_e4m3fn).double(), rtol=0, atol=0, equal_nan=True)
    assert float(E4M3[0x7E]) == 448 and math.isnan(E4M3[0x7F])
    assert float(E8M0[127]) == 1 and float(E8M0[0]) == 2.0**-127 and math.isnan(E8M0[255])
    np.testing.assert_array_equal(np.array(mx.from_fp8(mx.array(codes[:127].numpy()), mx.float32)), E4M3[:127].float().numpy())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing_is_a_stream_of_codes_lowest_bit_first(bits):
    codes = torch.randint(0, 2**bits, (3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    octets = quantise.packed(codes, bits)
    assert octets.shape == (3, 8 * bits)
    assert torch.equal(unpacked(octets, bits), codes)
    whole = sum(int(code) << (bits * i) for i, code in enumerate(codes[0]))
    assert int.from_bytes(bytes(octets[0].tolist()), "little") == whole


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_affine_decodes_as_mlx_does(bits, group_size):
    packed, scales, biases = mx.quantize(to_mlx(drawn(6, 256)), group_size=group_size, bits=bits)
    theirs = from_mlx(mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits))
    tensors = {"m.weight": from_mlx(packed), "m.scales": from_mlx(scales), "m.biases": from_mlx(biases)}
    ours = decoded({"quantization": {"group_size": group_size, "bits": bits}}, tensors)
    assert list(ours) == ["m.weight"]
    torch.testing.assert_close(ours["m.weight"], theirs.double(), rtol=0, atol=5e-7)  # mlx rounds to float32


@pytest.mark.parametrize("mode", quantise.MLX_MODES)
def test_mlx_modes_decode_as_mlx_does_bit_by_bit(mode):
    group_size, bits = quantise.MLX_MODES[mode]
    packed, scales = mx.quantize(to_mlx(drawn(2, 6, 256)), mode=mode, group_size=group_size, bits=bits)
    theirs = from_mlx(mx.dequantize(packed, scales, mode=mode, group_size=group_size, bits=bits).astype(mx.float32))
    ours = decoded({"quantization": {"mode": mode}}, {"m.weight": from_mlx(packed), "m.scales": from_mlx(scales)})
    assert torch.equal(ours["m.weight"], theirs.double())


@pytest.mark.parametrize("mode", quantise.MLX_MODES)
def test_our_encoder_writes_what_mlx_reads(mode):
    group_size, bits = quantise.MLX_MODES[mode]
    weight = drawn(8, 128)
    parts = quantise.mlx(weight, mode)
    packed, scales = (to_mlx(parts[part]) for part in (".weight", ".scales"))
    theirs = from_mlx(mx.dequantize(packed, scales, mode=mode, group_size=group_size, bits=bits).astype(mx.float32))
    ours = decoded({"quantization": {"mode": mode}}, {f"m{suffix}": part for suffix, part in parts.items()})["m.weight"]
    assert torch.equal(ours, theirs.double())
    assert (ours - weight).square().mean().sqrt() < {"mxfp4": 0.2, "mxfp8": 0.05, "nvfp4": 0.15}[mode]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_our_affine_encoder_writes_what_mlx_reads(bits):
    weight = drawn(8, 128)
    parts = quantise.affine(weight, 32, bits)
    theirs = from_mlx(mx.dequantize(*(to_mlx(parts[p]) for p in (".weight", ".scales", ".biases")), group_size=32, bits=bits))
    ours = decoded({"quantization": {"group_size": 32, "bits": bits}}, {f"m{s}": part for s, part in parts.items()})["m.weight"]
    torch.testing.assert_close(ours, theirs.double(), rtol=0, atol=5e-7)
    assert (ours - weight).abs().max() < 1.1 * float(parts[".scales"].max()) / 2 + 0.02


@pytest.mark.parametrize(
    ("encode", "most"),
    [
        (quantise.nvfp4, 0.15),
        (quantise.compressed_nvfp4, 0.15),
        (quantise.mxfp8, 0.05),
        (quantise.fp8, 0.05),
        (lambda w: quantise.block_fp8(w, 128, 128), 0.05),
    ],
)
def test_published_layouts_decode_near_what_was_encoded(encode, most):
    weight = drawn(160, 192)
    parts = {f"m{suffix}": part for suffix, part in encode(weight).items()}
    ours = decoded({}, parts)
    assert list(ours) == ["m.weight"] and ours["m.weight"].dtype is torch.float64
    assert (ours["m.weight"] - weight).square().mean().sqrt() < most


def test_nvfp4_by_hand():
    codes = torch.tensor([[0x21, 0xF7] + [0] * 6, [0x0A] * 8], dtype=torch.uint8)  # 0.5 1 | 6 -6; -1 0 ...
    scales = torch.tensor([[2.0], [0.5]]).to(torch.float8_e4m3fn)
    tensors = {
        "m.weight": codes,
        "m.weight_scale": scales,
        "m.weight_scale_2": torch.tensor(0.25),
        "m.input_scale": torch.ones(()),
    }
    found = decoded({}, tensors)["m.weight"]
    assert found[0, :4].tolist() == [0.25, 0.5, 3.0, -3.0] and found[1, :2].tolist() == [-0.125, 0]
    whole = {"m.weight_packed": codes, "m.weight_scale": scales, "m.weight_global_scale": torch.tensor([4.0])}
    assert torch.equal(decoded({}, whole)["m.weight"], found)  # the reciprocal of 0.25


def test_a_scale_for_each_expert_is_its_own():
    codes = torch.full((3, 2, 8), 0x22, dtype=torch.uint8)
    tensors = {
        "experts.up_proj": codes,
        "experts.up_proj_scale": torch.ones(3, 2, 1).to(torch.float8_e4m3fn),
        "experts.up_proj_scale_2": torch.tensor([1.0, 2.0, 4.0]),
    }
    assert decoded({}, tensors)["experts.up_proj"][:, 0, 0].tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    "scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5, 0.25]), torch.tensor([[0.5], [0.25]])]
)
def test_fp8_has_one_scale_or_one_a_row(scale):
    weight = torch.tensor([[1.0, -2.0], [4.0, 448.0]]).to(torch.float8_e4m3fn)
    rows = [0.5, float(scale.flatten()[-1])]
    expected = torch.tensor([[1.0 * rows[0], -2.0 * rows[0]], [4.0 * rows[1], 448.0 * rows[1]]], dtype=torch.float64)
    assert torch.equal(decoded({}, {"m.weight": weight, "m.weight_scale": scale})["m.weight"], expected)


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_a_byte_for_32_values_is_an_exponent_under_either_name(suffix):
    weight = torch.ones(2, 64).to(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 128], [126, 120]], dtype=torch.uint8)
    found = decoded({}, {"m.weight": weight, f"m.weight{suffix}": scales})["m.weight"]
    assert found[:, ::32].tolist() == [[1, 2], [0.5, 2.0**-7]]


def test_blocks_of_fp8_end_at_the_edge_and_have_the_size_of_the_config():
    weight = torch.ones(5, 7).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 7.0).reshape(2, 3)
    config = {"quantization_config": {"weight_block_size": [3, 3]}}
    found = decoded(config, {"m.weight": weight, "m.weight_scale_inv": scale})["m.weight"]
    assert found[:, [0, 2, 3, 6]].tolist() == [[1, 1, 2, 3]] * 3 + [[4, 4, 5, 6]] * 2
    with pytest.raises(ReferenceError, match="weight_scale_inv"):
        decoded({}, {"m.weight": weight, "m.weight_scale_inv": scale})


def test_gpt_oss_blocks_are_transposed_experts():
    experts = drawn(2, 64, 6)
    parts = {f"x.gate_up_proj{suffix}": part for suffix, part in quantise.gpt_oss_mxfp4(experts).items()}
    assert parts["x.gate_up_proj_blocks"].shape == (2, 6, 2, 16) and parts["x.gate_up_proj_scales"].shape == (2, 6, 2)
    found = decoded({}, parts)
    assert list(found) == ["x.gate_up_proj"] and found["x.gate_up_proj"].shape == (2, 64, 6)
    assert (found["x.gate_up_proj"] - experts).square().mean().sqrt() < 0.2


@pytest.mark.parametrize(
    ("config", "changes", "match"),
    [
        ({}, {}, "quantization"),
        ({"quantization": {"group_size": 32, "bits": 7}}, {}, "bits 7"),
        ({"quantization": {"group_size": 64, "bits": 4}}, {}, "do not fit"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "nf4"}}, {}, "nf4"),
        ({"quantization": {"group_size": 32, "bits": 4}}, {"m.biases": None}, "biases"),
        ({"quantization": {"group_size": 32, "bits": 4}}, {"m.scales": None}, "belongs to no quantised module"),
    ],
)
def test_a_module_that_cannot_be_decoded_is_named(config, changes, match):
    parts = {f"m{suffix}": part for suffix, part in quantise.affine(drawn(4, 64), 32, 4).items()}
    left = {name: part for name, part in (parts | changes).items() if part is not None}
    with pytest.raises(ReferenceError, match=match):
        decoded(config, left)


def test_a_float8_weight_without_a_scale_is_an_error():
    with pytest.raises(ReferenceError, match=r"m\.weight"):
        decoded({}, {"m.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)})
    with pytest.raises(ReferenceError, match="weight_global_scale"):
        decoded({}, {"m.weight_packed": torch.zeros(2, 8, dtype=torch.uint8), "m.weight_scale": torch.ones(2, 1)})


STORED = [case for case in cases.all_cases() if case.stored]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.id)
def test_a_stored_case_loads_under_the_names_of_the_plain_one(case, tmp_path):
    _, weights = load(build.build(case, 0, tmp_path))
    plain = build.drawn(case, 0)
    assert {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in plain.items()}
    quantised = {n for n in weights if weights[n].dtype is torch.float64}
    assert bool(quantised) == (case.stored not in ("omni", "gemma3_wrapper"))
    for name in weights:
        error = (weights[name].double() - plain[name].double()).square().mean().sqrt() / plain[
            name
        ].double().square().mean().sqrt()
        assert error > 1e-4 if name in quantised else error == 0, name
        assert error < (0.5 if case.stored == "affine_2" else 0.25), name


def test_every_form_has_a_case():
    assert {case.stored for case in STORED} == stored.FORMS.keys()


def test_the_plan_by_module_is_in_the_file_of_the_affine_cases(tmp_path):
    directory = build.build(cases.find("llama/affine_3"), 0, tmp_path)
    plan = json.loads((directory / "config.json").read_text())["quantization"]
    assert plan["bits"] == 3 and plan["lm_head"] is False
    assert sum(isinstance(value, dict) and value["bits"] == 8 for value in plan.values()) >= 2


def test_a_quantised_file_that_lost_its_scales_is_an_error(tmp_path):
    directory = build.build(cases.find("llama/modelopt_nvfp4"), 0, tmp_path)
    tensors = {n: t for n, t in load_file(directory / "model.safetensors").items() if not n.endswith("up_proj.weight_scale")}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ReferenceError, match=r"up_proj\.weight"):
        load(directory)
