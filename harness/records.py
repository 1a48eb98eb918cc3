"""Records: `gate.jsonl` is a header line plus one line per cell, flushed as they come; readable while a run goes on.

Untrusted input when read back: line length, count and field types are bounded, and a torn last line is dropped and said.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from harness.outcomes import Outcome

__all__ = ["SCHEMA", "Header", "Record", "RecordError", "Writer", "encode", "load", "parse_record"]

SCHEMA = 1
MAX_LINE_BYTES = 16 * 2**20
MAX_RECORDS = 100_000
MAX_FILE_BYTES = 1 * 2**30


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


class RecordError(Exception):
    """A record file that cannot be used; names file, line and what is wrong."""


class Writer:
    """Appends to a record file: the header first, then a line per cell, each on disk before the call returns.

    A killed run leaves at most one torn line, the last, which `load` drops.
    """

    def __init__(self, path: Path, header: Header) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8")
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
    return json.dumps(_finite(dataclasses.asdict(value)), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else math.copysign(sys.float_info.max, value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def load(path: Path) -> tuple[Header, list[Record]]:
    """Header and records of a file, which may belong to a run that still goes on or that was killed.

    Raises RecordError, one line, for a file that is not a record file, is too large, or has a newer schema. Only the last line
    may be torn; it is dropped. Where a cell was recorded twice the later record stands. Unknown fields are dropped: they belong
    to a later revision of the same schema.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise RecordError(f"{path}: {size} bytes, more than the {MAX_FILE_BYTES} that a record file may have")
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}; `decodegate gate --out DIR` writes DIR/gate.jsonl") from None
    torn = lines.pop()  # what follows the last line end; empty unless the last write was cut
    if len(lines) - 1 > MAX_RECORDS:
        raise RecordError(f"{path}: {len(lines) - 1} records, more than the {MAX_RECORDS} that a record file may have")
    if not lines:
        raise RecordError(f"{path}: no header line" + (" (the first line is torn)" if torn else " (the file is empty)"))
    header = parse_header(_object(lines[0], path, 1), f"{path}, line 1")
    records: dict[str, Record] = {}
    for number, line in enumerate(lines[1:], 2):
        if line.strip():
            record = parse_record(_object(line, path, number), f"{path}, line {number}")
            records.pop(record.cell, None)
            records[record.cell] = record
    return header, list(records.values())


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(f"{path}, line {number}: {len(line)} bytes, more than the {MAX_LINE_BYTES} that a line may have")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}, line {number}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path}, line {number}: a record is a JSON object (got {type(value).__name__})")
    return value


def parse_header(raw: Mapping[str, Any], where: str) -> Header:
    schema = raw.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise RecordError(f"{where}: not a header of a record file (schema is {schema!r})")
    if schema > SCHEMA:
        raise RecordError(f"{where}: schema {schema} is newer than the {SCHEMA} that this decodegate reads; update decodegate")
    return Header(**_fields(Header, raw, where))


def parse_record(raw: Mapping[str, Any], where: str) -> Record:
    values = _fields(Record, raw, where)
    try:
        values["outcome"] = Outcome(values["outcome"])
    except (KeyError, ValueError):
        raise RecordError(f"{where}: outcome is {raw.get('outcome')!r}, not one of {', '.join(Outcome)}") from None
    missing = [
        f.name for f in dataclasses.fields(Record)
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise RecordError(f"{where}: the record lacks {', '.join(missing)}")
    return Record(**values)


def _fields(kind: type, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    values = {}
    for f in dataclasses.fields(kind):
        if f.name in raw:
            value = raw[f.name]
            if not _TYPES[str(f.type)](value):
                raise RecordError(f"{where}: {f.name} must be {f.type} (got {reprlib.repr(value)})")
            values[f.name] = value
    return values


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dict_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(check(item) for item in value.values())


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


_string: Callable[[Any], bool] = lambda value: isinstance(value, str)  # noqa: E731
_anything: Callable[[Any], bool] = lambda value: True  # noqa: E731
_TYPES: dict[str, Callable[[Any], bool]] = {
    "str": _string,
    "str | None": _or_none(_string),
    "bool | None": _or_none(lambda value: isinstance(value, bool)),
    "int": _integer,
    "int | None": _or_none(_integer),
    "float": _number,
    "float | None": _or_none(_number),
    "Outcome": _string,
    "list[str]": _list_of(_string),
    "dict[str, str]": _dict_of(_string),
    "dict[str, int]": _dict_of(_integer),
    "dict[str, float]": _dict_of(_or_none(_number)),
    "dict[str, list[float]]": _dict_of(_list_of(_or_none(_number))),
    "dict[str, Any]": _dict_of(_anything),
    "dict[str, Any] | None": _or_none(_dict_of(_anything)),
}
