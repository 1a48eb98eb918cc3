"""What every report says, computed once: verdict, counts, worst figures, power; and the pivot over cases, checks and builds.

A `Summary` is made of one or more runs (record files). With several, each (run, target, build) is a *column*; a table of one
run is the special case of one column, so that before/after tables are the same pivot.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.check import POWER, POWER_DTYPE
from harness.outcomes import WRONG, Outcome
from harness.records import Header, Record
from reports import ratios
from reports.text import plural

__all__ = [
    "BAD",
    "MARKS",
    "WHERE_FAULTS_ARE",
    "Column",
    "DtypeFigures",
    "Mark",
    "Matrix",
    "Power",
    "Run",
    "Summary",
    "case_id",
    "dtype_order",
    "environment",
    "is_smoke",
    "power_of",
]


@dataclass(frozen=True)
class Mark:
    """How an outcome looks: never by colour alone. `style` is a rich style; HTML takes its colours from the outcome's class."""

    glyph: str
    style: str
    meaning: str


MARKS = {  # worst news first
    Outcome.CRASH: Mark("†", "bold red", "the process died"),
    Outcome.ERROR: Mark("!", "bold red", "an exception"),
    Outcome.FAIL: Mark("✗", "bold red", "numbers beyond the bound"),
    Outcome.TIMEOUT: Mark("◷", "bold red", "ran past its time"),
    Outcome.VACUOUS: Mark("∅", "magenta", "ran, but the feature under test did not"),
    Outcome.FLAKE: Mark("~", "yellow", "passed only on a repeat"),
    Outcome.INFRA: Mark("⊘", "yellow", "the surroundings failed"),
    Outcome.UNSUPPORTED: Mark("–", "dim", "declared as not supported"),
    Outcome.PASS: Mark("✓", "green", "within the bound"),
}
_SEVERITY = {outcome: index for index, outcome in enumerate(MARKS)}
WHERE_FAULTS_ARE = f"faults are for {POWER_DTYPE} cells of the target engine"
BAD = WRONG | {Outcome.VACUOUS}


def case_id(record: Record) -> str:
    """family/case, also where the record's case already has the family in front."""
    return record.case if record.case.startswith(f"{record.family}/") else f"{record.family}/{record.case}"


def dtype_order(dtype: str) -> tuple[int, str]:
    """Sort key: the finest dtype first."""
    return {"float32": 0, "bfloat16": 1, "float16": 2}.get(dtype, 3), dtype


def is_smoke(record: Record) -> bool:
    """A run of a real checkpoint, with texts and speeds in `extra`, as against a cell with numbers only."""
    return record.check.startswith("smoke") or record.family == "smoke"


def power_of(record: Record) -> list[tuple[float, str]]:
    """(times the bound, fault), weakest first; a figure that is no number proves nothing and counts as 0."""
    figures = ((value, fault) for fault, value in record.power.items())
    return sorted((0.0 if value is None or math.isnan(value) else value, fault) for value, fault in figures)


@dataclass(frozen=True)
class Run:
    """One record file. `name` tells runs apart where several are merged."""

    header: Header
    records: tuple[Record, ...]
    name: str = ""

    @property
    def duration_s(self) -> float:
        """Time in cells, added up; with several jobs the clock on the wall shows less."""
        return math.fsum(record.duration_s for record in self.records)

    @property
    def missing(self) -> int:
        """Cells that the run set out to do and of which there is no record."""
        return max(self.header.selected - len({(r.build, r.cell) for r in self.records}), 0)


@dataclass(frozen=True)
class Column:
    """One build of one target in one run; what a before/after table has side by side."""

    run: int
    target: str
    build: str
    label: str


@dataclass(frozen=True)
class DtypeFigures:
    """The worst of all cells in one dtype; noise is of the reference itself, run in that dtype."""

    dtype: str
    cells: int
    worst: Record | None  # greatest error ratio; logits that are not finite are worst of all
    noise_max: float | None
    noise_rmse: float | None


@dataclass(frozen=True)
class Power:
    """The fault that moves a check least, as a factor of the bound, and where."""

    check: str
    fault: str
    times: float
    record: Record
    faults: int  # how many faults were planted on the check, over all its cells

    @property
    def weak(self) -> bool:
        return self.times < POWER


@dataclass(frozen=True)
class Matrix:
    """rows x checks -> records, worst outcome first; a row is a case or, folded, a family."""

    rows: tuple[str, ...]
    checks: tuple[str, ...]
    cells: dict[tuple[str, str], list[Record]]

    def of(self, row: str, check: str) -> list[Record]:
        return self.cells.get((row, check), [])


