"""Runs mutants: the unchanged build first, then each mutant in a build and a worker of its own, judged by today's checks."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from harness import cases
from harness.builds import BuildError, Builds, Made, fingerprint
from harness.cases.case import Case
from harness.cells import Cell, Subject, checks_in, refusal
from harness.check import Check
from harness.execution import Checkpoints, Execution
from harness.isolation import Isolation, default_memory_bytes, default_threads
from harness.mutants.anchor import AnchorError, apply
from harness.mutants.catalogue import Mutant
from harness.mutants.results import Fate, Result, figures
from harness.outcomes import Outcome
from harness.records import Record
from harness.targets import resolve
from harness.worker import Build, Describe

__all__ = ["BaselineRed", "MutantRun", "Settings"]

BASELINE_S = 120.0  # that a cell may take on the unchanged build
LEAST_S = 20.0  # that a cell may take on a mutant; more where the unchanged build needs more than a fifth of it
IMPORT_S = 60.0
RED = frozenset(
    {Outcome.FAIL, Outcome.ERROR, Outcome.CRASH, Outcome.VACUOUS}
)  # what turns the gate red; a timeout stands apart


class BaselineRed(Exception):
    """Checks do not pass on the unchanged build, so that what they say of a mutant is worth nothing."""

    def __init__(self, records: Sequence[Record]) -> None:
        super().__init__(f"{len(records)} cells that mutants are to be judged by do not pass on the unchanged build")
        self.records = records


@dataclass(frozen=True)
class Settings:
    target: str = "engine"  # a known name or module:Class; its `package` is what mutants change
    suite: str = "suites.decoding"  # the package that declares the checks
    seed: int = 0
    jobs: int = 1
    all_checks: bool = False  # run every check on every mutant, for the whole matrix


@dataclass
class MutantRun:
    """A run over the builds of one source; a context manager. `results` yields them as they come."""

    builds: Builds
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        self._exit = ExitStack()
        self._target = resolve(self.settings.target)
        self._checks: dict[str, Check] = checks_in(self.settings.suite)
        self._checkpoints = Checkpoints(self.settings.seed)
        self.base = self.builds.working_tree()
        self._exit.callback(self._checkpoints.close)
        self._baseline = self._execution(self.base, BASELINE_S)
        self._exit.callback(self._baseline.close)
        self._known: dict[str, Record] = {}  # cell -> record on the unchanged build
        self._lock = threading.Lock()
        self.environment: Mapping[str, str] = {}
        self.judged_by = ""

    def __enter__(self) -> MutantRun:
        try:
            described = self._baseline.isolation.submit(Describe(f"environment of {self._target.name}", self.settings.target))
            self.environment = self._baseline.isolation.result(described).environment
            self.judged_by = self._judged_by()
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def results(self, mutants: Iterable[Mutant]) -> Iterator[Result]:
        """Runs the mutants. Raises BaselineRed before the first one."""
        planned: list[tuple[Mutant, list[Cell]]] = []
        for mutant in mutants:
            try:
                planned.append((mutant, self._cells(mutant)))
            except LookupError as error:
                yield self._result(mutant, Fate.ERROR, str(error.args[0]))
        needed = {cell.id: cell for _, chosen in planned for cell in chosen}
        red = [record for record in self._unchanged(list(needed.values())) if record.outcome is not Outcome.PASS]
        if red:
            raise BaselineRed(red)
        pool = ThreadPoolExecutor(self.settings.jobs, thread_name_prefix="mutant")
        try:
            for done in as_completed([pool.submit(self._judge, mutant, chosen) for mutant, chosen in planned]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _cells(self, mutant: Mutant) -> list[Cell]:
        """The named check on the mutant's cases, or every check that applies, where it names none."""
        known = {case.id: case for case in cases.all_cases()}
        for name in mutant.cases:
            if name not in known:
                raise LookupError(f"case {name!r} does not exist")
        if mutant.check and mutant.check not in self._checks:
            raise LookupError(f"check {mutant.check!r} is not in {self.settings.suite}")
        found = []
        for name in mutant.cases:
            case = known[name]
            chosen = [self._checks[mutant.check]] if mutant.check else list(self._checks.values())
            applying = [check for check in chosen if _concerns(check, case, mutant)]
            if not applying:
                raise LookupError(f"check {mutant.check!r} does not apply to case {name!r} in layout {mutant.layout}")
            if mutant.layout not in case.layouts:
                raise LookupError(f"case {name!r} has no layout {mutant.layout!r}")
            able = [cell for check in applying if not refusal(cell := self._cell(mutant, Subject(case), check), self._target)]
            if not able:
                raise LookupError(f"{self._target.name} declares that it cannot run {mutant.check!r} on case {name!r}")
            found += able
        return found

    def _cell(self, mutant: Mutant, subject: Subject, check: Check) -> Cell:
        return Cell(self.settings.target, self._target.name, subject, check, mutant.dtype, mutant.layout)

    def _others(self, mutant: Mutant, chosen: Sequence[Cell]) -> list[Cell]:
        """The checks that the mutant does not name, on the same cases."""
        ran = {cell.id for cell in chosen}
        subjects = {cell.subject.case.id: cell.subject for cell in chosen}.values()
        found = [
            self._cell(mutant, subject, check)
            for subject in subjects
            for check in self._checks.values()
            if _concerns(check, subject.case, mutant)
        ]
        return [cell for cell in found if cell.id not in ran and not refusal(cell, self._target)]

    def _unchanged(self, chosen: Sequence[Cell]) -> list[Record]:
        """Records on the unchanged build; each cell runs there once."""
        with self._lock:
            missing = [cell for cell in chosen if cell.id not in self._known]
            missing.sort(key=lambda cell: cell.order)
            for record in run_cells(self._baseline, missing):
                self._known[record.cell] = record
        return [self._known[cell.id] for cell in chosen]

    def _judge(self, mutant: Mutant, chosen: Sequence[Cell]) -> Result:
        began = time.perf_counter()
        package = self.builds.source.package
        reached = self.base.directory / f"{mutant.id}.reached"
        try:
            path = self.base.directory / package / mutant.file
            if not path.is_file():
                raise AnchorError(f"{package}/{mutant.file} does not exist")
            source = path.read_text(encoding="utf-8")
            plain = apply(source, mutant.change)
            with self.builds.changed(mutant.id, mutant.file, apply(source, mutant.change, str(reached))) as made:
                if made.fingerprint == self.base.fingerprint:
                    raise AnchorError("the build's fingerprint did not change")
                result = self._run(mutant, chosen, made, reached)
        except (AnchorError, BuildError) as error:
            return self._result(mutant, Fate.ERROR, str(error))
        result.diff = _diff(source, plain, f"{package}/{mutant.file}")
        result.duration_s = time.perf_counter() - began
        return result

    def _run(self, mutant: Mutant, chosen: Sequence[Cell], made: Made, reached: Path) -> Result:
        failure = import_failure(made.directory, f"{self.builds.source.package}.{mutant.module}".rstrip("."))
        if failure:
            return self._result(mutant, Fate.UNVIABLE, failure)
        execution = self._execution(made, self._patience(chosen))
        try:
            named = run_cells(execution, chosen)
            if self.settings.all_checks or not (mutant.benign or _red(named)):
                others = self._others(mutant, chosen)
                green = {record.cell for record in self._unchanged(others) if record.outcome is Outcome.PASS}
                rest = run_cells(execution, [cell for cell in others if cell.id in green])
            else:
                rest = []
        finally:
            execution.close()
        return self._decide(mutant, named, rest, reached.exists())

    def _decide(self, mutant: Mutant, named: Sequence[Record], rest: Sequence[Record], reached: bool) -> Result:
        red = _red(named)
        if red and (mutant.benign or len(red) == len(named)):
            worst = min(red, key=_headroom)  # the cell that catches it by least
            result = self._result(mutant, Fate.CAUGHT, worst.message, worst)
            least = _headroom(worst)
            result.headroom = least if worst.outcome is Outcome.FAIL and math.isfinite(least) else None
        elif any(record.outcome is Outcome.TIMEOUT for record in named):
            late = next(record for record in named if record.outcome is Outcome.TIMEOUT)
            result = self._result(mutant, Fate.TIMEOUT, late.message, late)
        elif not reached:
            result = self._result(mutant, Fate.VACUOUS, "the changed code was never run", named[0])
        elif stuck := [record for record in named if record.outcome not in RED | {Outcome.PASS}]:
            result = self._result(mutant, Fate.VACUOUS, f"{stuck[0].outcome}: {stuck[0].message}", stuck[0])
        elif not mutant.benign and (elsewhere := _red(rest)):
            names = ", ".join(sorted({record.check for record in elsewhere}))
            result = self._result(mutant, Fate.WRONG_CHECK, f"caught by {names} only", elsewhere[0])
        else:
            closest = max((record for record in named if record not in red), key=_headroom)
            result = self._result(mutant, Fate.MISSED, closest.message, closest)
            result.headroom = _headroom(closest) if math.isfinite(_headroom(closest)) else None
        result.outcomes = _by_check([*named, *rest])
        return result

    def _result(self, mutant: Mutant, fate: Fate, message: str, record: Record | None = None) -> Result:
        result = Result(
            id=mutant.id,
            kind=mutant.kind,
            why=mutant.why,
            report=mutant.report,
            benign=mutant.benign,
            check=mutant.check,
            digest=mutant.digest,
            judged_by=self.judged_by,
            fate=fate,
            wanted=mutant.headroom,
            message=message,
        )
        if record is not None:
            result.cell = record.cell
            result.broken = figures(record)
            result.whole = figures(self._known[record.cell])
        return result

    def _execution(self, made: Made, timeout_s: float) -> Execution:
        isolation = Isolation(
            Build(made.name, made.directory),
            timeout_s=timeout_s,
            threads=default_threads(self.settings.jobs),
            memory_bytes=default_memory_bytes(self.settings.jobs + 1),
        )
        return Execution(isolation, self.settings.seed, checkpoints=self._checkpoints, power=False)

    def _patience(self, chosen: Sequence[Cell]) -> float:
        return max(LEAST_S, 5 * max(self._known[cell.id].duration_s for cell in chosen))

    def _judged_by(self) -> str:
        """Fingerprint of all that a result depends on beside the mutant: engine, checks, references, harness, seed."""
        parts = [self.base.fingerprint, str(self.settings.seed), str(self.settings.all_checks), json.dumps(self.environment)]
        for package in (self.settings.suite, "reference_models", "harness"):
            spec = importlib.util.find_spec(package)
            assert spec is not None and spec.origin is not None  # they are imported by now
            parts.append(fingerprint(Path(spec.origin).parent, "*.py"))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def run_cells(execution: Execution, chosen: Sequence[Cell]) -> list[Record]:
    """Records of cells, in their order; the worker is kept one cell ahead."""
    records = []
    for index, cell in enumerate(chosen):
        for ahead in chosen[index : index + 2]:
            execution.submit(ahead)
        records.append(execution.record(cell))
    return records


