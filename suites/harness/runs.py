"""Runs of the command in processes of their own, for the harness's own tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["FAKE", "REPEAT", "REWIND", "environment", "gate_command"]

ROOT = Path(__file__).resolve().parents[2]
FAKE = "suites.harness.fake"
REWIND = "rewind_and_go_on_matches_recompute"
REPEAT = "repeat_is_deterministic"


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def gate_command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "decodegate", "gate", "--no-smoke", "--out", str(out), *arguments]
