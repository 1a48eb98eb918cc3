"""Checkpoints for the references: a directory of config.json and safetensors, or one GGUF file, into torch tensors.

A path of its own, so that a fault in the engine's loader shows: safetensors and GGUF are read, dequantised and renamed here
with the formats' own packages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import reference_models
from reference_models import gguf_checkpoint, quantised
from reference_models.recompute import ReferenceError

__all__ = ["load"]

MAX_CONFIG_BYTES = 4 << 20


def load(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the tensors under the names of the family's `parameters`; ReferenceError names file and field.

    Tensors have the file's dtype (safetensors), float64 (what was quantised there) or float32 (GGUF).
    """
    path = Path(path)
    try:
        return gguf_checkpoint.load(path) if path.is_file() else _directory(path)
    except (OSError, SafetensorError) as error:
        raise ReferenceError(f"cannot read checkpoint {path.name}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ReferenceError(f"{path.name} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ReferenceError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ReferenceError(f"{path.name} must hold an object (got {type(value).__name__})")
    return value


def _directory(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = _json(path / "config.json")
    weights: dict[str, torch.Tensor] = {}
    for name in _files(path):
        weights.update(load_file(path / name))
    weights = quantised.decoded(config, weights)
    renamed = getattr(_reference(config), "renamed", None)
    return config, weights if renamed is None else renamed(config, weights)


def _reference(config: dict[str, Any]) -> object:
    try:
        return reference_models.find(reference_models.model_type(config))
    except ReferenceError:  # the names of an unknown family are as they are; whoever recomputes it is told
        return None


def _files(path: Path) -> list[str]:
    """The one file of a checkpoint goes before an index, which may be left over; a single file may have any name."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not index.is_file():
        found = sorted(file.name for file in path.glob("*.safetensors"))
        if len(found) != 1:
            raise ReferenceError(f"{path.name} has {len(found)} safetensors files and no {index.name}")
        return found
    shards = _json(index).get("weight_map")
    names = list(shards.values()) if isinstance(shards, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ReferenceError(f"{index.name}: 'weight_map' must map to file names beside it (got {shards!r:.80})")
    return sorted(set(names))
