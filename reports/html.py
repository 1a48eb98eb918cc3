"""gate.html: one self-contained file, readable from a mail attachment, without network and without JavaScript.

The page is a Jinja template with autoescape on; the only markup from elsewhere is the SVG of `reports.plot`,
which holds numbers alone. Scripts add filters, the detail drawer and copy buttons to what is already readable.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from harness.check import POWER
from harness.outcomes import Outcome
from harness.records import Record
from reports import ratios, text
from reports.plot import error_plot
from reports.summary import BAD, MARKS, WHERE_FAULTS_ARE, Summary, case_id, dtype_order, environment, is_smoke, power_of

__all__ = ["render", "template"]

_PLOT_POINTS = 24_000  # for the whole page: about 300 kB of path data however many cells there are


_LAYOUTS = {"dense": "the engine holds the state", "model_owned": "the model holds its own state"}
_WORDS = {  # for a reader who has never seen a report
    "cell": "one check of one case, in one dtype and layout, on one target: what is run and judged",
    "case": "a model, mostly a tiny one that stresses what its name says",
    "check": "a way of decoding, as one or more schedules of operations; the name says what must hold",
    "error ratio": "how far the target's logits are from the float64 recompute, in units of the noise; good is up to the bound",
    "noise": "how far the reference itself is from the recompute, run naively in the cell's dtype",
    "MATCH": "a row within the bound, with the recompute's token",
    "TIE": "a row within the bound with another token, which the recompute has within twice the bound of its own",
    "DRIFT": "a row beyond the bound with the recompute's token",
    "WRONG": "a row beyond the bound with another token, or with numbers that are not finite",
    "margin": "how far the recompute's best token is above its second",
    "power": "by how many times the bound a fault that is planted in the target moves a check",
}


@dataclass(frozen=True)
class _Cell:
    """A record with what the template needs to show it."""

    id: str
    record: Record
    column: str
    case: str
    plot: Markup
    numbers: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]  # title -> name, figure
    figures: tuple[tuple[str, str], ...]  # from Record.extra
    texts: tuple[tuple[str, str], ...]

    @property
    def outcome(self) -> str:
        return str(self.record.outcome)

    @property
    def red(self) -> bool:
        return self.record.outcome in BAD or self.record.outcome is Outcome.FLAKE

    @property
    def headroom(self) -> int | None:
        """Error ratio in percent of the bound, at most 100: the small bar in the matrix."""
        ratio, bound = ratios.worst(self.record), self.record.bound
        if ratio is None or not bound:
            return None
        return min(max(round(100 * ratio / bound), 0), 100) if ratio <= bound else 100

    @property
    def tip(self) -> str:
        record = self.record
        parts = [f"{self.column} {record.dtype} {record.layout}: {record.outcome}"]
        parts += map(str, ratios.facts(record))
        if record.outcome is not Outcome.PASS and record.message:
            parts.append(text.shorten(text.one_line(record.message), 160))
        return " · ".join(parts)


def render(report: Summary) -> str:
    """The page as text."""
    points = min(96, max(24, _PLOT_POINTS // max(len(report.records), 1)))
    cells = {id(record): _cell(report, record, f"c{index}", points) for index, record in enumerate(report.records)}
    red = report.bad + report.of(Outcome.FLAKE)
    matrix = report.matrix()
    dtypes = sorted({record.dtype for record in report.records if not is_smoke(record)}, key=dtype_order)
    labels = [column.label for column in report.columns]

    layouts = sorted(
        {record.layout for record in report.records if not is_smoke(record)}, key=lambda name: (name != "dense", name)
    )

    def grid(records: list[Record]) -> list[list[_Cell | None]]:
        """One field of the matrix: a line for each column (build), in it a place for each dtype, one or more by layout."""
        records = sorted(records, key=lambda record: layouts.index(record.layout))
        lines: list[list[_Cell | None]] = []
        for label in labels:
            of_column = [cells[id(record)] for record in records if report.column(record) == label]
            if not of_column and len(labels) == 1:
                continue
            line: list[_Cell | None] = []
            for dtype in dtypes:
                line += [cell for cell in of_column if cell.record.dtype == dtype] or [None]
            lines.append(line)
        return lines

    page = template("gate.html.j2").render(
        report=report,
        cell_of=lambda record: cells[id(record)],
        grid=grid,
        red=[cells[id(record)] for record in red],
        rest=[cells[id(r)] for r in report.records if not is_smoke(r) and not cells[id(r)].red],
        smoke=[cells[id(record)] for record in report.smoke],
        matrix=matrix,
        rows=[(family, list(rows)) for family, rows in groupby(matrix.rows, key=lambda row: row.split("/")[0])],
        columns=labels if len(labels) > 1 else [],
        environments=[(run, environment(run.header)) for run in report.runs],
        families=sorted({record.family for record in report.records if not is_smoke(record)}),
        dtypes=dtypes,
        layouts=layouts,
        layout_words=_LAYOUTS,
        words=_WORDS,
        marks=MARKS,
        wanted=POWER,
    )
    return text.visible(page)


def _cell(report: Summary, record: Record, name: str, points: int) -> _Cell:
    figures: list[tuple[str, str]] = []
    texts: list[tuple[str, str]] = []
    for key, value in _flat(record.extra):
        if isinstance(value, int) and key.endswith("_bytes"):
            key, value = key.removesuffix("_bytes"), f"{value / 2**20:.0f} MiB"
        written = _written(value)
        (texts if "\n" in written or len(written) > 80 else figures).append((key.replace("_", " "), written))
    plot = Markup(error_plot(record, points))
    return _Cell(name, record, report.column(record), case_id(record), plot, _numbers(record), tuple(figures), tuple(texts))


def _numbers(record: Record) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """What was measured, by the row that it is of; without what the record does not have."""
    token = record.first_bad_token or {}
    bad = record.first_bad_position is not None
    groups: dict[str, dict[str, Any]] = {
        "First bad row": {
            "position": record.first_bad_position,
            "schedule": record.first_bad_schedule,
            "operation": token.get("operation"),
            "verdict": token.get("word"),
            "error ratio": ratios.at_first_bad(record),
            "token expected": token.get("expected"),
            "token got": token.get("got"),
            "below the top by": token.get("deficit") or None,
            "margin": record.margin if bad else None,
            "router margin": record.routing.get("row_margin"),
        },
        "Worst row": {
            "position": record.worst_position,
            "schedule": record.worst_schedule,
            "error ratio": ratios.worst(record),
            "bound": record.bound,
            "max error": record.max_abs,
            "rmse": record.rmse,
            "noise max": record.noise_max,
            "noise rmse": record.noise_rmse,
        },
        "All rows": {
            "rows": record.rows or None,
            **{word: count or None for word, count in record.verdicts.items()},
            "least margin": None if bad else record.margin,
            "least router margin": record.routing.get("margin"),
            "rounding of router margins": record.routing.get("rounding"),
            "seed": record.seed,
        },
    }
    shown = {title: {name: value for name, value in group.items() if value is not None} for title, group in groups.items()}
    return tuple((title, tuple((name, _written(value)) for name, value in group.items())) for title, group in shown.items())


def _written(value: Any) -> str:
    return value if isinstance(value, str) else text.figure(value) if isinstance(value, float) else json.dumps(value)


def _flat(extra: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Objects in `Record.extra` become "outer: inner" entries, one level deep."""
    for key, value in extra.items():
        if isinstance(value, dict):
            yield from ((f"{key}: {inner}", entry) for inner, entry in value.items())
        else:
            yield key, value


@cache
def _asset(name: str) -> str:
    return (files("reports") / "templates" / name).read_text(encoding="utf-8")


@cache
def template(name: str) -> Template:
    """A page of reports/templates; text that goes into it is escaped."""
    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(figure=text.figure, times=text.times, duration=text.duration, one_line=text.one_line)
    script = _asset("gate.js")
    environment.globals.update(
        plural=text.plural,
        facts=ratios.facts,
        worst_ratio=ratios.worst,
        where_faults_are=WHERE_FAULTS_ARE,
        case_id=case_id,
        power_of=power_of,
        Outcome=Outcome,
        script=Markup(script),
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        style=Markup(_asset("gate.css")),
    )
    return environment.get_template(name)
