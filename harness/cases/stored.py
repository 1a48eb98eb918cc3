"""Forms in which a case's checkpoint is stored: plain, under the names of a wrapper, or quantised.

A form takes the config and the tensors under the names of the reference's `parameters`, and says what the files hold. Routers,
convolutions, norms and biases are never quantised, as in published files.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.cases import quantise

__all__ = ["FORMS", "Files", "write"]

_EMBEDDINGS = ("model.embed_tokens", "backbone.embeddings")
_HEAD = "lm_head"
_NEVER = (".gate.", ".router.", ".conv1d.", "norm")


@dataclass
class Files:
    """What the files of a checkpoint hold. `beside`: further JSON files by name."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    beside: dict[str, Any] = field(default_factory=dict)


Form = Callable[[Files], Files]


def write(form: str, config: dict[str, Any], tensors: dict[str, Tensor], directory: Path) -> None:
    """Write the checkpoint's files; `form` is one of FORMS, or empty: as it is."""
    files = Files(config, tensors)
    if form:
        files = FORMS[form](files)
    for name, value in ({"config.json": files.config} | files.beside).items():
        (directory / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")
    kept = {name: tensor.contiguous() for name, tensor in files.tensors.items()}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def _modules(tensors: dict[str, Tensor], *left_out: str) -> list[str]:
    """Modules whose weight is a matrix of a linear map, or an embedding, but for those that match."""
    names = [name.removesuffix(".weight") for name, tensor in tensors.items() if name.endswith(".weight") and tensor.ndim == 2]
    return [n for n in names if not any(part in f"{n}." for part in _NEVER) and not _matches(n, left_out)]


def _matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


def _encoded(files: Files, encoders: Mapping[str, quantise.Encoder]) -> dict[str, Tensor]:
    """The tensors with each module's weight replaced by what its encoder makes of it."""
    tensors = {name: t for name, t in files.tensors.items() if name.removesuffix(".weight") not in encoders}
    for module, encode in encoders.items():
        parts = encode(files.tensors[f"{module}.weight"])
        tensors |= {f"{module}{suffix}": part for suffix, part in parts.items()}
    return tensors


def _mlx_affine(files: Files, *, bits: int, group_size: int = 32) -> Files:
    """Every third module has 8 bits of its own, and the head stays as it is: the plan is read by module."""
    modules = _modules(files.tensors)
    plan: dict[str, Any] = {"group_size": group_size, "bits": bits}
    encoders = {module: partial(quantise.affine, group_size=group_size, bits=bits) for module in modules}
    for module in modules[1::3]:
        plan[module] = {"group_size": 64, "bits": 8}
        encoders[module] = partial(quantise.affine, group_size=64, bits=8)
    if encoders.pop(_HEAD, None):
        plan[_HEAD] = False
    return _mlx_files(files, plan, encoders)


def _mlx_mode(files: Files, *, mode: str) -> Files:
    """One module is affine, which its entry in the plan says by leaving the mode out."""
    group_size, bits = quantise.MLX_MODES[mode]
    plan: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    modules = _modules(files.tensors)
    if any(".gate." in name for name in files.tensors):  # code words of routers stand in the embedding, and want to be exact
        plan |= {name: False for name in _EMBEDDINGS if name in modules}
    encoders: dict[str, quantise.Encoder] = {m: partial(quantise.mlx, mode=mode) for m in modules if m not in plan}
    other = [module for module in encoders if module != _HEAD and module not in _EMBEDDINGS][-1]
    plan[other] = {"group_size": 64, "bits": 8}
    encoders[other] = partial(quantise.affine, group_size=64, bits=8)
    return _mlx_files(files, plan, encoders)


def _mlx_files(files: Files, plan: dict[str, Any], encoders: dict[str, Any]) -> Files:
    return Files(files.config | {"quantization": plan, "quantization_config": plan}, _encoded(files, encoders))


def _modelopt(files: Files, *, algo: str) -> Files:
    """As ModelOpt exports: the plan beside the config, with wildcards among what it excludes."""
    excluded = (*_EMBEDDINGS, _HEAD, "*.self_attn.o_proj", "*.layers.0.mixer.out_proj")
    encoder = {"NVFP4": quantise.nvfp4, "FP8": quantise.fp8, "MXFP8": quantise.mxfp8}[algo]
    plan = {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": algo,
            "kv_cache_quant_algo": None,
            "group_size": {"NVFP4": 16, "FP8": None, "MXFP8": 32}[algo],
            "exclude_modules": list(excluded),
        },
    }
    encoders = dict.fromkeys(_modules(files.tensors, *excluded), encoder)
    return Files(files.config, _encoded(files, encoders), {"hf_quant_config.json": plan})


