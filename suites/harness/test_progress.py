"""Progress: one live block on a terminal, and few plain lines anywhere else."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

from rich.console import Console

from harness.outcomes import Outcome
from reports.progress import Progress, follow
from reports.terminal import make_console
from suites.harness import synthetic

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_progress_away_from_a_terminal_is_plain_lines() -> None:
    stream = io.StringIO()
    records = synthetic.red()
    with Progress(len(records), make_console(stream), clock=lambda: 0.0) as progress:
        for record in records:
            progress.begin(record.cell)
            progress.finish(record)
    shown = stream.getvalue()
    assert not CONTROL.search(shown.replace("\n", ""))
    assert "[113/113]" in shown and shown.count("[") <= 13
    assert shown.count("rewind_then_new_suffix_matches_full_forward") == 16


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_away_from_a_terminal_long_work_is_told_in_few_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(4, make_console(stream), clock)
    progress.begin("smoke of a checkpoint")
    for second in range(100):
        clock.now = float(second)
        if second in (0, 1, 10):
            progress.say({0: "reading", 1: "load", 10: "incremental logits"}[second])
        progress.tick()
    lines = stream.getvalue().splitlines()
    assert lines == [
        "[0/4] smoke of a checkpoint: load  3.0 s",
        "[0/4] smoke of a checkpoint: incremental logits  10.0 s",
        "[0/4] smoke of a checkpoint: incremental logits  40.0 s",
        "[0/4] smoke of a checkpoint: incremental logits  1 min 10 s",
    ]


def test_away_from_a_terminal_records_that_come_fast_share_a_line() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(4, make_console(stream), clock)
    for number in range(4):
        clock.now += 0.1
        progress.finish(synthetic.record(case=f"case{number}"))
    assert stream.getvalue().splitlines() == ["[4/4] ✓ 4 pass · 0.4 s"]


def test_work_without_records_has_no_count() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(0, make_console(stream), clock) as progress:
        progress.begin("bench of a checkpoint")
        progress.say("round 1")
        clock.now = 5.0
        progress.tick()
    assert stream.getvalue().splitlines() == ["bench of a checkpoint: round 1  5.0 s"]


def test_items_that_are_followed_away_from_a_terminal_give_a_line_for_each_tenth_or_half_minute() -> None:
    stream, clock = io.StringIO(), Clock()

    def items() -> Iterator[int]:
        for number in range(20):
            clock.now += 40.0 if number == 10 else 1.0
            yield number

    assert list(follow(make_console(stream), "mutants", items(), 20, clock)) == list(range(20))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[ 3/20] mutants  3.0 s" and lines[-1].endswith("59.0 s")
    assert [line[1:3].strip() for line in lines] == ["3", "6", "9", "11", "14", "17", "20"]


def test_progress_on_a_terminal_shows_the_current_cell_and_fits_the_width() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60, legacy_windows=False)
    with Progress(3, console) as progress:
        progress.begin("engine::llama/gqa::incremental_logits_match_full_forward[float32,dense]")
        progress.finish(synthetic.record(Outcome.FAIL, case="mha"))
    assert "engine::llama/gqa" in stream.getvalue() and "1/3" in stream.getvalue()


def test_what_has_no_record_of_its_own_name_is_shown_until_it_ends() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60, legacy_windows=False)
    with Progress(3, console) as progress:
        progress.begin("smoke of a checkpoint")
        progress.end("smoke of a checkpoint")
        stream.truncate(0)
    assert "smoke of a checkpoint" not in stream.getvalue()
