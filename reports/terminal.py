"""The terminal: the summary after a run. Quiet where all is well, exact where it is not."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

from rich.console import Console
from rich.text import Text

from harness.check import POWER
from harness.choice import in_words
from harness.outcomes import Outcome
from harness.records import Record, last_words
from reports import frames, ratios
from reports.summary import MARKS, WHERE_FAULTS_ARE, DtypeFigures, Power, Summary, case_id
from reports.text import duration, figure, one_line, plural, times

__all__ = ["dotted", "headline", "make_console", "print_line", "summary"]

_FULL_FAILURES = 20  # beyond that a failure takes two or three lines instead of four, and those of one cause share them
_PLAIN_WIDTH = 120
_MESSAGE_WIDTH = 200  # of a failure that takes few lines

Key = TypeVar("Key")


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file` (stdout). Markup in texts is never obeyed; away from a terminal there is no colour and no cursor."""
    stream = file or sys.stdout
    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors="replace")  # a mark that the encoding lacks is no reason to lose a report
    options: dict[str, object] = {"markup": False, "highlight": False, "emoji": False}
    if stream.isatty():
        return Console(file=stream, **options)  # type: ignore[arg-type]
    return Console(file=stream, force_terminal=False, no_color=True, color_system=None, width=_PLAIN_WIDTH, **options)  # type: ignore[arg-type]


def summary(
    report: Summary, console: Console | None = None, *, files: Iterable[Path | str] = (), elapsed_s: float | None = None
) -> None:
    """What a user looks at most: failures first, then the figures that make the rest credible, then where to read on.

    elapsed_s: time on the clock, where the caller knows it; the records only know the time in cells.
    """
    console = console or make_console()
    out: list[Text] = []
    attention = report.bad + report.of(Outcome.FLAKE)
    compact = len(attention) > _FULL_FAILURES
    if compact:
        for records in _grouped(attention, _cause):
            out += _alike(report, records) if len(records) > 1 else _brief(report, records[0], console.width)
        out.append(Text(""))
    else:
        for record in attention:
            out += _failure(report, record)
    for outcome, reason, records in report.reasons(Outcome.INFRA):
        mark = MARKS[outcome]
        what = f" {plural(len(records), 'cell')} {outcome}: {one_line(reason) or mark.meaning}"
        out += [Text.assemble("  ", (mark.glyph, mark.style), what), Text("")]
    out += [*_verdict(report, elapsed_s), Text(""), *_facts(report, files, console.width - 1 if console.is_terminal else None)]
    console.print()
    for text in out:
        print_line(console, text)
    console.print()


def _failure(report: Summary, record: Record) -> list[Text]:
    """All that helps to find the fault, and an empty line."""
    lines = [*_numbers(record), *_said(record), *_origin(record)]
    return [_named(report, record), *map(_indented, lines), *_after(record), Text("")]


def _brief(report: Summary, record: Record, width: int) -> list[Text]:
    """The same in few lines, each cut; the figures are on the first where they fit, without the tokens."""
    head, numbers = _named(report, record), dotted(_texts(ratios.facts(record)))
    lines = [*_said(record), *_origin(record)]
    for line in lines:
        line.truncate(_MESSAGE_WIDTH, overflow="ellipsis")
    if numbers and head.cell_len + numbers.cell_len + 2 < width:
        head.append("  ").append_text(numbers)
    elif numbers:
        lines.insert(0, numbers)
    return [head, *map(_indented, lines), *_after(record)]


def _cause(record: Record) -> tuple[object, ...]:
    """What makes failures one and the same; without a message nothing does."""
    return record.outcome, record.message or record.cell, record.build, record.target, frames.innermost(record.detail)


def _alike(report: Summary, records: Sequence[Record]) -> list[Text]:
    """Many cells, one cause: their number, the message whole, and how to replay the first."""
    first, cases = records[0], {case_id(record) for record in records}
    mark = MARKS[first.outcome]
    where = f" {one_line(cases.pop())} " if len(cases) == 1 else ""
    head = Text.assemble("  ", (mark.glyph, mark.style), where, f" {plural(len(records), 'cell')} {first.outcome}: ")
    head.append(one_line(first.message))
    if len(report.columns) > 1:
        head.append(f"  {one_line(report.column(first))}", "cyan")
    return [head, *map(_indented, _origin(first)), *_after(first)]


def _named(report: Summary, record: Record) -> Text:
    head = headline(record)
    return head.append(f"  {one_line(report.column(record))}", "cyan") if len(report.columns) > 1 else head


