"""The before/after table: test, before, after. A pure function of a record file whose header names two builds.

What is wrong after the change comes first, then what it repaired, then what could not be asked of the base; each of these
rows is shown in full. Only cells that pass on both builds are counted together.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.bench.statistics import Interval, interval, ratio, verdict
from harness.outcomes import WRONG, Outcome
from harness.records import Header, Record, RecordError, last_words, plain
from reports import html
from reports.bench import METRICS, interval_note, interval_text
from reports.progress import follow
from reports.summary import MARKS, case_id, environment
from reports.text import build_name, code_span, figure, markdown, one_line, plural, shorten, visible, write_text

__all__ = ["Row", "Table", "as_json", "in_words", "outcome_text", "print_progress", "render", "write"]

_WIDTH = 300  # of an error text in a field
_KINDS = {  # of row, in the order in which they are shown -> heading
    "broken": "Wrong after the change, right before it",
    "wrong": "Wrong after the change",
    "not run after": "Could not be judged after the change",
    "repaired": "Repaired",
    "not run before": "Cannot be run on the build before",
    "same": "Right before and after",
    "unsupported": "Declared as not supported, before and after",
}


@dataclass(frozen=True)
class Row:
    """One cell on both builds."""

    before: Record
    after: Record

    @property
    def kind(self) -> str:
        if self.after.outcome in WRONG or self.after.outcome is Outcome.VACUOUS:
            return "broken" if self.before.outcome is Outcome.PASS else "wrong"
        if self.after.outcome is not Outcome.PASS:
            both = self.before.outcome is self.after.outcome is Outcome.UNSUPPORTED
            return "unsupported" if both else "not run after"
        if self.before.outcome is Outcome.PASS:
            return "same"
        return "not run before" if reason(self.before) else "repaired"


@dataclass(frozen=True)
class Group:
    """Rows of one check that say the same word for word; a cell with numbers of its own stands alone."""

    kind: str
    rows: tuple[Row, ...]

    @property
    def check(self) -> str:
        return self.rows[0].after.check

    @property
    def cells(self) -> list[str]:
        """Case with its variants: `llama/gqa (float32, bfloat16)`."""
        variants: dict[str, list[str]] = defaultdict(list)
        for row in self.rows:
            record = row.after
            variants[case_id(record)].append(
                record.dtype if record.layout in ("", "dense") else f"{record.dtype} {record.layout}"
            )
        return [f"{case} ({', '.join(names)})" for case, names in variants.items()]


class Table:
    """Rows of a before/after run. Raises RecordError where the records are not those of two builds."""

    def __init__(self, header: Header, records: Sequence[Record], speed: Mapping[str, Any] | None = None) -> None:
        self.header = header
        self.speed = speed
        self.builds = {str(build.get("role")): build for build in header.builds}
        if set(self.builds) != {"before", "after"}:
            raise RecordError(
                "the header names no build before and after a change; these are not records of `decodegate evidence`"
            )
        sides: dict[str, dict[str, Record]] = {"before": {}, "after": {}}
        for record in records:
            if record.build not in sides:
                raise RecordError(f"{record.cell}: build {record.build!r} is neither before nor after")
            sides[record.build][record.cell] = record
        self.rows = [Row(sides["before"][cell], after) for cell, after in sides["after"].items() if cell in sides["before"]]
        self.missing = max(header.selected - len(self.rows), 0)

    @cached_property
    def groups(self) -> dict[str, list[Group]]:
        """Kind of row -> groups, in the order in which they are shown."""
        found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in sorted(self.rows, key=lambda row: (row.after.check, case_id(row.after), row.after.dtype, row.after.layout)):
            words = (row.after.family,) if row.kind == "same" else (_words(row.before), _words(row.after))
            key: tuple[str, ...] = (row.kind, row.after.check, *words)
            found[key].append(row)
        groups = [Group(key[0], tuple(rows)) for key, rows in found.items()]
        return {
            kind: [group for group in groups if group.kind == kind] for kind in _KINDS if any(g.kind == kind for g in groups)
        }

    def count(self, kind: str) -> int:
        return sum(row.kind == kind for row in self.rows)

    @property
    def outcome(self) -> Outcome:
        if self.count("broken") or self.count("wrong"):
            return Outcome.FAIL
        if self.count("not run after") or self.missing:
            return Outcome.INFRA
        return Outcome.PASS if self.rows else Outcome.VACUOUS

    @property
    def verdict(self) -> str:
        """One sentence."""
        parts = []
        for kind, text in (
            ("broken", "broken by the change"),
            ("wrong", "wrong before and after"),
            ("not run after", "not judged"),
        ):
            if number := self.count(kind):
                parts.append(f"{plural(number, 'cell')} {text}")
        if number := self.count("repaired"):
            parts.append(f"{plural(number, 'cell')} repaired")
        if number := self.count("not run before"):
            parts.append(f"{number} only on the build after")
        if number := self.count("same"):
            parts.append(f"{number} right before and after")
        if number := self.count("unsupported"):
            parts.append(f"{number} declared as not supported")
        if self.missing:
            parts.append(f"{self.missing} of {self.header.selected} not run, the run was cut short")
        return ", ".join(parts) or "no cell was run"

    def label(self, role: str) -> str:
        """`before (1a2b3c4d5e)`."""
        return f"{role} ({build_name(self.builds[role])})"


def reason(record: Record) -> str:
    """Why a build could not be asked; empty where it was."""
    return str(record.extra.get("cannot_run", ""))


def _words(record: Record) -> str:
    """What tells one field from another."""
    return outcome_text(record) if record.outcome is not Outcome.PASS else "pass"


def outcome_text(record: Record) -> str:
    """One field of the table: the numbers, or the outcome with the last line of its error."""
    if why := reason(record):
        return f"cannot run: {why}"
    return in_words(vars(record))


def in_words(fields: Mapping[str, Any]) -> str:
    """The same for fields of a record, by their names; numbers may be texts such as `nan`."""
    outcome, error_ratio = str(fields["outcome"]), fields["error_ratio"]
    if outcome in ("pass", "fail") and error_ratio is not None:
        error, bound = _figure(fields["max_abs"]), _figure(fields["bound"])
        position = fields["first_bad_position"]
        if position is None:
            return f"{outcome}: max abs difference {error}, error ratio {_figure(error_ratio)} (≤ {bound})"
        numbers = f"max abs difference {error}, worst error ratio {_figure(error_ratio)} (≤ {bound})"
        return f"{outcome}: {numbers}; first bad position {position}"
    said = fields["message"]
    if outcome in ("crash", "timeout") and (last := last_words(fields["detail"])):
        said = f"{said}; {last}"
    return f"{outcome}: {said}" if said else outcome


def _figure(value: float | str | None) -> str:
    return value if isinstance(value, str) else figure(value)


def render(table: Table) -> str:
    """Markdown, ready to paste; ends in a newline."""
    out = [
        f"## {MARKS[table.outcome].glyph} before/after: {markdown(table.verdict)}",
        "",
        *_builds(table),
        *_environment(table),
    ]
    for kind, groups in table.groups.items():
        out += [
            "",
            f"**{_KINDS[kind]}**",
            "",
            f"| test | {markdown(table.label('before'))} | {markdown(table.label('after'))} |",
            "|-|-|-|",
        ]
        out += [f"| {_test(group)} | {_field(group, 'before')} | {_field(group, 'after')} |" for group in groups]
    if table.speed is not None:
        out += ["", "**Speed**", "", *_speed(table.speed)]
    return "\n".join(out) + "\n"


def _builds(table: Table) -> Iterator[str]:
    for role in ("before", "after"):
        subject = str(table.builds[role].get("subject", ""))
        yield f"- {markdown(table.label(role))}{': ' + markdown(shorten(one_line(subject), 100)) if subject else ''}"


def _environment(table: Table) -> Iterator[str]:
    yield "- " + " · ".join(
        f"{markdown(name)} {markdown(shorten(one_line(value), 160))}" for name, value in facts(table.header)
    )
    yield from (f"- note: {markdown(note)}" for note in table.header.notes)


def facts(header: Header) -> list[tuple[str, str]]:
    """(name, value) of what the run depended on; the commits are the builds' own, and the lock's wait is always said."""
    pairs = [(name, value) for name, value in environment(header) if name not in ("commit", "lock wait", "command")]
    return [*pairs, ("lock wait", f"{header.lock_wait_s:.1f} s"), ("command", header.command)]


def _test(group: Group) -> str:
    cells = (
        ", ".join(group.cells) if group.kind != "same" else f"{plural(len(group.rows), 'cell')} of {group.rows[0].after.family}"
    )
    return f"{code_span(group.check)}<br>{markdown(cells)}"


def _field(group: Group, role: str) -> str:
    records = [getattr(row, role) for row in group.rows]
    return f"{MARKS[_worst(records)].glyph} {markdown(shorten(one_line(_sum(records)), _WIDTH))}"


def _worst(records: Iterable[Record]) -> Outcome:
    return min((record.outcome for record in records), key=list(MARKS).index)


def _sum(records: Sequence[Record]) -> str:
    """The text of one field for all of a group's cells: their common words; of those that passed, the worst of each dtype."""
    if len(records) == 1 or any(record.outcome is not Outcome.PASS for record in records):
        return outcome_text(records[0])
    dtypes = list(dict.fromkeys(record.dtype for record in records))
    texts = []
    for dtype in dtypes:
        members = [record for record in records if record.dtype == dtype and record.error_ratio is not None]
        if members:
            worst = max(members, key=lambda record: record.error_ratio or 0.0)
            numbers = f"{figure(worst.max_abs)}, error ratio {figure(worst.error_ratio)} (≤ {figure(worst.bound)})"
            texts.append(f"{dtype} {numbers}" if len(dtypes) > 1 else numbers)
    return f"pass: max abs difference {'; '.join(texts)}" if texts else "pass"


