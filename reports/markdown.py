"""gate.md: what goes into a pull request or a CI job summary. At most 40 lines when green; nothing red is ever folded away.

Untrusted texts are escaped (`reports.text.markdown`, `code_span`): they cannot break a table, start a block or bring in HTML.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.check import POWER
from harness.outcomes import Outcome
from harness.records import Record
from reports import ratios
from reports.summary import MARKS, WHERE_FAULTS_ARE, Matrix, Summary, case_id, environment
from reports.text import code_span, duration, figure, markdown, one_line, plural, shorten, times

__all__ = ["render"]

_MATRIX_ROWS = 11  # more cases than that fold into families, more families into one line
_POWER_ROWS = 4
_SMOKE_ROWS = 2
_REASONS = 2
_REASON_WIDTH = 500  # a failing row, and what its experts have to do with it, whole


def render(report: Summary) -> str:
    """The Markdown text; ends in a newline."""
    out = [f"## {MARKS[report.outcome].glyph} decodegate: {markdown(report.verdict)}", ""]
    out += [f"{'<br>' * (index > 0)}{line}" for index, line in enumerate(_environment(report))]
    for section in (_failures, _words, _reasons, _matrix, _figures, _power, _smoke):
        if part := list(section(report)):
            out += ["", *part]
    return "\n".join(out) + "\n"


def _environment(report: Summary) -> Iterable[str]:
    for run in report.runs:
        pairs = dict(environment(run.header))
        command = shorten(one_line(pairs.pop("command", "")), 200)
        facts = [f"{markdown(name)} {markdown(shorten(value, 160))}" for name, value in pairs.items()]
        facts += [code_span(command, table=False)] * bool(command)
        yield f"**{markdown(run.name)}**: " * (len(report.runs) > 1) + " · ".join(facts)
        for note in run.header.notes:
            yield f"**Note:** {markdown(note)}"
    tally = " · ".join(f"{MARKS[outcome].glyph} {count} {outcome}" for outcome, count in report.counts.items())
    yield " · ".join(filter(None, [tally, f"{duration(report.duration_s)} in cells"]))


def _failures(report: Summary) -> Iterable[str]:
    """Every red cell with its replay command, in full, above everything that is green."""
    records = report.bad + report.of(Outcome.FLAKE)
    if not records:
        return
    several = len(report.columns) > 1
    columns = "first bad position | error ratio there | worst error ratio"
    yield f"| | cell | {'build | ' * several}{columns} | what happened, and how to replay it |"
    yield f"|-|-|{'-|' * several}-:|-:|-:|-|"
    for record in records:
        where = f"{markdown(case_id(record))}<br>{code_span(record.check)}<br>{markdown(_variant(record))}"
        column = f"{markdown(report.column(record))} | " if several else ""
        position = "–" if record.first_bad_position is None else str(record.first_bad_position)
        here, worst = _ratio(record, ratios.at_first_bad(record)), _ratio(record, ratios.worst(record))
        place = markdown(ratios.worst_place(record))
        what = markdown(shorten(one_line(record.message), _REASON_WIDTH)) or MARKS[record.outcome].meaning
        replay = f"<br>{code_span(record.replay)}" if record.replay else ""
        numbers = f"{position} | {here} | {worst}{' ' * bool(place)}{place}"
        yield f"| {MARKS[record.outcome].glyph} {record.outcome} | {where} | {column}{numbers} | {what}{replay} |"


def _words(report: Summary) -> Iterable[str]:
    if report.of(Outcome.FAIL):
        yield (
            "Error ratio: how far logits are from the float64 recompute, in units of the noise of the dtype. DRIFT: a row "
            "beyond the bound with the recompute's token; WRONG: with another token too, or not finite."
        )


def _ratio(record: Record, value: float | None) -> str:
    return "–" if value is None else f"**{figure(value)}** (≤ {figure(record.bound)})"


def _variant(record: Record) -> str:
    return record.dtype if record.layout in ("", "dense") else f"{record.dtype}, {record.layout}"


def _reasons(report: Summary) -> Iterable[str]:
    """infra in full; what is declared unsupported in a few lines."""
    for outcome, reason, records in report.reasons(Outcome.INFRA):
        yield f"- {_reason(outcome, reason, records)}"
    unsupported = report.reasons(Outcome.UNSUPPORTED)
    for outcome, reason, records in unsupported[:_REASONS]:
        yield f"- {_reason(outcome, reason, records)}"
    rest = sum(len(records) for _, _, records in unsupported[_REASONS:])
    if rest:
        glyph = MARKS[Outcome.UNSUPPORTED].glyph
        yield f"- {glyph} {plural(rest, 'more cell')} unsupported for other reasons (gate.html has them)"


def _reason(outcome: Outcome, reason: str, records: list[Record]) -> str:
    checks = sorted({record.check for record in records})
    where = markdown(checks[0]) if len(checks) == 1 else plural(len(checks), "check")
    text = markdown(shorten(one_line(reason), _REASON_WIDTH)) or MARKS[outcome].meaning
    return f"{MARKS[outcome].glyph} {plural(len(records), 'cell')} {outcome} ({where}): {text}"


def _matrix(report: Summary) -> Iterable[str]:
    """Case x check. A mark with the number of cells of that outcome (dtypes, layouts, builds)."""
    matrix = report.matrix()
    what = "case"
    if len(matrix.rows) > _MATRIX_ROWS:
        matrix, what = report.matrix(by_family=True), "family"
    if not matrix.rows:
        return
    yield f"| {what} | {' | '.join(markdown(check.replace('_', ' ')) for check in matrix.checks)} |"
    yield f"|-|{':-:|' * len(matrix.checks)}"
    rows = matrix.rows
    if len(rows) > _MATRIX_ROWS:
        other = {row: sum(r.outcome is not Outcome.PASS for r in _together(matrix, [row], *matrix.checks)) for row in rows}
        worst = sorted(rows, key=lambda row: -other[row])[: _MATRIX_ROWS - 1]
        rows = tuple(row for row in rows if row in worst)
    for row in rows:
        yield f"| {markdown(row)} | {' | '.join(_marks(matrix.of(row, check)) for check in matrix.checks)} |"
    if others := [row for row in matrix.rows if row not in rows]:
        yield f"| {len(others)} more | {' | '.join(_marks(_together(matrix, others, check)) for check in matrix.checks)} |"


def _together(matrix: Matrix, rows: list[str], *checks: str) -> list[Record]:
    return [record for row in rows for check in checks for record in matrix.of(row, check)]


def _marks(records: list[Record]) -> str:
    counts = {outcome: sum(record.outcome is outcome for record in records) for outcome in MARKS}
    return " ".join(f"{MARKS[outcome].glyph} {count}" for outcome, count in counts.items() if count)


def _figures(report: Summary) -> Iterable[str]:
    if not report.dtypes:
        return
    ties, rows = report.ties
    yield f"| dtype | worst error ratio (bound) | in | noise floor max | rmse | ties: {ties} of {plural(rows, 'row')} |"
    yield "|-|-:|-|-:|-:|-|"
    for dtype in report.dtypes:
        worst = dtype.worst
        ratio = f"{figure(ratios.worst(worst))} (≤ {figure(worst.bound)})" if worst else "–"
        where = f"{markdown(case_id(worst))} {markdown(worst.check)}" if worst else "–"
        noise = f"{figure(dtype.noise_max)} | {figure(dtype.noise_rmse)}"
        yield f"| {markdown(dtype.dtype)} | {ratio} | {where} | {noise} | {plural(dtype.cells, 'cell')} |"


def _power(report: Summary) -> Iterable[str]:
    if report.power:
        yield f"| check | weakest fault (times the bound, ≥ {POWER:.0f} wanted) | in | faults |"
        yield "|-|-|-|-:|"
        weak = [power for power in report.power if power.weak]
        for power in report.power[: max(_POWER_ROWS, len(weak))]:
            warning = "**weak** " if power.weak else ""
            where = f"{markdown(case_id(power.record))} {markdown(power.record.dtype)}"
            fault = f"{warning}{times(power.times)} {markdown(power.fault)}"
            yield f"| {markdown(power.check)} | {fault} | {where} | {power.faults} |"
        if rest := report.power[max(_POWER_ROWS, len(weak)) :]:
            yield f"| {plural(len(rest), 'more check')} | {times(rest[0].times)} or more | | |"
    if report.without_power and not report.power:
        yield "No fault was planted: nothing here shows that the checks can fail."
    elif report.unplanted:
        yield f"No fault was planted: {WHERE_FAULTS_ARE}."
    elif report.without_power:
        named = ", ".join(map(markdown, report.without_power[:6]))
        yield f"| no fault planted on {plural(len(report.without_power), 'check')} | {named} | | 0 |"


def _smoke(report: Summary) -> Iterable[str]:
    """One line for each checkpoint, however many checks it went through."""
    cases: dict[str, list[Record]] = {}
    for record in report.smoke:
        cases.setdefault(case_id(record), []).append(record)
    red_first = sorted(cases.items(), key=lambda item: all(record.outcome is Outcome.PASS for record in item[1]))
    for case, records in red_first[:_SMOKE_ROWS]:
        yield f"- **smoke {markdown(case)}** {' · '.join(map(_smoke_check, records))}"
    if len(red_first) > _SMOKE_ROWS:
        yield f"- and {plural(len(red_first) - _SMOKE_ROWS, 'more checkpoint')} (gate.html has the texts and figures)"


def _smoke_check(record: Record) -> str:
    words = markdown(f"{record.check.removeprefix('smoke_').replace('_', ' ')} {_variant(record)}")
    worst = ratios.worst(record)
    ratio = "" if worst is None else f" worst error ratio {figure(worst)} (≤ {figure(record.bound)})"
    message = f": {markdown(shorten(one_line(record.message), _REASON_WIDTH))}" if record.message else ""
    return f"{MARKS[record.outcome].glyph} {words}{ratio}{message}"
