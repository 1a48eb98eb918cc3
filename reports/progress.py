"""Progress while a run goes on.

On a terminal, one live block shows the bar, the counts and what runs; a cell that does not pass scrolls by above it at once.
Anywhere else (CI logs, pipes) the same is said in plain lines without a single control character.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from harness.outcomes import Outcome
from harness.records import Record
from reports.summary import BAD, MARKS
from reports.terminal import dotted, headline, make_console, print_line
from reports.text import duration, one_line, shorten

__all__ = ["Progress", "follow"]

Item = TypeVar("Item")

_TICK_S = 1.0
_MOMENT_S = 3.0  # away from a terminal, at most one line in so many seconds (what did not pass and the last one apart),
_SILENCE_S = 30.0  # and one at least in so many


class Progress:
    """Shows a run while it goes on; a context manager.

    >>> with Progress(132) as progress:
    ...     progress.begin("engine::llama/gqa::...")
    ...     progress.finish(record)

    Away from a terminal there is a line for each tenth of the cells, for each stage that lasts (see `say`), and for what runs
    where nothing has come for half a minute.
    """

    def __init__(
        self,
        selected: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        headlines: bool = True,
    ) -> None:
        """`selected`: records that will come, 0 for work that has none. `headlines`: show at once what did not pass."""
        self._console = console or make_console()
        self._headlines = headlines
        self._selected = selected
        self._clock = clock
        self._start = clock()
        self._running: dict[str, float] = {}
        self._stage = ""  # what the one that runs is at
        self._counts: Counter[Outcome] = Counter()
        self._next_line = 0.0
        self._last_line = self._start  # when, away from a terminal
        self._untold = False  # the stage has not had its line
        self._live: Live | None = None
        self._mutex = threading.RLock()
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._spinner = Spinner("dots", style="dim")
            self._live = Live(get_renderable=self._block, console=self._console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Progress:
        self._start = self._last_line = self._clock()
        if self._live:
            self._live.start()
        else:
            self._ticker = threading.Thread(target=self._tick_on, name="progress", daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        self._ended.set()
        if self._ticker:
            self._ticker.join()

    @property
    def done(self) -> int:
        return self._counts.total()

    def begin(self, cell: str) -> None:
        """A worker has started on the cell, or on several of them under one label (see `end`)."""
        with self._mutex:
            self._running[cell] = self._clock()

    def say(self, stage: str) -> None:
        """What goes on inside the label that runs, where that takes long."""
        with self._mutex:
            self._stage, self._untold = stage, True

    def end(self, label: str) -> None:
        """What `begin` named has ended; its records, if any, have names of their own."""
        with self._mutex:
            self._running.pop(label, None)
            self._stage, self._untold = "", False

    def finish(self, record: Record) -> None:
        """The cell has ended."""
        with self._mutex:
            self._running.pop(record.cell, None)
            self._counts[record.outcome] += 1
            if self._headlines and record.outcome not in (Outcome.PASS, Outcome.UNSUPPORTED):
                print_line(self._console, headline(record))
            if self._live is None:
                share = self.done / max(self._selected, 1)
                due = share >= self._next_line and self._clock() - self._last_line >= _MOMENT_S
                if due or self.done == self._selected:
                    self._line(self._tally())
                    self._next_line = share + 0.1

    def tick(self) -> None:
        """Away from a terminal: a line, where one is due."""
        with self._mutex:
            quiet = self._clock() - self._last_line
            if self._running and quiet >= (_MOMENT_S if self._untold else _SILENCE_S):
                label, began = next(iter(self._running.items()))
                self._untold = False
                self._line(Text.assemble(_now(label, self._stage), f"  {duration(self._clock() - began)}"))

    def _tick_on(self) -> None:
        while not self._ended.wait(_TICK_S):
            self.tick()

    def _line(self, text: Text) -> None:
        self._last_line = self._clock()
        count = f"[{self.done:>{len(str(self._selected))}}/{self._selected}] " if self._selected else ""
        print_line(self._console, Text(count).append_text(text))

    def _tally(self) -> Text:
        parts = [Text(f"{MARKS[o].glyph} {self._counts[o]} {o}", MARKS[o].style) for o in MARKS if self._counts[o]]
        parts.append(Text(duration(self._clock() - self._start), "dim"))
        return dotted(parts)

    def _block(self) -> RenderableType:
        now = self._clock()
        width = max(10, min(40, self._console.width - 60))
        filled = min(width * self.done // max(self._selected, 1), width)
        red = any(self._counts[outcome] for outcome in BAD)
        bar = Text.assemble(("━" * filled, "red" if red else "green"), ("━" * (width - filled), "bright_black"))
        top = Text("  ").append_text(bar).append(f"  {self.done}/{self._selected}  ", "bold").append_text(self._tally())
        rows: list[RenderableType] = [Text(""), _fit(top, self._console)] if self._selected else []
        if self._running:
            cell, began = next(iter(self._running.items()))  # the one that has run longest
            more = f"  +{len(self._running) - 1} more" if len(self._running) > 1 else ""
            slow = f"  {duration(now - began)}" if now - began >= 2 else ""
            label = shorten(_now(cell, self._stage), max(self._console.width - 8 - len(more) - len(slow), 10))
            current = Table.grid(padding=(0, 1))
            current.add_row(Text(" "), self._spinner, Text.assemble((label, "dim"), (slow, "yellow"), (more, "dim")))
            rows.append(current)
        return Group(*rows)


def follow(
    console: Console, label: str, items: Iterable[Item], total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Item]:
    """Passes the items on and shows how many have come: a bar on a terminal, else a line for each tenth or half minute."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    start = last = clock()
    next_line = 0.1
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        for done, item in enumerate(items, 1):
            yield item
            bar.update(task, advance=1)
            quiet, share = clock() - last, done / max(total, 1)
            if not console.is_terminal and (quiet >= _SILENCE_S or (share >= next_line and quiet >= _MOMENT_S)):
                print_line(console, Text(f"[{done:>{len(str(total))}}/{total}] {label}  {duration(clock() - start)}"))
                last, next_line = clock(), share + 0.1


def _now(label: str, stage: str) -> str:
    return one_line(f"{label}: {stage}" if stage else label)


def _fit(text: Text, console: Console) -> Text:
    text.truncate(console.width - 1, overflow="ellipsis")
    return text
