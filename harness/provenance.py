"""The header of a record file: what a reviewer needs to know to trust a run, or to repeat it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from harness.records import Header

__all__ = ["header"]

# Environment variables that change numbers, by prefix or name; those of the device lock do not, and one holds its proof.
NUMERIC = ("DECODEGATE_", "MLX_", "MKL_", "OMP_", "OPENBLAS_", "CUBLAS_", "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED")
PACKAGES = ("decodegate", "torch", "numpy", "safetensors", "pytest")
GIT_S = 10.0


def header(
    command: str, seed: int, selected: int, environment: Mapping[str, Mapping[str, str]], flags: Mapping[str, str] | None = None
) -> Header:
    """`environment` is what each target says of itself; its `device` and `blas` are the run's, the rest are versions."""
    commit, dirty = revision(Path(__file__).resolve().parent.parent)
    versions = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    device = blas = ""
    for target, facts in environment.items():
        device = device or facts.get("device", "")
        blas = blas or facts.get("blas", "")
        versions |= {
            key if key in ("mlx",) else f"{target}.{key}": v for key, v in facts.items() if key not in ("device", "blas")
        }
    return Header(
        command=command,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit,
        dirty=dirty,
        seed=seed,
        versions=versions,
        device=device or platform.machine(),
        blas=blas,
        flags={name: value for name, value in sorted(os.environ.items()) if _is_numeric(name)} | dict(flags or {}),
        selected=selected,
    )


def _is_numeric(variable: str) -> bool:
    return variable.startswith(NUMERIC) and not variable.startswith("DECODEGATE_LOCK")


def revision(directory: Path) -> tuple[str | None, bool | None]:
    """Commit of a source tree and whether it has changes; None where it is no git work tree, or git is not there."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None or _git(directory, "rev-parse", "--show-toplevel") != str(directory):
        return None, None
    status = _git(directory, "status", "--porcelain")
    return commit, None if status is None else bool(status)


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        ran = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None
