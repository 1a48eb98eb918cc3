"""The summary in a terminal and in a CI log: why cells failed, where, and on what the verdict rests."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from decodegate.cli import app
from harness.outcomes import Outcome
from harness.records import Record
from reports import frames, html, markdown, terminal
from reports.summary import Run, Summary
from suites.harness import synthetic

CALLED = """\
  File "/src/harness/worker.py", line 182, in _replay_all
  File "/src/harness/replay.py", line 272, in _rewind
"""
LIBRARY = '  File "/v/lib/python3.11/site-packages/numpy/_core/x.py", line 9, in take\n'
TRACEBACK = f"""\
Traceback (most recent call last):
{CALLED}  File "/home/me/toy.py", line 54, in rewind
{LIBRARY}toys.errors.CacheError: layer 3 has no cache
toy::llama/gqa::{synthetic.CHECKS[5]}[float32,dense]
"""
DUMP = f"""\
toy::llama/gqa::{synthetic.CHECKS[5]}[float32,dense]
assertion failed: cache->offset == 3
Fatal Python error: Aborted

Thread 0x00007ff1 (most recent call first):
  File "/src/harness/worker.py", line 300 in _run

Current thread 0x00007ff2 (most recent call first):
  File "/v/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/toy.py", line 54 in rewind
  File "/src/harness/replay.py", line 272 in _rewind
  File "/src/harness/worker.py", line 182 in _replay_all

Extension modules: numpy._core._multiarray_umath (total: 1)
"""


def printed(records: list[Record], width: int | None = None, **head: Any) -> str:
    """The summary in a log, or on a terminal of that width."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system=None, width=width) if width else None
    report = Summary([Run(synthetic.header(selected=len(records), **head), tuple(records))])
    terminal.summary(report, console or terminal.make_console(stream))
    return stream.getvalue()


# --- why and where


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.CRASH, Outcome.TIMEOUT, Outcome.VACUOUS])
def test_each_of_many_failures_says_why_on_one_line(outcome: Outcome) -> None:
    text = printed([synthetic.record(outcome, case=f"c{i}", message=f"layer {i} is\nodd {'x' * 400}") for i in range(22)])
    lines = text.splitlines()
    for i in range(22):
        (at,) = [index for index, line in enumerate(lines) if f"    layer {i} is odd xxx" in line]
        assert lines[at].endswith("x…") and len(lines[at]) == 204
        assert f"llama/c{i} " in lines[at - 1] and "decodegate replay" in "".join(lines[at + 1 : at + 3])


@pytest.mark.parametrize("ratio", [None, 1.2])
def test_each_of_many_wrong_tokens_within_the_bound_says_why(ratio: float | None) -> None:
    flips = [
        synthetic.record(
            Outcome.FAIL,
            case=f"c{i}",
            message=f"WRONG: expected token {i}, 2.1 below the top",
            first_bad_ratio=ratio,
            error_ratio=ratio,
        )
        for i in range(22)
    ]
    text = printed(flips)
    assert all(f"    WRONG: expected token {i}, 2.1 below the top\n" in text for i in range(22))


def test_figures_beyond_the_bound_are_not_told_twice() -> None:
    text = printed([synthetic.record(Outcome.FAIL, case=f"c{i}", message=f"DRIFT {i}", first_bad_ratio=5.1) for i in range(22)])
    assert "error ratio there 5.1 (bound 3)" in text and "DRIFT" not in text


def test_many_cells_with_one_message_are_one_block_with_one_replay() -> None:
    message = "model.safetensors: 12 bytes are missing; download it again"
    alike = [synthetic.record(Outcome.ERROR, case="bad", check=f"check_{i}", message=message, detail="") for i in range(22)]
    other = synthetic.record(Outcome.ERROR, case="mha", message="KeyError: 'layer 3'", detail="")
    text = printed([*alike, other])
    assert f"  ! llama/bad  22 cells error: {message}\n    {alike[0].replay}\n" in text
    assert "    KeyError: 'layer 3'\n" in text
    assert text.count("decodegate replay") == 2


def test_cells_of_several_cases_with_one_message_are_one_block_without_a_case() -> None:
    text = printed([synthetic.record(Outcome.CRASH, case=f"c{i}", message="died", detail="") for i in range(22)])
    assert "  † 22 cells crash: died\n" in text


def test_one_message_from_two_places_is_two_blocks() -> None:
    details = [TRACEBACK, TRACEBACK.replace("54, in rewind", "61, in step")]
    records = [synthetic.record(Outcome.ERROR, case=f"c{i}", message="no", detail=details[i % 2]) for i in range(22)]
    text = printed(records)
    assert text.count("11 cells error: no") == 2
    assert "    toy.py:54 in rewind" in text and "    toy.py:61 in step" in text


def test_each_of_many_crashes_says_its_own_last_words() -> None:
    crashes = [
        synthetic.record(Outcome.CRASH, case=f"c{i}", message=f"died at {i}", detail=f"layer {i} lost") for i in range(22)
    ]
    text = printed(crashes)
    assert all(f"    died at {i}\n    layer {i} lost\n    decodegate replay" in text for i in range(22))


@pytest.mark.parametrize("count", [1, 25])
def test_a_crash_names_the_line_of_the_target_and_its_last_words(count: int) -> None:
    records = [synthetic.record(Outcome.CRASH, case=f"c{i}", detail=DUMP) for i in range(count)]
    text = printed(records)
    assert "    toy.py:54 in rewind · assertion failed: cache->offset == 3\n" in text
    assert "Extension modules" not in text