def _said(record: Record) -> list[Text]:
    """The message, where the figures do not say the same: a token may be wrong within the bound, or come without logits."""
    ratio = ratios.at_first_bad(record)
    told = record.outcome is Outcome.FAIL and ratio is not None and not ratio <= (record.bound or 0.0)
    return [Text(one_line(record.message))] if record.message and not told else []


def _origin(record: Record) -> list[Text]:
    """Where the target's code broke and the last thing that it wrote, unless that is the message again."""
    if record.outcome not in (Outcome.ERROR, Outcome.CRASH, Outcome.TIMEOUT):
        return []
    words = one_line(last_words(record.detail))
    unqualified = re.sub(r"^[\w.]+\.(?=\w+(?::|$))", "", words)  # a traceback names an exception's module, a message does not
    parts = [frames.innermost(record.detail), words if unqualified not in one_line(record.message) else ""]
    return [dotted(Text(part, "dim") for part in parts if part)] if any(parts) else []


def _after(record: Record) -> list[Text]:
    hint = in_words(record.routing, one_line(record.dtype))
    after = [Text(hint, "yellow")] if hint else []
    return [*map(_indented, after), *([Text(f"    {one_line(record.replay)}")] if record.replay else [])]


def _indented(text: Text) -> Text:
    return Text("    ").append_text(text)


def headline(record: Record) -> Text:
    """Mark, case, check, dtype: enough to know which cell it is without its full id."""
    mark = MARKS[record.outcome]
    text = Text.assemble("  ", (mark.glyph, mark.style), f" {one_line(case_id(record))}  ", (one_line(record.check), "bold"))
    layout = f" {record.layout}" if record.layout not in ("", "dense") else ""
    text.append(f"  {one_line(record.dtype + layout)}", "dim")
    if record.outcome is not Outcome.FAIL:
        text.append(f"  {record.outcome}", mark.style)
    return text


def _numbers(record: Record) -> list[Text]:
    """A line on the first bad row and one on the worst, where that is another; one line where no row is bad."""
    first, worst = _texts(ratios.of_first_bad(record)), _texts(ratios.of_worst(record))
    token = record.first_bad_token or {}
    if "expected" in token and "got" in token and ratios.finite_at_first_bad(record):
        expected, got = one_line(str(token["expected"])), one_line(str(token["got"]))
        first.append(Text(f"token {expected} as expected" if expected == got else f"token {expected} expected, {got} got"))
    if record.margin is not None and first + worst:
        (first or worst).append(Text(f"margin {figure(record.margin)}", "dim"))
    return [dotted(parts) for parts in (first, worst) if parts]


def _texts(facts: Iterable[ratios.Fact]) -> list[Text]:
    return [Text.assemble(fact.before, (fact.value, "bold"), fact.after) for fact in facts]


def _verdict(report: Summary, elapsed_s: float | None) -> list[Text]:
    mark = MARKS[report.outcome]
    style = mark.style if report.outcome is not Outcome.PASS else "bold green"
    spent = duration(elapsed_s) if elapsed_s is not None else f"{duration(report.duration_s)} in cells"
    head = [Text.assemble("  ", (f"{mark.glyph} {report.verdict}", style), ("  ", ""), (spent, "dim"))]
    if len(report.counts) > 1:
        counts = dotted([Text(f"{MARKS[o].glyph} {n} {o}", MARKS[o].style) for o, n in report.counts.items()])
        head.append(Text("    ") + counts)
    return head


def _facts(report: Summary, files: Iterable[Path | str], width: int | None) -> Iterable[Text]:
    """Label and text; what says where a figure comes from is cut to the width, if there is one, all else is whole."""
    pattern = [(one_line(check), f"{red}/{total}") for check, red, total in report.bad_by_check]
    yield from _block("wrong in", [Text(f"{share:>7}  {check}") for check, share in pattern[:6]], width)
    if len(pattern) > 6:
        yield _labelled("", Text(f"         and {plural(len(pattern) - 6, 'more check')}", "dim"))
    yield from _block("error", _error_facts(report.dtypes), width)
    ties, rows = report.ties
    if rows:
        yield _labelled(
            "ties", Text(f"{ties} of {plural(rows, 'row')}").append("  greedy choices within twice the bound", "dim")
        )
    if report.power:
        yield from _block("power", [_power_fact(report.power[0])], width)
    if missing := report.without_power:
        fact = Text(f"no fault planted on {plural(len(missing), 'check')}", "yellow").append(f"  {', '.join(missing)}", "dim")
        yield from _block("" if report.power else "power", [fact], width)
    if report.unplanted:
        yield _labelled("power", Text(f"none planted: {WHERE_FAULTS_ARE}", "dim"))
    yield from _block("smoke", _smoke_facts(report.smoke), width)
    for outcome, reason, records in report.reasons(Outcome.UNSUPPORTED)[:3]:
        fact = Text(f"{plural(len(records), 'cell')} {outcome}").append(f"  {one_line(reason)}", "dim")
        yield from _block(MARKS[outcome].glyph, [fact], width)
    for run in report.runs:
        for note in run.header.notes:
            yield _labelled("note", Text(one_line(note), "yellow"))
    for index, path in enumerate(files):
        yield _labelled("" if index else "reports", Text(str(path)))


