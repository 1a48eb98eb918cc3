"""What a checkpoint's config says of the format of each module's weight.

| written in | by |
|---|---|
| config.json `quantization` (or `quantization_config` without quant_method) | MLX |
| hf_quant_config.json, or config.json `quantization_config` with quant_method modelopt | NVIDIA ModelOpt |
| `quantization_config` with quant_method compressed-tensors | llm-compressor |
| `quantization_config` with quant_method fp8 and blocks | DeepSeek, LongCat and others |
| `quantization_config` with quant_method mxfp4 | gpt-oss |

A plan does not say which modules there are: embeddings, norms and convolutions are plain without being listed. What it says of
a module that is packed in the files must be what the files hold (engine.checkpoint.packed compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.bounded import shown
from engine.checkpoint.patterns import Names
from engine.errors import ConfigError, Refused
from engine.fields import Fields
from engine.layers.quantised import MODES

__all__ = ["PLAIN", "Plan", "Scheme", "read_plan"]

MAX_GROUP = 1 << 16
MAX_GROUPS = 64
MAX_MODULES = 1 << 17  # published lists of mixed precision have 6,000


@dataclass(frozen=True)
class Scheme:
    """The format of one module's weight.

    layout: whose names and byte order the files use: mlx, modelopt, compressed-tensors, fp8 or gpt-oss. mode: one of MLX's, or
    fp8 (e4m3 with a scale for the tensor or each row) or fp8-block (a scale for each block), which MLX has no product for.
    block: rows and columns of such a block.
    """

    layout: str
    mode: str
    group_size: int = 0
    bits: int = 8
    block: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"{self.layout} {self.mode}"


PLAIN = None  # the scheme of a module that the plan leaves as it is


@dataclass(frozen=True)
class Plan:
    """source: the field or file that it was read from. scheme(module): the module's Scheme, or PLAIN."""

    source: str
    scheme: Callable[[str], Scheme | None]


