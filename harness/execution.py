"""A run of cells: each is replayed in a worker, judged here against its oracle, and becomes one record."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import cells
from harness.cases.build import build
from harness.cells import Cell
from harness.check import Check
from harness.isolation import Isolation
from harness.judging import judge
from harness.oracle import Oracle
from harness.outcomes import Infra, Outcome
from harness.records import Record
from harness.replay import Replay
from harness.target import Target
from harness.targets import resolve
from harness.tokens import TokenStream, special_ids
from harness.worker import Build, Describe, Job, Ran, one_line

__all__ = ["POWER", "Execution", "Settings"]

POWER = 20.0  # a runtime fault must move a check's error by this many times the bound, else the check proves nothing
POWER_DTYPE = "float32"  # the dtype in which power is measured: what a fault moves there, it moves in all
KEPT_ORACLES = 16  # an oracle holds the recomputes of one checkpoint; tiny ones are all kept, see Execution.oracle
DESCRIBE_S = 60.0


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    build: Build = field(default_factory=Build)
    timeout_s: float = 60.0
    threads: int = 1
    memory_bytes: int = 0
    fresh_process: bool = False
