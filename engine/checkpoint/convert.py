"""A checkpoint directory into a quantised one: config, tokenizer and templates as they are, weights by a policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine import models
from engine.checkpoint import directory, hub
from engine.checkpoint.bounded import MAX_CONFIG_BYTES, read_bounded, read_json, shown
from engine.checkpoint.loading import model_type_of
from engine.checkpoint.pack import Part, pack, parts
from engine.checkpoint.plan import read_plan
from engine.checkpoint.policy import POLICIES, Format, quantisation_format
from engine.checkpoint.read import read_tensor
from engine.checkpoint.tensors import TensorHeader
from engine.checkpoint.weights import account_for, completed
from engine.checkpoint.write import Writer
from engine.errors import CheckpointError, Refused

__all__ = ["Converted", "convert"]

COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json", "preprocessor_config.json",
)  # fmt: skip
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ALGORITHMS = {"nvfp4": "NVFP4", "mxfp8": "MXFP8"}


@dataclass
class Converted:
    """What was written. formats: module -> its format; unaligned: modules whose rows are no whole groups, kept as they were."""

    bytes_before: int = 0
    bytes_after: int = 0
    formats: dict[str, Format] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    unaligned: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Job:
    """A matrix to pack. module: its name in the files; swapped: it lies there as [.., in, out]."""

    header: TensorHeader
    module: str
    form: Format
    swapped: bool
    parts: tuple[Part, ...]

    def name(self, end: str) -> str:
        return f"{self.module}{end}"


def convert(
    source: str | Path,
    out: Path,
    *,
    mode: str,
    layout: str = "mlx",
    policy: str | None = None,
    group_size: int | None = None,
) -> Converted:
    """Read a plain checkpoint (directory or hub id) and write a quantised one into `out`, a new or empty directory.

    mode: see quantisation_format. layout: "mlx" (`.weight`, `.scales`, `.biases`; config field `quantization`), "modelopt"
    (`.weight`, `.weight_scale`, `.weight_scale_2`; hf_quant_config.json), or "gpt-oss" (the experts of that family as it is
    published: `_blocks`, `_scales`), which the two others leave as they are. policy: one of POLICIES; None is nemotron for
    nemotron_h, else uniform. One matrix is in memory at a time. Raises CheckpointError, ConfigError, Refused.
    """
    base = quantisation_format(mode, group_size)
    path = Path(source)
    if not path.exists() and hub.is_hub_id(str(source)):
        path = hub.snapshot(str(source))
    if not path.is_dir():
        raise CheckpointError(f"{shown(str(source), 200)} is no directory with config.json and safetensors, and no hub id")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is no empty directory; name another, or remove it")
    raw = read_json(path / "config.json", MAX_CONFIG_BYTES)
    model_type = model_type_of(raw)
    chosen = policy or ("nemotron" if model_type == "nemotron_h" else "uniform")
    if chosen not in POLICIES:
        raise Refused(f"policy {chosen!r:.80} is not supported (supported: {', '.join(POLICIES)})")
    if read_plan(raw, directory.hf_quant_config(path)) is not None:
        raise Refused("the checkpoint is quantised already; convert the one that it was made from")
    headers = directory.tensor_headers(path)
    jobs, done = _jobs(models.family(model_type), raw, headers, base, layout, chosen)
    if not jobs:
        why = "; layout gpt-oss is for the experts of that family alone" if layout == "gpt-oss" else ""
        raise Refused(f"no weight of the checkpoint can be held in {mode} with groups of {base.group_size}{why}")
    out.mkdir(parents=True, exist_ok=True)
    _write_tensors(out / "model.safetensors", headers, jobs, layout)
    _write_config(path, out, layout, base, done)
    for name in COPIED:
        if (path / name).is_file():
            shutil.copyfile(path / name, out / name)
    done.bytes_before = sum(header.nbytes for header in headers.values())
    done.bytes_after = (out / "model.safetensors").stat().st_size
    return done


def _jobs(
    family: Any, raw: Mapping[str, Any], headers: Mapping[str, TensorHeader], base: Format, layout: str, policy: str
) -> tuple[dict[str, _Job], Converted]:
    """The matrices to pack, by the name of their tensor; accounted for as in loading."""
    config = completed(family, family.Config.from_dict(raw), headers, None)
    accounted = account_for(family, config, headers)
    keep_float32 = getattr(family, "keep_float32", lambda name: False)
    inputs_first = getattr(family, "inputs_first", lambda name: False)
    layers = len({name.split("layers.")[1].split(".")[0] for name in accounted.parameters if _in_trunk(name)})
    jobs: dict[str, _Job] = {}
    done = Converted()
    for name, header in accounted.plain.items():
        parameter = accounted.duplicates.get(name, name)
        if parameter not in accounted.parameters or len(header.shape) < 2:
            continue
        module = header.name.removesuffix(".weight")
        form = None if keep_float32(parameter) else POLICIES[policy](parameter, base, layers)
        swapped = inputs_first(parameter)
        shape = (*header.shape[:-2], header.shape[-1], header.shape[-2]) if swapped else header.shape
        if form is None or swapped != (layout == "gpt-oss"):
            done.plain.append(module)
        elif not form.fits(shape[-1]):
            done.unaligned.append(module)
        else:
            scale_dtype = header.dtype
            jobs[header.name] = _Job(header, module, form, swapped, parts(layout, form, shape, scale_dtype))
            done.formats[module] = form
    return jobs, done


def _in_trunk(name: str) -> bool:
    return "layers." in name and not name.startswith("mtp.")


def _write_tensors(path: Path, headers: Mapping[str, TensorHeader], jobs: Mapping[str, _Job], layout: str) -> None:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, header in headers.items():
        job = jobs.get(name)
        written = {name: (header.dtype, header.shape)}
        if job is not None:
            written = {job.name(part.end): (part.dtype, part.shape) for part in job.parts}
        for new in written:
            if new in tensors:
                raise CheckpointError(f"tensor {shown(new)} would be written twice; {shown(name)} cannot be packed")
        tensors |= written
    with Writer(path, tensors) as writer:
        for name, header in headers.items():
            job = jobs.get(name)
            if job is None:
                with header.file.open("rb") as file:
                    file.seek(header.offset)
                    writer.write(name, file.read(header.nbytes))
                continue
            values = read_tensor(header, _DTYPES[header.dtype])
            packed = pack(layout, job.form, values.swapaxes(-1, -2) if job.swapped else values, name)
            for end, data in packed.items():
                writer.write(job.name(end), data)
            mx.clear_cache()


def _write_config(source: Path, out: Path, layout: str, base: Format, done: Converted) -> None:
    raw = json.loads(read_bounded(source / "config.json", MAX_CONFIG_BYTES))  # in the spelling that it has
    if layout == "mlx":
        plan: dict[str, Any] = {"group_size": base.group_size, "bits": base.bits, "mode": base.mode}
        for module, form in done.formats.items():
            if form != base:
                plan[module] = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
        plan |= {module: False for module in (*done.plain, *done.unaligned)}
        raw |= {"quantization": plan, "quantization_config": plan}
    elif layout == "gpt-oss":
        raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": sorted(done.plain)}
    else:
        _write_json(out / "hf_quant_config.json", _hf_quant_config(base, done))
    _write_json(out / "config.json", raw)


def _hf_quant_config(base: Format, done: Converted) -> dict[str, Any]:
    excluded = sorted((*done.plain, *done.unaligned))
    described: dict[str, Any] = {"quant_algo": _ALGORITHMS[base.mode], "group_size": base.group_size}
    if any(form != base for form in done.formats.values()):
        described = {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                module: {"quant_algo": _ALGORITHMS[form.mode], "group_size": form.group_size}
                for module, form in done.formats.items()
            },
        }
    described |= {"kv_cache_quant_algo": None, "exclude_modules": excluded}
    return {"producer": {"name": "decodegate"}, "quantization": described}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