@dataclass(frozen=True)
class Speed:
    """One metric on both builds, in tokens a second; None where the build before could not be measured."""

    metric: str
    after: Interval
    before: Interval | None = None
    ratio: Interval | None = None  # after / before, paired by round

    @property
    def verdict(self) -> str:
        return "not measured before" if self.ratio is None else verdict(self.ratio)


def speed_rows(result: Mapping[str, Any]) -> list[Speed]:
    """Rows of a result of `harness.bench.run.measure` whose peers are the builds "after" and "before"."""
    samples = {peer["name"]: peer["samples"] for peer in result["peers"]}
    found = []
    for metric, field in METRICS.items():
        after = [sample[field] for sample in samples["after"]]
        if "before" not in samples:
            found.append(Speed(metric, interval(after)))
            continue
        before = [sample[field] for sample in samples["before"]]
        found.append(Speed(metric, interval(after), interval(before), ratio(after, before)))
    return found


def speed_notes(result: Mapping[str, Any]) -> list[str]:
    """What the figures are, and what is to be said of them."""
    notes = [
        f"{result['checkpoint']}, prompt of {result['prompt_tokens']} tokens, greedy decode of {result['decode_tokens']}, "
        f"in interleaved rounds; median [interval], tokens a second; {interval_note(result['rounds'])}; ~ = no difference shown"
    ]
    notes += [f"BLAS {peer['environment']['blas']}" for peer in result["peers"] if peer["name"] == "after"]
    notes += [f"not measured: {missing['name']}: {missing['reason']}" for missing in result["missing"]]
    return notes + [f"warning: {warning}" for warning in result["warnings"]]


