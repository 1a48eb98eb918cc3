"""A checkpoint, as the references read it, written out as a plain directory: config.json and model.safetensors in one dtype.

Serves what cannot read the original: peers of the benchmark, and targets that take directories only, get the same
dequantised weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from reference_models import loading

__all__ = ["DTYPES", "export"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ARCHITECTURES = {"llama": "LlamaForCausalLM"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def export(source: Path, directory: Path, dtypes: Iterable[str]) -> dict[str, Path]:
    """Write `source` (directory or GGUF) once for each dtype, weights rounded to it; returns dtype -> directory/dtype.

    Raises ReferenceError where the references cannot read the source.
    """
    config, weights = loading.load(source)
    config = {name: value for name, value in config.items() if value is not None}
    if "architectures" not in config and config.get("model_type") in ARCHITECTURES:
        config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    written = {}
    for dtype in dtypes:
        written[dtype] = directory / dtype
        written[dtype].mkdir(parents=True, exist_ok=True)
        spelled = config | {"torch_dtype": dtype, "dtype": dtype}  # before and since transformers 5
        (written[dtype] / "config.json").write_text(json.dumps(spelled, indent=1) + "\n", "utf-8")
        rounded = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in weights.items()}
        save_file(rounded, written[dtype] / "model.safetensors", metadata={"format": "pt"})
        for name in TOKENIZER_FILES if source.is_dir() else ():
            if (source / name).is_file():
                shutil.copyfile(source / name, written[dtype] / name)
    return written