def _modelopt_mixed(files: Files) -> Files:
    """MIXED_PRECISION in the config: MLPs and experts in NVFP4, the mixers' input in FP8, the others as they are."""
    modules = _modules(files.tensors, *_EMBEDDINGS)
    fine = [m for m in modules if m.endswith(("up_proj", "down_proj"))]
    coarse = [m for m in modules if m.endswith(("in_proj", "q_proj"))]
    layers = {m: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for m in fine} | {m: {"quant_algo": "FP8"} for m in coarse}
    plan = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": [_HEAD, "*.out_proj", "*gate*", "mtp*"],
    }
    encoders = dict.fromkeys(fine, quantise.nvfp4) | dict.fromkeys(coarse, quantise.fp8)
    return Files(files.config | {"quantization_config": plan}, _encoded(files, encoders))


def _compressed_nvfp4(files: Files) -> Files:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    plan = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [_HEAD, "re:.*self_attn.o_proj"],
    }
    modules = _modules(files.tensors, *_EMBEDDINGS, _HEAD, "*self_attn.o_proj")
    encoders = dict.fromkeys(modules, quantise.compressed_nvfp4)
    return Files(files.config | {"quantization_config": plan}, _encoded(files, encoders))


def _block_fp8(files: Files) -> Files:
    plan = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [_HEAD],
    }
    modules = _modules(files.tensors, *_EMBEDDINGS, _HEAD)
    encoders = dict.fromkeys(modules, partial(quantise.block_fp8, rows=128, columns=128))
    return Files(files.config | {"quantization_config": plan}, _encoded(files, encoders))


def _gpt_oss_mxfp4(files: Files) -> Files:
    tensors: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            tensors |= {f"{name}{suffix}": part for suffix, part in quantise.gpt_oss_mxfp4(tensor).items()}
        else:
            tensors[name] = tensor
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", _HEAD]
    return Files(files.config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}, tensors)


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts in one tensor each of up and down."""
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(up_proj|down_proj)\.weight", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[2]}", []).append(tensor)
        else:
            found[name] = tensor
    return found | {name: torch.stack(parts) for name, parts in experts.items()}


def _omni(files: Files) -> Files:
    """nemotron_h as the language model of a wrapper: nested config, prefixes, stacked experts, taps of the convolution in the
    middle."""
    text = {name: value for name, value in files.config.items() if name not in ("architectures", "torch_dtype")}
    config = {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "llm_config": text,
        "img_context_token_id": 18,
        "torch_dtype": files.config["torch_dtype"],
    }
    tensors = {
        f"language_model.{name}": tensor.transpose(1, 2) if name.endswith("conv1d.weight") else tensor
        for name, tensor in _stacked(files.tensors).items()
    }
    return Files(config, tensors)


def _gemma3_wrapper(files: Files) -> Files:
    """gemma3_text as the language model of Gemma 3 with vision: nested config, and prefixes as in published files."""
    text = {name: value for name, value in files.config.items() if name not in ("architectures", "torch_dtype")}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": files.config["torch_dtype"],
    }
    return Files(config, {f"language_model.{name}": tensor for name, tensor in files.tensors.items()})


FORMS: dict[str, Form] = {
    **{f"affine_{bits}": partial(_mlx_affine, bits=bits) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"mlx_{mode}": partial(_mlx_mode, mode=mode) for mode in quantise.MLX_MODES},
    **{f"modelopt_{algo.lower()}": partial(_modelopt, algo=algo) for algo in ("NVFP4", "FP8", "MXFP8")},
    "modelopt_mixed": _modelopt_mixed,
    "compressed_nvfp4": _compressed_nvfp4,
    "block_fp8": _block_fp8,
    "gpt_oss_mxfp4": _gpt_oss_mxfp4,
    "gemma3_wrapper": _gemma3_wrapper,
    "omni": _omni,
}
