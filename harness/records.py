"""Records: `gate.jsonl` is a header line plus one line per cell, flushed as they come; readable while a run goes on.

Untrusted input when read back: line length, count and field types are bounded, and a torn last line is dropped and said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.outcomes import Outcome

__all__ = ["SCHEMA", "Header", "Record"]

SCHEMA = 1


@dataclass
class Header:
    """First line of a record file: what a reviewer needs to know to trust, or to repeat, the run."""

    schema: int = SCHEMA
    command: str = ""
    started: str = ""  # ISO 8601, UTC
    commit: str | None = None
    dirty: bool | None = None
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)  # decodegate, python, mlx, torch, numpy, platform, ...
    device: str = ""
    blas: str = ""
    flags: dict[str, str] = field(default_factory=dict)  # environment variables and settings that change numerics
    lock_wait_s: float = 0.0
    selected: int = 0  # cells that the run set out to do: fewer records than that means that it was cut short


@dataclass
class Record:
    """One cell. Numbers are of the worst row unless said otherwise; None where the cell did not get that far."""

    cell: str  # engine::llama/gqa::incremental_logits_match_full_forward[float32,dense]
    target: str
    build: str
    family: str
    case: str
    check: str
    dtype: str
    layout: str
    schedule: list[str]  # text forms
    outcome: Outcome
    message: str = ""  # one line for a table; says position, error ratio and bound where it failed
    detail: str = ""  # traceback or stderr tail
    error_ratio: float | None = None  # worst over rows and both metrics of err / (noise + floor / K); good is <= bound
    bound: float | None = None  # K
    max_abs: float | None = None
    rmse: float | None = None
    noise_max: float | None = None
    noise_rmse: float | None = None
    rows: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)  # MATCH / TIE / DRIFT / WRONG -> rows
    first_bad_position: int | None = None
    first_bad_schedule: int | None = None  # index into schedule
    first_bad_token: dict[str, Any] | None = None  # {"expected": id, "got": id, ...}
    margin: float | None = None  # top-2 margin of the oracle at the first bad row, else the least margin of all rows
    series: dict[str, list[float]] = field(default_factory=dict)  # position, error, noise, bound by row: for the plot
    counters: dict[str, int] = field(default_factory=dict)
    power: dict[str, float] = field(default_factory=dict)  # fault -> error ratio / bound under that fault
    duration_s: float = 0.0
    seed: int = 0
    replay: str = ""  # the one command that replays this cell
    extra: dict[str, Any] = field(default_factory=dict)  # smoke: texts, speeds, memory, KL
