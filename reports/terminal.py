"""The terminal: progress while a run goes on, and the summary after it. Quiet where all is well, exact where it is not.

On a terminal, one live block shows the bar, the counts and the current cell; a cell that does not pass scrolls by above it at
once. Anywhere else (CI logs, pipes) the same is said in plain lines without a single control character.
"""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from harness.outcomes import Outcome
from harness.records import Record
from reports.summary import BAD, MARKS, POWER_WANTED, DtypeFigures, Power, Summary, case_id
from reports.text import duration, figure, lines, one_line, plural, shorten, times

__all__ = ["Progress", "make_console", "summary"]

_FULL_FAILURES = 20  # beyond that a failure takes two lines instead of four
_PLAIN_WIDTH = 120


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file` (stdout). Markup in texts is never obeyed; away from a terminal there are no colours and no cursor."""
    stream = file or sys.stdout
    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors="replace")  # a mark that the encoding lacks is no reason to lose a report
    options: dict[str, object] = {"markup": False, "highlight": False, "emoji": False}
    if stream.isatty():
        return Console(file=stream, **options)  # type: ignore[arg-type]
    return Console(file=stream, force_terminal=False, no_color=True, color_system=None, width=_PLAIN_WIDTH, **options)  # type: ignore[arg-type]


class Progress:
    """Shows a run while it goes on; a context manager.

    >>> with Progress(132) as progress:
    ...     progress.begin("engine::llama/gqa::...")
    ...     progress.finish(record)
    """

    def __init__(self, selected: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or make_console()
        self._selected = selected
        self._clock = clock
        self._start = clock()
        self._running: dict[str, float] = {}
        self._counts: Counter[Outcome] = Counter()
        self._next_line = 0.0
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._spinner = Spinner("dots", style="dim")
            self._live = Live(get_renderable=self._block, console=self._console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Progress:
        self._start = self._clock()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    @property
    def done(self) -> int:
        return self._counts.total()

    def begin(self, cell: str) -> None:
        """A worker has started on the cell."""
        self._running[cell] = self._clock()

    def finish(self, record: Record) -> None:
        """The cell has ended; what did not pass is shown at once."""
        self._running.pop(record.cell, None)
        self._counts[record.outcome] += 1
        if record.outcome not in (Outcome.PASS, Outcome.UNSUPPORTED):
            _print(self._console, _headline(record))
        if self._live is None:
            share = self.done / max(self._selected, 1)
            if share >= self._next_line or self.done == self._selected:
                _print(self._console, Text(f"[{self.done:>{len(str(self._selected))}}/{self._selected}] ") + self._tally())
                self._next_line = share + 0.1

    def _tally(self) -> Text:
        parts = [Text(f"{MARKS[o].glyph} {self._counts[o]} {o}", MARKS[o].style) for o in MARKS if self._counts[o]]
        parts.append(Text(duration(self._clock() - self._start), "dim"))
        return Text(" · ", "dim").join(parts)

    def _block(self) -> RenderableType:
        now = self._clock()
        width = max(10, min(40, self._console.width - 60))
        filled = min(width * self.done // max(self._selected, 1), width)
        red = any(self._counts[outcome] for outcome in BAD)
        bar = Text.assemble(("━" * filled, "red" if red else "green"), ("━" * (width - filled), "bright_black"))
        top = Text("  ").append_text(bar).append(f"  {self.done}/{self._selected}  ", "bold").append_text(self._tally())
        rows: list[RenderableType] = [Text(""), _fit(top, self._console)]
        if self._running:
            cell, began = next(iter(self._running.items()))  # the one that has run longest
            more = f"  +{len(self._running) - 1} more" if len(self._running) > 1 else ""
            slow = f"  {duration(now - began)}" if now - began >= 2 else ""
            label = shorten(one_line(cell), max(self._console.width - 8 - len(more) - len(slow), 10))
            current = Table.grid(padding=(0, 1))
            current.add_row(Text(" "), self._spinner, Text.assemble((label, "dim"), (slow, "yellow"), (more, "dim")))
            rows.append(current)
        return Group(*rows)


def summary(
    report: Summary, console: Console | None = None, *, files: Iterable[Path | str] = (), elapsed_s: float | None = None
) -> None:
    """What a user looks at most: failures first, then the figures that make the rest credible, then where to read on.

    elapsed_s: time on the clock, where the caller knows it; the records only know the time in cells.
    """
    console = console or make_console()
    out: list[RenderableType] = []
    attention = report.bad + report.of(Outcome.FLAKE)
    compact = len(attention) > _FULL_FAILURES
    for record in attention:
        out += _failure(report, record, compact)
    if compact:
        out.append(Text(""))
    for outcome, reason, records in report.reasons(Outcome.INFRA):
        out += [_marked(outcome, f"{plural(len(records), 'cell')}  {one_line(reason) or MARKS[outcome].meaning}"), Text("")]
    out += _verdict(report, elapsed_s)
    facts = Table.grid(padding=(0, 2))
    for _ in range(3):
        facts.add_column(overflow="fold")
    facts.columns[0].style = "dim"
    for row in _facts(report, files):
        facts.add_row(*row)
    if facts.row_count:
        out += [Text(""), Padding(facts, (0, 2))]
    console.print()
    for item in out:
        _print(console, item)
    console.print()


def _failure(report: Summary, record: Record, compact: bool) -> list[RenderableType]:
    headline = _headline(record)
    if len(report.columns) > 1:
        headline.append("  ").append(one_line(report.column(record)), "cyan")
    numbers = _numbers(record)
    replay = Text("    ").append(one_line(record.replay), "bold") if record.replay else None
    if compact:
        return [headline, *([replay] if replay else [])]
    block: list[RenderableType] = [headline]
    if numbers:
        block.append(Text("    ") + Text(" · ").join(numbers))
    if record.message and (record.outcome is not Outcome.FAIL or record.first_bad_position is None):
        block.append(Text("    ").append(one_line(record.message)))
    tail = lines(record.detail)[-1:] if record.outcome in (Outcome.ERROR, Outcome.CRASH, Outcome.TIMEOUT) else []
    if tail and one_line(tail[0]) not in one_line(record.message):
        block.append(Text("    ").append(one_line(tail[0]), "dim"))
    return [*block, *([replay] if replay else []), Text("")]


def _headline(record: Record) -> Text:
    """Mark, case, check, dtype: enough to know which cell it is without its full id."""
    text = _marked(record.outcome, f"{case_id(record)}  ")
    text.append(one_line(record.check), "bold").append(f"  {one_line(record.dtype)}", "dim")
    if record.layout not in ("", "dense"):
        text.append(f" {one_line(record.layout)}", "dim")
    if record.outcome is not Outcome.FAIL:
        text.append(f"  {record.outcome}", MARKS[record.outcome].style)
    return text


def _marked(outcome: Outcome, text: str) -> Text:
    return Text.assemble("  ", (MARKS[outcome].glyph, MARKS[outcome].style), " ", one_line(text) + " " * text.endswith("  ") * 2)


def _numbers(record: Record) -> list[Text]:
    parts = []
    if record.first_bad_position is not None:
        parts.append(Text.assemble("first bad position ", (str(record.first_bad_position), "bold")))
    if record.error_ratio is not None:
        bound = f" (bound {figure(record.bound)})" if record.bound is not None else ""
        parts.append(Text.assemble("error ratio ", (figure(record.error_ratio), "bold"), bound))
    token = record.first_bad_token or {}
    if "expected" in token and "got" in token:
        parts.append(Text(f"token {one_line(str(token['expected']))} expected, {one_line(str(token['got']))} got"))
    if record.margin is not None and parts:
        parts.append(Text(f"margin {figure(record.margin)}", "dim"))
    return parts


def _verdict(report: Summary, elapsed_s: float | None) -> list[RenderableType]:
    mark = MARKS[report.outcome]
    style = mark.style if report.outcome is not Outcome.PASS else "bold green"
    spent = duration(elapsed_s) if elapsed_s is not None else f"{duration(report.duration_s)} in cells"
    head: list[RenderableType] = [Text.assemble("  ", (f"{mark.glyph} {report.verdict}", style), ("  ", ""), (spent, "dim"))]
    if len(report.counts) > 1:
        counts = Text(" · ", "dim").join([Text(f"{MARKS[o].glyph} {n} {o}", MARKS[o].style) for o, n in report.counts.items()])
        head.append(Text("    ") + counts)
    return head


def _facts(report: Summary, files: Iterable[Path | str]) -> Iterable[Sequence[RenderableType]]:
    if report.bad:
        pattern = [f"{one_line(check)} {red}/{total}" for check, red, total in report.bad_by_check]
        yield "wrong in", Text(pattern[0]), Text("")
        for entry in pattern[1:6]:
            yield "", Text(entry), Text("")
        if len(pattern) > 6:
            yield "", Text(f"and {plural(len(pattern) - 6, 'more check')}", "dim"), Text("")
    for index, dtype in enumerate(report.dtypes):
        yield ("error" if index == 0 else ""), *_error_fact(dtype)
    ties, rows = report.ties
    if rows:
        yield "ties", Text(f"{ties} of {plural(rows, 'row')}"), Text("")
    if report.power:
        yield "power", *_power_fact(report.power[0])
    if report.without_power:
        missing = report.without_power
        yield "", Text(f"none on {plural(len(missing), 'check')}", "yellow"), Text(shorten(", ".join(missing), 60), "dim")
    for record in report.smoke:
        yield "smoke", Text(f"{MARKS[record.outcome].glyph} {record.outcome}", MARKS[record.outcome].style), _smoke_fact(record)
    for outcome, reason, records in report.reasons(Outcome.UNSUPPORTED)[:3]:
        yield str(outcome), Text(plural(len(records), "cell")), Text(one_line(reason), "dim")
    for run in report.runs:
        for note in run.header.notes:
            yield "note", Text(one_line(note), "yellow"), Text("")
    shown = [str(path) for path in files]
    if shown:
        yield "reports", Text("\n".join(shown)), Text("")


def _error_fact(figures: DtypeFigures) -> tuple[Text, Text]:
    worst = figures.worst
    noise = f"noise floor {figure(figures.noise_max)} max, {figure(figures.noise_rmse)} rmse"
    if worst is None:
        return Text(one_line(figures.dtype)), Text(noise, "dim")
    beyond = worst.bound is not None and not (worst.error_ratio or 0.0) <= worst.bound
    ratio = f"{one_line(figures.dtype)}  {figure(worst.error_ratio)} of {figure(worst.bound)}"
    return Text(ratio, "red" if beyond else ""), Text(f"{case_id(worst)} {one_line(worst.check)} · {noise}", "dim")


def _power_fact(power: Power) -> tuple[Text, Text]:
    wanted = f", below the {POWER_WANTED:.0f}× it should reach" if power.weak else ""
    where = f"{one_line(power.fault)} on {one_line(power.check)}, {case_id(power.record)}"
    return Text(f"weakest {times(power.times)} the bound{wanted}", "yellow" if power.weak else ""), Text(where, "dim")


def _smoke_fact(record: Record) -> Text:
    parts = [case_id(record), record.dtype]
    if record.error_ratio is not None:
        parts.append(f"error ratio {figure(record.error_ratio)} of {figure(record.bound)}")
    if record.message:
        parts.append(record.message)
    return Text(one_line(" · ".join(part for part in parts if part)), "dim")


def _fit(text: Text, console: Console) -> Text:
    text.truncate(console.width - 1, overflow="ellipsis")
    return text


def _print(console: Console, item: RenderableType) -> None:
    """Texts are not wrapped by us, so that a command can be copied whole; tables are."""
    console.print(item, soft_wrap=isinstance(item, Text))