@pytest.mark.parametrize("message", ["CacheError: layer 3 has no cache", "no rows"])
def test_an_error_names_the_line_of_the_target_and_nothing_twice(message: str) -> None:
    text = printed([synthetic.record(Outcome.ERROR, message=message, detail=TRACEBACK)])
    assert "    toy.py:54 in rewind" in text
    assert text.count("layer 3 has no cache") == 1
    assert "toy::llama" not in text


@pytest.mark.parametrize(
    ("detail", "frame"),
    [
        (TRACEBACK, "toy.py:54 in rewind"),
        (DUMP, "toy.py:54 in rewind"),
        (CALLED + LIBRARY, "x.py:9 in take"),
        (CALLED, ""),
        ('  File "/home/me/toy.py", line 54, in rewind', ""),
        (CALLED.replace("/", "\\") + '  File "C:\\me\\toy.py", line 7, in <module>\n', "toy.py:7 in <module>"),
        ("no result", ""),
    ],
)
def test_the_innermost_frame_is_of_code_that_the_harness_called(detail: str, frame: str) -> None:
    assert frames.innermost(detail) == frame


# --- the width


def test_a_log_is_not_cut_and_a_terminal_is() -> None:
    name = f"a_check_{'with_a_long_name_' * 8}to_the_end"
    records = [synthetic.record(check=name, case="c" * 60)]
    assert f"{'c' * 60} {name}\n" in printed(records)
    assert all(len(line) < 80 for line in printed(records, width=80).splitlines() if "noise floor" in line)
    assert "…" in printed(records, width=80)


# --- logits that are not finite


def not_finite(**changes: Any) -> Record:
    """As the verdict on a cell whose first bad row is NaN."""
    place = {"first_bad_position": 7, "first_bad_schedule": 0, "worst_position": 7, "worst_schedule": 0}
    numbers = {"error_ratio": None, "first_bad_ratio": None, "max_abs": None, "rmse": None}
    return synthetic.record(Outcome.FAIL, schedule=["feed 48 all"], **(place | numbers | changes))


@pytest.mark.parametrize("count", [1, 25])
def test_nan_is_told_as_nan_and_not_as_a_wrong_token(count: int) -> None:
    text = printed([not_finite(case=f"c{i}") for i in range(count)])
    assert "first bad position 7 · the logits are not finite" in text
    assert "token" not in text and "∞" not in text


def test_nan_after_a_finite_bad_row_is_told_of_the_worst_row_only() -> None:
    text = printed([not_finite(first_bad_ratio=5.1, worst_position=40)])
    assert "first bad position 7 · error ratio there 5.1 (bound 3) · token 17 expected, 93 got" in text
    assert "    the logits are not finite at position 40\n" in text


def test_nan_is_the_worst_error_of_the_run_in_every_report() -> None:
    records = [not_finite(case="mha"), synthetic.record()]
    line = next(line for line in printed(records).splitlines() if "noise floor" in line)
    assert "float32  not finite  noise floor" in line and "llama/mha" in line
    report = Summary([Run(synthetic.header(selected=2), tuple(records))])
    assert "| float32 | ∞ (≤ 3) | llama/mha" in markdown.render(report)
    assert '<p class="big bad">∞<small> bound 3</small></p>' in html.render(report)


# --- faults that were not planted, and ties


@pytest.mark.parametrize("changes", [{"target": "toy"}, {"dtype": "bfloat16"}])
def test_where_no_fault_is_to_be_planted_reports_say_so_without_alarm(changes: dict[str, Any]) -> None:
    records = [synthetic.record(power={}, **changes)]
    report = Summary([Run(synthetic.header(selected=1), tuple(records))])
    assert "\n  power     none planted: faults are for float32 cells of the target engine\n" in printed(records)
    assert "No fault was planted: faults are for float32 cells" in markdown.render(report)
    assert "None planted: faults are for float32 cells" in html.render(report)
    assert "no fault planted on" not in printed(records)


def test_an_engine_in_float32_without_a_planted_fault_is_still_told_as_a_lack() -> None:
    records = [synthetic.record(power={}), synthetic.record(power={}, dtype="bfloat16", check="other")]
    assert f"no fault planted on 1 check  {synthetic.CHECKS[0]}\n" in printed(records)
    assert "none planted" not in printed(records)


def test_a_run_without_a_passed_cell_says_nothing_of_faults() -> None:
    assert "  power " not in printed([synthetic.record(Outcome.CRASH, target="toy")])


def test_a_tie_is_within_twice_the_bound_in_every_report() -> None:
    records = [synthetic.record()]
    assert "ties      1 of 96 rows  greedy choices within twice the bound\n" in printed(records)
    page = html.render(Summary([Run(synthetic.header(selected=1), tuple(records))]))
    assert "greedy choices within twice the bound" in page and "within twice the bound of its own" in page


def test_the_help_of_replay_explains_the_ratio_and_a_tie_by_the_bound() -> None:
    said = " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", "--help"]).output.split())
    assert "the worse of RMSE and largest error, each as a multiple of a third of its bound" in said
    assert "TIE is another token, which the oracle has within twice the bound of its own" in said