def read_plan(raw: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Plan | None:
    """The plan of config.json and, where there is one, hf_quant_config.json; None for a plain checkpoint.

    Raises ConfigError for a field that is out of bounds, Refused for a method or algorithm that is not supported.
    """
    for name in ("quantization", "quantization_config", "compression_config"):
        if raw.get(name) is not None and not isinstance(raw[name], Mapping):
            raise ConfigError(f"config field {name} must be an object (got {shown(raw[name])})")
    mlx, block = raw.get("quantization"), raw.get("quantization_config") or raw.get("compression_config")
    if mlx is None and block is not None and block.get("quant_method") is None:
        mlx, block = block, None
    if mlx is not None:
        return _mlx(Fields(mlx, "quantization."))
    if hf_quant_config is not None:
        return _modelopt(Fields(hf_quant_config, "hf_quant_config.json: ").section("quantization"), "hf_quant_config.json")
    if block is None:
        return None
    fields = Fields(block, "quantization_config.")
    method = fields.choice("quant_method", tuple(_METHODS))
    return _METHODS[method](fields, "quantization_config")


def _format(fields: Fields, default: Scheme | None) -> Scheme:
    """mode, group_size and bits as MLX writes them; what is left out is the mode's own default."""
    mode = fields.choice("mode", tuple(MODES), default.mode if default else "affine")
    known = MODES[mode]
    usual = default if default is not None and default.mode == mode else _usual(mode)
    group_size = fields.integer("group_size", 1, MAX_GROUP, usual.group_size)
    if group_size not in known.group_sizes:
        raise fields.error("group_size", f"must be {_or(known.group_sizes)} for mode {mode}")
    bits = fields.integer("bits", 1, 32, usual.bits)
    if bits not in known.bits:
        raise fields.error("bits", f"must be {_or(known.bits)} for mode {mode}")
    return Scheme("mlx", mode, group_size, bits)


def _usual(mode: str) -> Scheme:
    """MLX's defaults."""
    return (
        Scheme("mlx", mode, 64, 4) if mode == "affine" else Scheme("mlx", mode, MODES[mode].group_sizes[0], MODES[mode].bits[0])
    )


def _mlx(fields: Fields) -> Plan:
    every = _format(fields, None)
    modules: dict[str, Scheme | None] = {}
    for name, value in fields.raw.items():
        if name in ("group_size", "bits", "mode"):
            continue
        if isinstance(value, Mapping):
            modules[name] = _format(fields.section(name), None)
        elif isinstance(value, bool):
            modules[name] = every if value else PLAIN
        else:
            raise fields.error(name, "must be true, false or an object")
    return Plan("quantization", lambda module: modules.get(module, every))


# ModelOpt's algorithms; W4A16 and the like say what is done to activations, which an engine of plain activations does not do.
_ALGORITHMS = {
    "NVFP4": Scheme("modelopt", "nvfp4", 16, 4),
    "W4A16_NVFP4": Scheme("modelopt", "nvfp4", 16, 4),
    "FP8": Scheme("modelopt", "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("modelopt", "fp8"),
    "MXFP8": Scheme("modelopt", "mxfp8", 32, 8),
    "W4A16_MXFP4": Scheme("modelopt", "mxfp4", 32, 4),
    "W4A8_MXFP4_FP8": Scheme("modelopt", "mxfp4", 32, 4),
}
MIXED = "MIXED_PRECISION"


def _modelopt(fields: Fields, source: str) -> Plan:
    excluded_field = "exclude_modules" if fields.has("exclude_modules") else "ignore"
    excluded = Names(fields.raw.get(excluded_field), f"{fields.prefix}{excluded_field}")
    algorithm = fields.choice("quant_algo", (*_ALGORITHMS, MIXED))
    if algorithm != MIXED:
        every = _algorithm(fields)
        return Plan(source, lambda module: PLAIN if module in excluded else every)
    listed = fields.section("quantized_layers")
    if len(listed.raw) > MAX_MODULES:
        raise listed.error("quantized_layers", f"must list at most {MAX_MODULES} modules")
    modules = {name: _algorithm(listed.section(name)) for name in listed.raw}
    return Plan(source, lambda module: PLAIN if module in excluded else _nearest(modules, module))


def _nearest(modules: Mapping[str, Scheme], module: str) -> Scheme | None:
    """Of the module, or of the one that it lies in."""
    while module:
        if module in modules:
            return modules[module]
        module = module.rpartition(".")[0]
    return PLAIN


def _algorithm(fields: Fields) -> Scheme:
    scheme = _ALGORITHMS[fields.choice("quant_algo", tuple(_ALGORITHMS))]
    _declared(fields, "group_size", scheme.group_size)
    return scheme


def _declared(fields: Fields, name: str, needed: int) -> None:
    """A number that follows from the format: where the config gives it, it must be that one."""
    value = fields.integer(name, 1, MAX_GROUP, None)
    if value is not None and needed and value != needed:
        raise fields.error(name, f"must be {needed} in this format")


_PACKINGS = {"nvfp4-pack-quantized": ("nvfp4", 4, 16), "float-quantized": ("fp8", 8, 0)}


def _compressed_tensors(fields: Fields, source: str) -> Plan:
    groups = fields.section("config_groups")
    if not 1 <= len(groups.raw) <= MAX_GROUPS:
        raise fields.error("config_groups", f"must have 1 to {MAX_GROUPS} groups")
    schemes = [_group(fields, groups.section(name)) for name in groups.raw]
    ignored = Names(fields.raw.get("ignore"), f"{fields.prefix}ignore")

    def scheme(module: str) -> Scheme | None:
        if module in ignored:
            return PLAIN
        return next((scheme for targets, scheme in schemes if "Linear" in targets.plain or module in targets), PLAIN)

    return Plan(source, scheme)


def _group(fields: Fields, group: Fields) -> tuple[Names, Scheme]:
    """A group of modules: named, or all that are of class Linear."""
    mode, bits, group_size = _PACKINGS[(group if group.has("format") else fields).choice("format", tuple(_PACKINGS))]
    weights = group.section("weights")
    _declared(weights, "num_bits", bits)
    _declared(weights, "group_size", group_size)
    weights.choice("type", ("float",), "float")
    strategies = ("tensor_group",) if mode == "nvfp4" else ("tensor", "channel")
    weights.choice("strategy", strategies, strategies[0])
    targets = Names(group.raw.get("targets"), f"{group.prefix}targets")
    return targets, Scheme("compressed-tensors", mode, group_size, bits)


def _fp8(fields: Fields, source: str) -> Plan:
    fields.choice("fmt", ("e4m3",), "e4m3")
    block = fields.raw.get("weight_block_size")
    if block is None:
        raise Refused(f"config field {fields.prefix}weight_block_size is missing: FP8 without blocks is not supported here")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 1 <= n <= MAX_GROUP for n in block):
        raise fields.error("weight_block_size", f"must be two integers from 1 to {MAX_GROUP}")
    scheme = Scheme("fp8", "fp8-block", block=(block[0], block[1]))
    plain = Names(fields.raw.get("modules_to_not_convert"), f"{fields.prefix}modules_to_not_convert")
    return Plan(source, lambda module: PLAIN if module in plain else scheme)


def _mxfp4(fields: Fields, source: str) -> Plan:
    plain = Names(fields.raw.get("modules_to_not_convert"), f"{fields.prefix}modules_to_not_convert")
    scheme = Scheme("gpt-oss", "mxfp4", 32, 4)
    return Plan(source, lambda module: PLAIN if module in plain else scheme)


_METHODS: dict[str, Callable[[Fields, str], Plan]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _or(numbers: tuple[int, ...]) -> str:
    return " or ".join(str(number) for number in numbers)