def _speed(result: Mapping[str, Any]) -> Iterator[str]:
    yield "| metric | before | after | after / before | n | |"
    yield "|-|-:|-:|-:|-:|-|"
    for row in speed_rows(result):
        sides = " | ".join(markdown(interval_text(side)) for side in (row.before, row.after, row.ratio))
        yield f"| {row.metric} | {sides} | {row.after.n} | {row.verdict} |"
    yield ""
    yield from (f"- {markdown(note)}" for note in speed_notes(result))


def as_json(table: Table) -> str:
    """The table for machines: every row, with both records' outcomes and numbers."""
    rows = [
        {"cell": row.after.cell, "kind": row.kind, **{role: _numbers(getattr(row, role)) for role in ("before", "after")}}
        for row in table.rows
    ]
    header = asdict(table.header)
    report = {"verdict": table.verdict, "outcome": table.outcome.value, "header": header, "rows": rows, "speed": table.speed}
    return json.dumps(plain(report), ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _numbers(record: Record) -> dict[str, Any]:
    names = ("message", "error_ratio", "bound", "max_abs", "rmse", "first_bad_position", "duration_s")
    return {"outcome": record.outcome.value, "text": outcome_text(record)} | {name: getattr(record, name) for name in names}


def as_html(table: Table) -> str:
    page = html.template("evidence.html.j2").render(
        table=table,
        kinds=_KINDS,
        marks=MARKS,
        environment=facts(table.header),
        speed=speed_rows(table.speed) if table.speed else [],
        speed_notes=speed_notes(table.speed) if table.speed else [],
        interval_text=interval_text,
        field=lambda group, role: (
            _worst([getattr(row, role) for row in group.rows]),
            _sum([getattr(row, role) for row in group.rows]),
        ),
    )
    return visible(page)


def write(table: Table, directory: Path) -> dict[str, Path]:
    """Write evidence.md, .html and .json; returns their paths by these endings."""
    directory.mkdir(parents=True, exist_ok=True)
    written = {}
    for ending, text in (("md", render(table)), ("html", as_html(table)), ("json", as_json(table))):
        written[ending] = directory / f"evidence.{ending}"
        write_text(written[ending], text)
    return written


def print_progress(console: Console, pairs: Iterable[tuple[Record, Record]], total: int) -> Iterator[tuple[Record, Record]]:
    """Passes pairs on and shows how far they are, and one line for each that differs."""
    for before, after in follow(console, "before/after", pairs, total):
        if before.outcome is not after.outcome or after.outcome in WRONG:
            console.print(f"{after.cell}: {before.outcome} -> {after.outcome}", soft_wrap=True)
        yield before, after
