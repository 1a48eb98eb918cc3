"""The summary in a terminal and in a CI log: why cells failed, where, and on what the verdict rests."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from harness.outcomes import Outcome
from harness.records import Record
from reports import frames, terminal
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
