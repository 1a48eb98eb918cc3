"""gate.html: one self-contained file, readable from a mail attachment, without network and without JavaScript.

The page is a Jinja template with autoescape on; the only markup that does not come from the template is `reports.plot`, whose SVG
holds numbers alone. Scripts add filters, the detail drawer and copy buttons to what is already readable.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from harness.outcomes import Outcome
from harness.records import Record
from reports import text
from reports.plot import error_plot
from reports.summary import BAD, MARKS, POWER_WANTED, Summary, case_id, environment, is_smoke

__all__ = ["render"]

_PLOT_POINTS = 24_000  # for the whole page: about 300 kB of path data however many cells there are


@dataclass(frozen=True)
class _Cell:
    """A record with what the template needs to show it."""

    id: str
    record: Record
    column: str
    case: str
    plot: Markup
    extra: tuple[_Extra, ...]

    @property
    def outcome(self) -> str:
        return str(self.record.outcome)

    @property
    def red(self) -> bool:
        return self.record.outcome in BAD or self.record.outcome is Outcome.FLAKE

    @property
    def headroom(self) -> int | None:
        """Error ratio in percent of the bound, at most 100: the small bar in the matrix."""
        ratio, bound = self.record.error_ratio, self.record.bound
        if ratio is None or not bound:
            return None
        return min(max(round(100 * ratio / bound), 0), 100) if ratio <= bound else 100

    @property
    def tip(self) -> str:
        record = self.record
        parts = [f"{record.dtype} {record.layout}: {record.outcome}"]
        if record.error_ratio is not None:
            parts.append(f"error ratio {text.figure(record.error_ratio)} of {text.figure(record.bound)}")
        if record.first_bad_position is not None:
            parts.append(f"first bad position {record.first_bad_position}")
        if record.outcome is not Outcome.PASS and record.message:
            parts.append(text.shorten(text.one_line(record.message), 160))
        return " · ".join(parts)


@dataclass(frozen=True)
class _Extra:
    """One entry of Record.extra: a figure, or a text in a block of its own."""

    name: str
    value: str
    block: bool


def render(report: Summary) -> str:
    """The page as text."""
    points = min(96, max(24, _PLOT_POINTS // max(len(report.records), 1)))
    cells = {
        id(record): _Cell(f"c{index}", record, report.column(record), case_id(record), _plot(record, points), _extra(record.extra))
        for index, record in enumerate(report.records)
    }
    several = len(report.columns) > 1
    page = _template().render(
        report=report,
        cells=cells,
        red=[cells[id(record)] for record in report.bad + report.of(Outcome.FLAKE)],
        rest=[cells[id(r)] for r in report.records if not is_smoke(r) and not cells[id(r)].red],
        smoke=[cells[id(record)] for record in report.smoke],
        matrix=report.matrix(),
        columns=[column.label for column in report.columns] if several else [],
        environments=[(run, environment(run.header)) for run in report.runs],
        families=sorted({record.family for record in report.records if not is_smoke(record)}),
        dtypes=list(dict.fromkeys(figures.dtype for figures in report.dtypes)) or sorted({r.dtype for r in report.records}),
        marks=MARKS,
        wanted=POWER_WANTED,
    )
    return text.visible(page)


def _plot(record: Record, points: int) -> Markup:
    return Markup(error_plot(record, points))


def _extra(extra: dict[str, Any], prefix: str = "") -> tuple[_Extra, ...]:
    """Figures first, then texts; objects become dotted names, one level deep."""
    found: list[_Extra] = []
    for key, value in extra.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict) and not prefix:
            found += _extra(value, f"{key}: ")
        elif isinstance(value, str):
            found.append(_Extra(name, value, "\n" in value or len(value) > 80))
        elif isinstance(value, float):
            found.append(_Extra(name, text.figure(value), False))
        else:
            written = json.dumps(value, ensure_ascii=False)
            found.append(_Extra(name, written, len(written) > 80))
    return tuple(sorted(found, key=lambda entry: entry.block))


@cache
def _template() -> Template:
    folder = files("reports") / "templates"
    environment = Environment(
        loader=FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        figure=text.figure, times=text.times, duration=text.duration, one_line=text.one_line, shorten=text.shorten
    )
    environment.globals.update(plural=text.plural, case_id=case_id, Outcome=Outcome)
    return environment.get_template("gate.html.j2")