class Summary:
    """Everything that is said about one or more runs; a pure function of their headers and records.

    A cell that one run recorded more than once (a resumed run) counts once, by its last record. The order of records in the
    file, which depends on how the run was spread over processes, has no influence on any report.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        if not runs:
            raise ValueError("a summary needs at least one run")
        self.runs = tuple(runs)
        self._run_of: dict[int, int] = {}
        records: list[Record] = []
        for index, run in enumerate(runs):
            last = {(record.target, record.build, record.cell): record for record in run.records}
            for record in last.values():
                self._run_of[id(record)] = index
                records.append(record)
        self.records = sorted(
            records, key=lambda r: (case_id(r), r.check, dtype_order(r.dtype), r.layout, self._run_of[id(r)], r.target, r.build)
        )

    def _place(self, r: Record) -> tuple[object, ...]:
        return case_id(r), r.check, dtype_order(r.dtype), r.layout, self._run_of[id(r)], r.target, r.build, r.cell

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        keys = sorted({(self._run_of[id(r)], r.target, r.build) for r in self.records})
        several_targets = len({target for _, target, _ in keys}) > 1
        labels = [f"{target} {build}".strip() if several_targets else build or target for _, target, build in keys]
        clashing = {label for label, count in Counter(labels).items() if count > 1}
        return tuple(
            Column(run, target, build, f"{label} ({self.runs[run].name or run + 1})" if label in clashing else label)
            for (run, target, build), label in zip(keys, labels, strict=True)
        )

    @cached_property
    def _labels(self) -> dict[tuple[int, str, str], str]:
        return {(column.run, column.target, column.build): column.label for column in self.columns}

    def column(self, record: Record) -> str:
        """Label of the column that the record belongs to."""
        return self._labels[self._run_of[id(record)], record.target, record.build]

    @cached_property
    def counts(self) -> dict[Outcome, int]:
        """Outcomes that occur, worst news first."""
        seen = Counter(record.outcome for record in self.records)
        return {outcome: seen[outcome] for outcome in MARKS if seen[outcome]}

    @cached_property
    def bad(self) -> list[Record]:
        """Cells that turn the gate red, worst news first."""
        return self.of(*BAD)

    def of(self, *outcomes: Outcome) -> list[Record]:
        chosen = [record for record in self.records if record.outcome in outcomes]
        return sorted(chosen, key=lambda record: _SEVERITY[record.outcome])

    @property
    def missing(self) -> int:
        return sum(run.missing for run in self.runs)

    @property
    def selected(self) -> int:
        return len(self.records) + self.missing

    @property
    def green(self) -> bool:
        return not self.bad and not self.missing and self.counts.get(Outcome.PASS, 0) > 0 and not self.temporary

    @property
    def temporary(self) -> int:
        return self.counts.get(Outcome.INFRA, 0) + self.counts.get(Outcome.FLAKE, 0)

    @property
    def verdict(self) -> str:
        """One sentence, without a mark."""
        total = plural(self.selected, "cell")
        if self.bad:
            wrong = sum(record.outcome in WRONG for record in self.bad)
            vacuous = len(self.bad) - wrong
            parts = [f"{wrong} wrong"] * bool(wrong) + [f"{vacuous} vacuous"] * bool(vacuous)
            return f"{' and '.join(parts)} of {total}{self._unfinished}"
        if not self.records:
            return f"no evidence: no cell finished{self._unfinished}"
        if self.temporary:
            return f"no verdict: {self.temporary} of {total} ended as infra or flake{self._unfinished}"
        if not self.counts.get(Outcome.PASS):
            return f"no evidence: none of {total} passed{self._unfinished}"
        unsupported = self.counts.get(Outcome.UNSUPPORTED, 0)
        rest = f", {unsupported} unsupported" if unsupported else ""
        return (
            f"{plural(self.counts[Outcome.PASS], 'cell')} pass{'es' * (self.counts[Outcome.PASS] == 1)}{rest}{self._unfinished}"
        )

    @property
    def _unfinished(self) -> str:
        if not self.missing:
            return ""
        return f"; {self.missing} of {self.selected} did not finish (the run was cut short, or is still going)"

    @property
    def outcome(self) -> Outcome:
        """The outcome whose mark stands for the whole: the worst one; without evidence, vacuous."""
        if self.bad:
            return self.bad[0].outcome if self.bad[0].outcome not in WRONG else Outcome.FAIL
        if self.temporary or (self.missing and self.records):
            return Outcome.INFRA
        return Outcome.PASS if self.green else Outcome.VACUOUS

    @property
    def duration_s(self) -> float:
        return math.fsum(record.duration_s for record in self.records)

    @cached_property
    def dtypes(self) -> list[DtypeFigures]:
        groups: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            if record.error_ratio is not None or record.noise_max is not None:
                groups[record.dtype].append(record)
        return [
            DtypeFigures(
                dtype,
                len(group),
                max(
                    (r for r in group if ratios.worst(r) is not None),
                    key=lambda r: _nan_is_worst(ratios.worst(r)),
                    default=None,
                ),
                max((r.noise_max for r in group if r.noise_max is not None), default=None),
                max((r.noise_rmse for r in group if r.noise_rmse is not None), default=None),
            )
            for dtype, group in sorted(groups.items(), key=lambda item: dtype_order(item[0]))
        ]

    @cached_property
    def ties(self) -> tuple[int, int]:
        """Rows where the greedy choice hangs within twice the allowed error, and all rows that were judged."""
        return sum(r.verdicts.get("TIE", 0) for r in self.records), sum(
            sum(r.verdicts.values()) or r.rows for r in self.records
        )

    @cached_property
    def power(self) -> list[Power]:
        """The weakest fault of each check, weakest check first."""
        groups: dict[str, list[tuple[float, str, Record]]] = defaultdict(list)
        for record in self.records:
            for value, fault in power_of(record):
                groups[record.check].append((value, fault, record))
        found = []
        for check, entries in groups.items():
            value, fault, record = min(entries, key=lambda entry: (entry[0], entry[1]))
            found.append(Power(check, fault, value, record, len({name for _, name, _ in entries})))
        return sorted(found, key=lambda power: (power.times, power.check))

    @property
    def without_power(self) -> list[str]:
        """Checks that passed where faults are planted, yet had none planted anywhere: nothing shows that they can fail."""
        planting = {"engine"} | {record.target for record in self.records if record.power}
        ran = {r.check for r in self._passed_cells if r.dtype == POWER_DTYPE and r.target in planting}
        return sorted(ran - {power.check for power in self.power})

    @property
    def unplanted(self) -> bool:
        """Cells passed, and none of them is of the kind that faults are planted in."""
        return bool(self._passed_cells) and not self.power and not self.without_power

    @cached_property
    def _passed_cells(self) -> list[Record]:
        return [record for record in self.records if record.outcome is Outcome.PASS and not is_smoke(record)]

    @cached_property
    def smoke(self) -> list[Record]:
        return [record for record in self.records if is_smoke(record)]

    def matrix(self, *, by_family: bool = False) -> Matrix:
        """Cells (without smoke) by case, or by family, and check."""
        cells: dict[tuple[str, str], list[Record]] = defaultdict(list)
        for record in self.records:
            if not is_smoke(record):
                cells[record.family if by_family else case_id(record), record.check].append(record)
        for group in cells.values():
            group.sort(key=lambda record: _SEVERITY[record.outcome])
        return Matrix(tuple(sorted({row for row, _ in cells})), tuple(sorted({check for _, check in cells})), dict(cells))

    def reasons(self, *outcomes: Outcome) -> list[tuple[Outcome, str, list[Record]]]:
        """Cells of these outcomes grouped by their message, most frequent first within an outcome."""
        groups: dict[tuple[Outcome, str], list[Record]] = defaultdict(list)
        for record in self.of(*outcomes):
            groups[record.outcome, record.message].append(record)
        ordered = sorted(groups.items(), key=lambda item: (_SEVERITY[item[0][0]], -len(item[1]), item[0][1]))
        return [(outcome, message, records) for (outcome, message), records in ordered]

    @property
    def bad_by_check(self) -> list[tuple[str, int, int]]:
        """(check, red cells, all cells) for each check with a red cell: the pattern often names the fault."""
        total = Counter(record.check for record in self.records)
        red = Counter(record.check for record in self.bad)
        return [(check, count, total[check]) for check, count in sorted(red.items(), key=lambda item: (-item[1], item[0]))]


def _nan_is_worst(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def environment(header: Header) -> list[tuple[str, str]]:
    """(name, value) pairs that a reviewer needs to trust or to repeat the run; only what the header has."""
    commit = (header.commit or "")[:12] + {True: " + uncommitted changes", False: "", None: ""}[header.dirty]
    pairs: Iterable[tuple[str, str]] = [
        ("commit", commit.strip()),
        ("device", header.device),
        ("BLAS", header.blas),
        *sorted(header.versions.items()),
        ("flags", " ".join(f"{name}={value}" for name, value in sorted(header.flags.items()))),
        ("seed", str(header.seed)),
        ("started", header.started),
        ("lock wait", f"{header.lock_wait_s:.1f} s" if header.lock_wait_s >= 0.05 else ""),
        ("command", header.command),
    ]
    return [(name, value) for name, value in pairs if value]