def _block(label: str, facts: Iterable[Text], width: int | None) -> Iterable[Text]:
    for index, fact in enumerate(facts):
        line = _labelled("" if index else label, fact)
        if width is not None:
            line.truncate(width, overflow="ellipsis")
        yield line


def _labelled(label: str, fact: Text) -> Text:
    return Text.assemble((f"  {label:<9} ", "dim"), fact)


def _error_facts(figures: Sequence[DtypeFigures]) -> Iterable[Text]:
    """Worst error ratio against its bound, and the noise floor that it is measured with, by dtype."""
    names = [one_line(entry.dtype) for entry in figures]
    worsts = [_worst_ratio(entry.worst) if entry.worst else "" for entry in figures]
    noises = [f"noise floor {figure(entry.noise_max)}" for entry in figures]
    for entry, name, ratio, noise in zip(figures, names, worsts, noises, strict=True):
        worst = entry.worst
        beyond = worst is not None and worst.bound is not None and not (ratios.worst(worst) or 0.0) <= worst.bound
        line = Text(f"{name:<{max(map(len, names))}}  ").append(f"{ratio:<{max(map(len, worsts))}}", "red" if beyond else "")
        where = f"  {case_id(worst)} {worst.check}" if worst else ""
        yield line.append(f"  {noise:<{max(map(len, noises))}}", "dim").append(one_line(where).rjust(len(where)), "dim")


def _worst_ratio(record: Record) -> str:
    if not ratios.finite(record):
        return "not finite"
    return f"worst ratio {figure(ratios.worst(record))} (bound {figure(record.bound)})"


def _power_fact(power: Power) -> Text:
    text = Text(f"weakest planted fault {times(power.times)} the bound", "yellow" if power.weak else "")
    if power.weak:
        text.append(f", at least {POWER:.0f}× is wanted", "yellow")
    return text.append(f"  {one_line(power.fault)} on {one_line(power.check)}, {case_id(power.record)}", "dim")


def _smoke_facts(records: Sequence[Record]) -> Iterable[Text]:
    """One line for what passed on a checkpoint in a dtype, and one or two for each record of it that did not."""
    for group in _grouped(records, lambda record: (case_id(record), record.dtype)):
        case, dtype = case_id(group[0]), group[0].dtype
        passed = [record for record in group if record.outcome is Outcome.PASS]
        measured = [record for record in passed if record.error_ratio is not None]
        if passed:
            mark = MARKS[Outcome.PASS]
            line = Text.assemble(
                (mark.glyph, mark.style), f" {one_line(case)} {one_line(dtype)}  {plural(len(passed), 'check')}"
            )
            if measured:
                worst = max(measured, key=lambda record: record.error_ratio or 0.0)
                line.append(f"  {_worst_ratio(worst)}").append(f"  {one_line(worst.check.removeprefix('smoke_'))}", "dim")
            yield line
        for record in group:
            if record.outcome is Outcome.PASS:
                continue
            mark = MARKS[record.outcome]
            name = f" {one_line(case)} {one_line(record.check.removeprefix('smoke_'))} {one_line(dtype)}"
            yield (Text.assemble((mark.glyph, mark.style), name).append("  ").append_text(dotted(_texts(ratios.facts(record)))))
            if record.message:
                yield Text(f"  {one_line(record.message)}", "dim")


def _grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> Iterable[list[Record]]:
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups.values()


def dotted(parts: Iterable[Text]) -> Text:
    text = Text()
    for index, part in enumerate(parts):
        text.append(" · " * (index > 0), "dim").append_text(part)
    return text


def print_line(console: Console, text: Text) -> None:
    """Lines are not broken by us, so that a command can be copied whole."""
    console.print(text, soft_wrap=True)
