"""Records: `gate.jsonl` is a header line plus one line per cell, flushed as they come; readable while a run goes on.

Untrusted input when read back: line length, count and field types are bounded, and a torn last line is dropped and said.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from harness.outcomes import Outcome

__all__ = ["SCHEMA", "Header", "Record", "RecordError", "Writer", "decode", "encode", "last_words", "load", "plain"]

SCHEMA = 2  # 2: first_bad_ratio, worst_position, worst_schedule, routing
_CELL = re.compile(r"[^:\s]+::[^:\s]+::[^:\s]+")
MAX_BYTES = 512 * 2**20  # a run of 10 000 cells with their series is about 100 MB
MAX_LINE = 4 * 2**20
MAX_RECORDS = 200_000
MAX_ITEMS = 100_000  # of one list or mapping
MAX_NAME = 500  # characters of a field that names something


class RecordError(Exception):
    """The file is not a record file that this version can read; one line that names line, field and value."""


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
    builds: list[dict[str, Any]] = field(default_factory=list)  # of a before/after run, see harness.evidence
    notes: list[str] = field(default_factory=list)  # what a reader has to know; `load` adds what it had to drop


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
    first_bad_ratio: float | None = None  # error ratio of that row; None without logits, or where they are not finite
    first_bad_token: dict[str, Any] | None = None  # {"expected": id, "got": id, ...}
    worst_position: int | None = None  # of the row that error_ratio is of; error_ratio is None where its logits are not finite
    worst_schedule: int | None = None
    margin: float | None = None  # top-2 margin of the oracle at the first bad row, else the least margin of all rows
    # Of families with experts: `margin`, the least router margin of the judged rows, and `rounding`, as far as rounding may
    # move one. Where a row is bad: `row_margin`, of its own token; `least_margin` at `least_position`, of all tokens up to it;
    # `flips`, how many of these have other experts in the naive run; `last_flip`, the last of these. See harness.choice.
    routing: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)  # position, error, noise, bound by row: for the plot
    counters: dict[str, int] = field(default_factory=dict)
    power: dict[str, float] = field(default_factory=dict)  # fault -> error ratio / bound under that fault
    duration_s: float = 0.0
    seed: int = 0
    replay: str = ""  # the one command that replays this cell
    extra: dict[str, Any] = field(default_factory=dict)  # smoke: texts, speeds, memory, KL


class Writer:
    """Writes a record file: the header first, then a line per cell, each on disk before the call returns.

    A killed run leaves at most one torn line, the last, which `load` drops.
    """

    def __init__(self, path: Path, header: Header | None) -> None:
        """Begins a new file with the header; with None, goes on with a file that has one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w" if header else "a", encoding="utf-8")
        if header:
            self._line(header)

    def write(self, record: Record) -> None:
        self._line(record)

    def close(self) -> None:
        self._file.close()

    def _line(self, value: Header | Record) -> None:
        self._file.write(encode(value) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def encode(value: Header | Record) -> str:
    """One line of strict JSON. JSON has no infinities: they become the largest finite number, and NaN becomes null."""
    return json.dumps(_storable(asdict(value)), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def decode(line: str) -> Record:
    """A record from the line that `encode` made of it; raises RecordError."""
    return _record(_parse(line.encode(), "record"), "record")


def _storable(value: Any) -> Any:
    if isinstance(value, Outcome):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else math.copysign(sys.float_info.max, value)
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, dict):
        return {utf8(str(key)): _storable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(item) for item in value]
    return value


def utf8(text: str) -> str:
    """The text, with lone surrogates spelled out: a target's exception may hold some, and no file or pipe takes them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def plain(value: Any) -> Any:
    """The value for strict JSON that people read too: enums by value, infinities and NaN as texts."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def last_words(detail: str) -> str:
    """The last line that a process wrote before its end: of a traceback or of stderr, without what Python adds when it crashes.

    The first line of a cell's stderr is the cell's own name, which is nobody's words.
    """
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    dump = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error:")), len(lines))
    said = [line for line in lines[:dump] if not _CELL.fullmatch(line)]
    return said[-1] if said else ""


def load(path: Path) -> tuple[Header, list[Record]]:
    """Header and records of a file that may still be written to, or whose run was killed.

    A last line that does not end in a newline is torn: it is dropped and `header.notes` says so. Everything else that is not as
    it should be raises RecordError; so does a schema that is newer than this version's.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise RecordError(f"{path}: {size} bytes, more than the {MAX_BYTES} that a record file may have")
        with path.open("rb") as file:
            lines = file.read(MAX_BYTES).split(b"\n")
    except OSError as error:
        raise RecordError(
            f"{path}: cannot be read ({error.strerror}); a run writes gate.jsonl into its --out directory"
        ) from None
    torn = lines.pop()  # empty where the file ends in a newline
    if not lines:
        raise RecordError(f"{path}: no header line; the run ended before it began, or this is not a record file")
    if len(lines) - 1 > MAX_RECORDS:
        raise RecordError(f"{path}: {len(lines) - 1} records, more than the {MAX_RECORDS} that a record file may have")
    header = _header(_parse(lines[0], f"{path}:1"), f"{path}:1")
    records = [
        _record(_parse(line, f"{path}:{number}"), f"{path}:{number}")
        for number, line in enumerate(lines[1:], 2)
        if line.strip()
    ]
    if torn.strip():
        header.notes.append(f"the last line was torn ({len(torn)} bytes without an end) and is left out")
    return header, records


def _parse(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise RecordError(f"{where}: {len(line)} bytes, more than the {MAX_LINE} that a line may have")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where}: not JSON ({type(error).__name__}: {str(error)[:120]})") from None
    if not isinstance(value, dict):
        raise RecordError(f"{where}: must be an object (got {_short(value)})")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}{'...' * (len(text) > 60)}, a {type(value).__name__}"


def _text(value: object) -> bool:
    return isinstance(value, str)


def _name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME and value.isprintable()


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _number(value: object) -> bool:
    """Infinities and NaN are numbers here: a broken target yields them."""
    return isinstance(value, float) or _count(value)


def _duration(value: object) -> bool:
    return _number(value) and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def _optional(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


def _list(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and len(value) <= MAX_ITEMS and all(map(check, value))


def _mapping(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and len(value) <= MAX_ITEMS and all(map(check, value.values()))


def _anything(value: object) -> bool:
    return True


_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {  # annotation -> (in words, check)
    "str": ("a text", _text),
    "str | None": ("a text or null", _optional(_text)),
    "bool | None": ("true, false or null", _optional(lambda value: isinstance(value, bool))),
    "int": ("a whole number", _count),
    "int | None": ("a whole number or null", _optional(_count)),
    "float": ("a time in seconds", _duration),
    "float | None": ("a number or null", _optional(_number)),
    "list[str]": ("a list of texts", _list(_text)),
    "list[dict[str, Any]]": ("a list of objects", _list(_mapping(_anything))),
    "dict[str, str]": ("an object of texts", _mapping(_text)),
    "dict[str, int]": ("an object of whole numbers", _mapping(_count)),
    "dict[str, float]": ("an object of numbers", _mapping(_optional(_number))),
    "dict[str, list[float]]": ("an object of lists of numbers", _mapping(_list(_optional(_number)))),
    "dict[str, Any]": ("an object", _mapping(_anything)),
    "dict[str, Any] | None": ("an object or null", _optional(_mapping(_anything))),
    "Outcome": (f"one of {', '.join(Outcome)}", lambda value: isinstance(value, str) and value in set(map(str, Outcome))),
}
_NAMES = frozenset({"cell", "target", "build", "family", "case", "check", "dtype", "layout"})


def _check(kind: type, raw: dict[str, Any], where: str) -> dict[str, Any]:
    known = {item.name: str(item.type) for item in fields(kind)}
    if unknown := sorted(raw.keys() - known.keys()):
        raise RecordError(f"{where}: unknown field {unknown[0][:60]!r}")
    for name, value in raw.items():
        words, good = ("a printable text", _name) if name in _NAMES else _KINDS[known[name]]
        if not good(value):
            raise RecordError(f"{where}: {name!r} must be {words} (got {_short(value)})")
    return raw


def _header(raw: dict[str, Any], where: str) -> Header:
    schema = raw.get("schema")
    if not _count(schema) or schema < 1:  # type: ignore[operator]
        raise RecordError(f"{where}: 'schema' must be a number from 1 on (got {_short(schema)}); line 1 is not a header")
    if schema > SCHEMA:  # type: ignore[operator]
        raise RecordError(f"{where}: schema {schema} is newer than this version reads ({SCHEMA}); install a newer decodegate")
    return Header(**_check(Header, raw, where))


def _record(raw: dict[str, Any], where: str) -> Record:
    checked = _check(Record, raw, where)
    required = ("cell", "target", "build", "family", "case", "check", "dtype", "layout", "schedule", "outcome")
    if missing := [name for name in required if name not in checked]:
        raise RecordError(f"{where}: field {missing[0]!r} is missing")
    return Record(**{**checked, "outcome": Outcome(checked["outcome"])})
