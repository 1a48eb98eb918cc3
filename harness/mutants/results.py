"""What came of mutants, and the file that keeps it: a header line, then one JSON line per mutant, so that a run can go on."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from harness.mutants.catalogue import HEADROOM
from harness.outcomes import ExitCode
from harness.records import Header, Record, RecordError, last_words, plain

__all__ = ["Fate", "Result", "Store", "exit_code", "figures", "load"]

MAX_FILE_BYTES = 64 << 20
MAX_RESULTS = 10_000


class Fate(str, Enum):
    """What can become of a mutant."""

    CAUGHT = "caught"  # the named check turned red on each of its cases
    MISSED = "missed"  # every check let it pass: what a benign mutant must be
    WRONG_CHECK = "wrong-check"  # the named check let it pass, another did not
    TIMEOUT = "timeout"  # the named check came to no end
    UNVIABLE = "unviable"  # the changed module cannot be imported
    VACUOUS = "vacuous"  # the changed code, or the named check, did not run
    ERROR = "error"  # the mutant itself is wrong: anchor, check or case do not exist, or match more than once

    def __str__(self) -> str:
        return self.value


@dataclass
class Result:
    """One mutant. `broken` and `whole` are what the deciding cell came to on the mutant and on the unchanged build."""

    id: str
    kind: str
    why: str
    report: str
    benign: bool
    check: str
    digest: str  # of the mutant
    judged_by: str  # fingerprint of the engine, and of what judges it
    fate: Fate
    wanted: float = HEADROOM
    headroom: float | None = None  # error / bound, least of its cells; None: it did not come to numbers, or was not caught
    cell: str = ""  # the one that decides
    message: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)  # check -> outcome, of the checks that ran
    broken: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    diff: str = ""
    duration_s: float = 0.0

    @property
    def weak(self) -> bool:
        """Caught by numbers that are too near to the bound to be trusted."""
        return self.fate is Fate.CAUGHT and not self.benign and self.headroom is not None and self.headroom < self.wanted

    @property
    def good(self) -> bool:
        return self.fate is Fate.MISSED if self.benign else self.fate is Fate.CAUGHT and not self.weak

    @property
    def verdict(self) -> str:
        """The fate in the words of a table."""
        if self.benign:
            return "left alone (benign)" if self.fate is Fate.MISSED else f"benign, but {self.fate}"
        return "caught, weakly" if self.weak else self.fate.value


def exit_code(results: list[Result]) -> ExitCode:
    """OK when each fault was caught with headroom and each benign change was left alone."""
    if not results:
        return ExitCode.OK
    return ExitCode.OK if all(result.good for result in results) else ExitCode.WRONG


def figures(record: Record) -> dict[str, Any]:
    """The fields of a record that a table shows; of its detail the last words only."""
    names = ("outcome", "message", "max_abs", "error_ratio", "bound", "first_bad_position")
    return {name: getattr(record, name) for name in names} | {"detail": last_words(record.detail)}


class Store:
    """The results file. Results that still stand are kept; the rest of the file is replaced when it is opened."""

    def __init__(self, path: Path, header: Header, valid: dict[str, str], judged_by: str) -> None:
        """`valid`: id -> digest of the mutants of this run."""
        self.kept: dict[str, Result] = {}
        if path.exists():
            _, results = load(path)
            self.kept = {r.id: r for r in results if r.judged_by == judged_by and valid.get(r.id) == r.digest}
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(_line(asdict(header)))
            file.writelines(_line(asdict(result)) for result in self.kept.values())
        os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8")

    def add(self, result: Result) -> None:
        self._file.write(_line(asdict(result)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def load(path: Path) -> tuple[Header, list[Result]]:
    """Header and results; a torn last line is left out. Raises RecordError, which says where the file is not one."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise RecordError(f"{path}: {size} bytes, more than the {MAX_FILE_BYTES} that a results file may have")
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines or len(lines) > MAX_RESULTS:
        raise RecordError(f"{path}: {len(lines)} lines, must be a header and at most {MAX_RESULTS} results")
    header, *results = (_parse(kind, line, f"{path}:{number}") for number, (kind, line) in enumerate(_kinds(lines), 1))
    return header, results


def _kinds(lines: list[bytes]) -> list[tuple[type, bytes]]:
    return [(Header, lines[0]), *((Result, line) for line in lines[1:])]


def _line(value: dict[str, Any]) -> str:
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _parse(kind: type, line: bytes, where: str) -> Any:
    try:
        raw = json.loads(line)
        known = {item.name for item in dataclasses.fields(kind)}
        if not isinstance(raw, dict) or raw.keys() - known:
            raise ValueError(f"must be an object with fields of {', '.join(sorted(known))}")
        if kind is Result:
            raw["fate"] = Fate(raw["fate"])
        return kind(**raw)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RecordError(f"{where}: not a line of a results file ({str(error)[:160]})") from None
