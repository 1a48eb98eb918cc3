"""The mutation report: which fault each check catches, by how much, and what it looks like. Pure functions of results.

Markdown for a pull request, JSON for machines, a table for the terminal. What is not as it should be comes first, in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.mutants.results import Fate, Result
from harness.outcomes import Outcome
from harness.records import Header, plain
from reports.evidence import in_words
from reports.summary import MARKS, environment
from reports.text import code_span, markdown, one_line, plural, shorten, times

__all__ = ["as_json", "print_table", "render", "verdict"]

_WIDTH = 140  # of a message in a table
_STYLES = {Fate.CAUGHT: "green", Fate.MISSED: "bold red", Fate.WRONG_CHECK: "bold red", Fate.TIMEOUT: "yellow"}
_ABSENT = "·"


def verdict(results: Sequence[Result]) -> str:
    """One sentence: counts, the least headroom, and what is wrong."""
    faults = [result for result in results if not result.benign]
    benign = [result for result in results if result.benign]
    parts = []
    if faults:
        parts.append(
            f"{sum(r.fate is Fate.CAUGHT for r in faults)} of {plural(len(faults), 'mutant')} caught by the named check"
        )
        measured = [r for r in faults if r.fate is Fate.CAUGHT and r.headroom is not None]
        if measured:
            least = min(measured, key=lambda r: (r.headroom, r.id))
            parts.append(f"least headroom {times(least.headroom)} the bound ({least.id})")
    if benign:
        parts.append(f"{sum(r.good for r in benign)} of {plural(len(benign), 'benign change')} left alone")
    bad = [r for r in results if not r.good]
    if bad:
        parts.append(f"not as it should be: {', '.join(sorted(r.id for r in bad))}")
    return "; ".join(parts) if parts else "no mutant was selected"


def render(header: Header, results: Sequence[Result]) -> str:
    """Markdown; ends in a newline."""
    good = all(result.good for result in results)
    mark = MARKS[Outcome.PASS if good else Outcome.FAIL].glyph
    out = [f"## {mark} mutants: {markdown(verdict(results))}", ""]
    out.append(" · ".join(f"{markdown(name)} {markdown(shorten(value, 160))}" for name, value in environment(header)))
    for section in (_bad, _table, _matrix):
        if part := list(section(results)):
            out += ["", *part]
    return "\n".join(out) + "\n"


def _bad(results: Sequence[Result]) -> Iterable[str]:
    for result in _ordered(r for r in results if not r.good):
        yield f"### {markdown(result.id)}: {markdown(result.verdict)}"
        yield ""
        yield f"{markdown(result.why)} {markdown(result.message)}"
        if result.headroom is not None and result.fate is Fate.CAUGHT:
            yield f"Headroom {times(result.headroom)}, wanted {times(result.wanted)}."
        if result.diff:
            fence = "`" * max(3, 1 + _longest_run(result.diff))
            yield from ["", f"{fence}diff", result.diff, fence]
        yield ""


def _longest_run(text: str) -> int:
    longest = run = 0
    for character in text:
        run = run + 1 if character == "`" else 0
        longest = max(longest, run)
    return longest


def _table(results: Sequence[Result]) -> Iterable[str]:
    if not results:
        return
    yield "| kind | mutant | stands for | test | with the fault | without it | headroom |"
    yield "|-|-|-|-|-|-|-:|"
    for result in _ordered(results):
        test = code_span(result.check) if result.check else "every check"
        case = result.cell.split("::")[1] if result.cell.count("::") == 2 else ""
        broken = in_words(result.broken) if result.broken else f"{result.fate}: {result.message}"
        cells = [
            result.kind,
            f"{code_span(result.id)}<br>{markdown(result.why)}",
            markdown(result.report),
            f"{test}<br>{markdown(case)}",
            markdown(shorten(one_line(broken), _WIDTH)),
            markdown(shorten(one_line(in_words(result.whole) if result.whole else "–"), _WIDTH)),
            _headroom(result),
        ]
        yield f"| {' | '.join(cells)} |"


def _headroom(result: Result) -> str:
    """A factor of the bound; for an error or a crash the outcome, which leaves no doubt."""
    if result.fate is not Fate.CAUGHT:
        return result.verdict
    return times(result.headroom) if result.headroom is not None else result.broken.get("outcome", "–")


def _matrix(results: Sequence[Result]) -> Iterable[str]:
    """Checks x mutants, where more than the named check ran."""
    if all(len(result.outcomes) <= 1 for result in results):
        return
    checks = sorted({check for result in results for check in result.outcomes})
    yield f"Outcomes of all checks that ran ({_ABSENT} did not run; the named one is bold):"
    yield ""
    yield f"| mutant | {' | '.join(markdown(check.replace('_', ' ')) for check in checks)} |"
    yield f"|-|{':-:|' * len(checks)}"
    for result in _ordered(results):
        marks = []
        for check in checks:
            outcome = result.outcomes.get(check)
            glyph = _ABSENT if outcome is None else MARKS[Outcome(outcome)].glyph
            marks.append(f"**{glyph}**" if check == result.check else glyph)
        yield f"| {code_span(result.id)} | {' | '.join(marks)} |"


def _ordered(results: Iterable[Result]) -> list[Result]:
    """What is wrong first, then faults by kind, then benign ones."""
    return sorted(results, key=lambda r: (r.good, r.benign, r.kind, r.id))


def as_json(header: Header, results: Sequence[Result]) -> str:
    """Everything, for machines; `good` and `weak` as the exit code counts them."""
    found = [{**asdict(r), "good": r.good, "weak": r.weak} for r in _ordered(results)]
    report = {"verdict": verdict(results), "good": all(r.good for r in results), "header": asdict(header), "mutants": found}
    return json.dumps(plain(report), ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def print_table(console: Console, results: Sequence[Result]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (("kind", "left"), ("mutant", "left"), ("check", "left"), ("fate", "left"), ("headroom", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for result in reversed(_ordered(results)):  # the worst at the end, where the eye is
        style = _STYLES.get(result.fate, "red") if not result.good else ""
        table.add_row(
            result.kind,
            Text(one_line(result.id), style=style),
            Text(one_line(result.check or "every check"), style="dim"),
            Text(result.verdict, style=style or "green"),
            Text(_headroom(result) if result.fate is Fate.CAUGHT else ""),
        )
    console.print(table)
    for result in _ordered(r for r in results if not r.good):
        console.print(Text(f"\n{result.id}: {result.verdict}. {one_line(result.message)}", style="bold"))
        for line in result.diff.splitlines():
            style = {"+": "green", "-": "red"}.get(line[:1], "dim")
            console.print(Text(f"  {line}", style=style))
    console.print(Text(f"\n{one_line(verdict(results))}"))