def import_failure(directory: Path, module: str) -> str:
    """Why a module of a build cannot be imported, in a process of its own; empty where it can."""
    program = "import importlib, sys; sys.path.insert(0, sys.argv[1]); importlib.import_module(sys.argv[2])"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", program, str(directory), module],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} took more than {IMPORT_S:g} s"
    if ran.returncode == 0:
        return ""
    return (ran.stderr.strip().splitlines() or [f"importing {module} ended with exit status {ran.returncode}"])[-1]


def _concerns(check: Check, case: Case, mutant: Mutant) -> bool:
    return check.applies(case) and check.layout in (None, mutant.layout)


def _red(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record.outcome in RED]


def _headroom(record: Record) -> float:
    """Error as a multiple of the bound; without numbers (an exception, a crash, NaN) there is no doubt."""
    ratio = record.error_ratio
    if ratio is None or record.bound is None or ratio != ratio:
        return float("inf")
    return ratio / record.bound


def _by_check(records: Iterable[Record]) -> dict[str, str]:
    """Check -> outcome; of several cells the red one."""
    found: dict[str, str] = {}
    for record in sorted(records, key=lambda record: record.outcome in RED):
        found[record.check] = record.outcome.value
    return found


def _diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", n=1, lineterm="")
    return "\n".join(lines)
