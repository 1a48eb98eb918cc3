"""engine/checkpoint/{plan,patterns,residency}.py: what configs say of modules, and where weights are held."""

from __future__ import annotations

import random
import re
from typing import Any

import mlx.core as mx
import pytest

from engine.checkpoint import residency
from engine.checkpoint.packed import Packed
from engine.checkpoint.patterns import Expression, Names
from engine.checkpoint.plan import Scheme, read_plan
from engine.errors import ConfigError, Refused


def scheme(raw: dict[str, Any], module: str, hf_quant_config: dict[str, Any] | None = None) -> Scheme | None:
    plan = read_plan(raw, hf_quant_config)
    assert plan is not None
    return plan.scheme(module)


def test_a_plain_config_has_no_plan():
    assert read_plan({"model_type": "llama", "quantization_config": None}, None) is None


def test_mlx_settings_of_a_module_come_before_those_of_all():
    every = {"group_size": 64, "bits": 4, "a.b": {"group_size": 32, "bits": 8}, "a.c": False, "a.d": True}
    every |= {"a.e": {"mode": "mxfp8"}, "a.f": {"bits": 3}}
    for raw in ({"quantization": every}, {"quantization_config": every}):
        assert scheme(raw, "a.x") == scheme(raw, "a.d") == Scheme("mlx", "affine", 64, 4)
        assert scheme(raw, "a.b") == Scheme("mlx", "affine", 32, 8)
        assert scheme(raw, "a.c") is None
        assert scheme(raw, "a.e") == Scheme("mlx", "mxfp8", 32, 8)
        assert scheme(raw, "a.f") == Scheme("mlx", "affine", 64, 3)


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"), [("affine", 64, 4), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
)
def test_what_an_mlx_mode_leaves_out_is_its_default(mode: str, group_size: int, bits: int):
    assert scheme({"quantization": {"mode": mode}}, "a") == Scheme("mlx", mode, group_size, bits)


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        ("NVFP4", "nvfp4"),
        ("W4A16_NVFP4", "nvfp4"),
        ("FP8", "fp8"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8"),
        ("MXFP8", "mxfp8"),
        ("W4A16_MXFP4", "mxfp4"),
    ],
)
def test_modelopt_is_read_from_either_file(algorithm: str, mode: str):
    described = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.4.*"]}
    beside = {"producer": {"name": "modelopt"}, "quantization": described}
    inside = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.4.*"]}}
    for raw, hf in (({}, beside), (inside, None)):
        found = scheme(raw, "layers.3.up", hf)
        assert found is not None and (found.layout, found.mode) == ("modelopt", mode)
        assert scheme(raw, "lm_head", hf) is None and scheme(raw, "layers.4.up", hf) is None


def test_mixed_precision_is_by_module_or_the_one_it_lies_in():
    layers = {"a.0": {"quant_algo": "NVFP4", "group_size": 16}, "a.1.up": {"quant_algo": "FP8"}, "mtp.x": {"quant_algo": "FP8"}}
    raw = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    raw["quantization_config"]["ignore"] = ["mtp*"]
    modes = [getattr(scheme(raw, module), "mode", None) for module in ("a.0", "a.0.up", "a.1.up", "a.1", "b", "mtp.x")]
    assert modes == ["nvfp4", "nvfp4", "fp8", None, None, None]


def test_compressed_tensors_groups_have_targets():
    fp4 = {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "group_size": 16}, "format": "nvfp4-pack-quantized"}
    fp8 = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}, "format": "float-quantized"}
    block = {"quant_method": "compressed-tensors", "format": "mixed", "config_groups": {"group_0": fp4, "group_1": fp8}}
    block["ignore"] = ["lm_head", "re:.*gate$"]
    raw = {"quantization_config": block}
    modules = ("l.experts.0.up", "l.q_proj", "lm_head", "l.experts.gate", "l.gate_proj")
    assert [getattr(scheme(raw, module), "mode", None) for module in modules] == ["nvfp4", "fp8", None, None, "fp8"]


def test_names_match_modules_inside_listed_ones_and_no_longer_names():
    names = Names(["a.b", "*.gate", "model.layers.?.x", "re:.*norm"], "ignore")
    assert all(name in names for name in ("a.b", "a.b.c", "m.gate", "m.gate.x", "model.layers.1.x.y", "m.norm_f"))
    assert not any(name in names for name in ("a.bc", "a", "m.gate_proj", "model.layers.10.x", "gate"))


EXPRESSIONS = [
    ".*lm_head", "re", ".*mlp.gate$", r"model\.layers\.(0|1|12)\..*", ".*self_attn.(q|k|v)_proj$", "vision.*", "^model.*$",
    "a?b*c+", r"[^.]+\.x$", "(a|b)(c|)d", "x|y.*z$", "a$|b", ".*?q$", ".*a.*b.*c$", "a(b|c$)d?", "(?:a|bc)d", r"\w+\.\d",
    "[]a]b",
]  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_match_as_re_does(text: str):
    drawn = random.Random(0)
    names = ["".join(drawn.choice("abcdxyz.q0]") for _ in range(drawn.randint(0, 7))) for _ in range(400)]
    names += ["lm_head", "model.lm_head.x", "model.layers.1.mlp.gate", "model.layers.12.q", "m.self_attn.q_proj", "vision"]
    expression = Expression(text, "ignore")
    for name in names:
        assert expression.matches(name) == bool(re.match(text, name)), name


@pytest.mark.parametrize("text", ["(a+)+$", "(?=a)b", "a{9}", "(a", "a)", "[a", r"\Z", "*a", "a|*", r"(a)\1", "(a|b){2}"])
def test_expressions_beyond_the_supported_part_are_refused(text: str):
    with pytest.raises(Refused, match="ignore"):
        Expression(text, "ignore")


def test_an_expression_that_would_backtrack_for_years_is_answered_at_once():
    expression = Expression(".*a.*a.*a.*a.*a.*a.*a.*a.*a.*a.*b$", "ignore")
    assert not expression.matches("a" * 500)
    glob = Names(["*a" * 40 + "*b"], "ignore")
    assert "a" * 500 not in glob


def test_alternatives_are_bounded():
    with pytest.raises(Refused, match="alternatives"):
        Expression("(a|b)" * 20, "ignore")


@pytest.mark.parametrize("patterns", [{"a": 1}, "a", [1], [""], ["a" * 257], ["*a"] * 1025, ["re:a"] * 129])
def test_a_list_of_modules_is_a_list_of_short_texts(patterns: Any):
    with pytest.raises(ConfigError, match="exclude"):
        Names(patterns, "exclude")


def parameter(outputs: int, inputs: int, mode: str = "nvfp4") -> Packed:
    group_size, bits = {"nvfp4": (16, 4), "mxfp8": (32, 8), "affine": (64, 4)}[mode]
    return Packed("x.weight", Scheme("mlx", mode, group_size, bits), (outputs, inputs), {}, False)


@pytest.fixture
def on_a_cpu() -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("a CPU's choice")


@pytest.mark.parametrize(("slow", "fast", "held"), [(5.0, 1.0, True), (1.0, 5.0, False)])
def test_weights_stay_packed_where_their_product_is_faster(on_a_cpu, monkeypatch, slow: float, fast: float, held: bool):
    def seconds(x: mx.array, weight: Any) -> float:
        return fast if isinstance(weight, mx.array) else slow

    monkeypatch.setattr(residency, "_seconds", seconds)
    kinds, notes = residency.unpacked({"x.weight": parameter(512, 512)}, "float32")
    assert (kinds == {("nvfp4", 16, 4)}) == held
    assert f"held {'unpacked in float32' if held else 'packed'}" in notes[0] and "1 row of 512 x 512" in notes[0]


def test_weights_that_are_faster_packed_for_one_row_only_are_unpacked(on_a_cpu, monkeypatch):
    def seconds(x: mx.array, weight: Any) -> float:
        return (1.0 if x.shape[0] == 1 else 2.0) if isinstance(weight, mx.array) else (0.5 if x.shape[0] == 1 else 40.0)

    monkeypatch.setattr(residency, "_seconds", seconds)
    assert residency.unpacked({"x.weight": parameter(512, 512)}, "float32")[0]


def test_each_format_is_decided_by_itself_and_by_the_shape_that_has_most_values(on_a_cpu, monkeypatch):
    timed = []

    def seconds(x: mx.array, weight: Any) -> float:
        timed.append(tuple(weight.shape))
        return 1.0

    monkeypatch.setattr(residency, "_seconds", seconds)
    packed = {"a": parameter(256, 256), "b": parameter(256, 512), "c": parameter(256, 256), "d": parameter(512, 256)}
    packed |= {"e": parameter(512, 256), "f": parameter(8192, 1024, "mxfp8"), "g": parameter(32, 64, "affine")}
    kinds, notes = residency.unpacked(packed, "float32")
    assert set(timed) == {(512, 256), (1024, 1024)}  # of a large matrix its first rows
    assert len(notes) == 3 and kinds == {("nvfp4", 16, 4), ("mxfp8", 32, 8)}


def test_a_real_measurement_is_short_and_says_its_numbers(on_a_cpu):
    _, notes = residency.unpacked({"x.weight": parameter(512, 512)}, "float32")
    assert re.search(r"1 row of 512 x 512 take [\d.e+-]+ ms unpacked, [\d.e+-]+ ms packed, 32 rows", notes[0])


def test_weights_that_do_not_fit_stay_packed(on_a_cpu, monkeypatch):
    class Memory:
        available = 1 << 20

    monkeypatch.setattr(residency.psutil, "virtual_memory", lambda: Memory)
    kinds, notes = residency.unpacked({"x.weight": parameter(1024, 1024)}, "float32")
    assert not kinds and "GiB are free" in notes[0]


def test_a_checkpoint_without_mlx_formats_has_nothing_to_decide():
    fp8 = Packed("x.weight", Scheme("modelopt", "fp8"), (64, 64), {}, False)
    assert residency.unpacked({"x.weight": fp8}, "float32") == (set(), [])
