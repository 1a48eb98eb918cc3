"""Record files are untrusted input: whole ones load, torn ones lose their last line, all others are a one-line error."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import records
from harness.outcomes import Outcome
from harness.records import Header, Record, RecordError, load
from suites.harness import synthetic

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


def file_with(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gate.jsonl"


def test_what_was_written_is_what_is_read(file: Path) -> None:
    written = synthetic.red()
    head, read = load(synthetic.write(file, written, synthetic.header(selected=7)))
    assert (head, read) == (synthetic.header(selected=7), written)


def test_a_torn_last_line_is_dropped_and_said(file: Path) -> None:
    synthetic.write(file, synthetic.green()[:3])
    with file.open("a") as stream:
        stream.write('{"cell": "engine::')
    head, read = load(file)
    assert len(read) == 3
    assert ["torn" in note for note in head.notes] == [True]


def test_a_broken_line_that_is_not_the_last_is_an_error_that_names_the_line(file: Path) -> None:
    synthetic.write(file, synthetic.green()[:3])
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], '{"cell": \n', *lines[2:]]))
    with pytest.raises(RecordError, match=r"gate\.jsonl:3: not JSON"):
        load(file)


@pytest.mark.parametrize(
    "text", ["", "\n", "not json\n", "[]\n", "{}\n", '{"schema": "1"}\n', '{"schema": 0}\n', "[" * 200_000 + "\n", "\0\n"]
)
def test_a_file_that_is_no_record_file_is_a_one_line_error(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(RecordError) as caught:
        load(file)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_newer_schema_is_refused_with_what_to_do(file: Path) -> None:
    with pytest.raises(RecordError, match=r"newer than this version reads .* install a newer decodegate"):
        load(file_with(file, asdict(Header(schema=records.SCHEMA + 1))))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("outcome", "passed"),
        ("cell", 7),
        ("cell", "two\nlines"),
        ("check", "\x1b[31m"),
        ("case", "x" * 501),
        ("schedule", "feed 5"),
        ("schedule", [5]),
        ("rows", 1.5),
        ("rows", True),
        ("duration_s", -1.0),
        ("duration_s", float("nan")),
        ("error_ratio", "3"),
        ("verdicts", {"MATCH": "all"}),
        ("series", {"error": 1.0}),
        ("power", {"fault": "big"}),
        ("first_bad_token", []),
        ("extra", []),
        ("unheard_of", 1),
    ],
)
def test_a_field_of_the_wrong_kind_is_named_with_its_line(file: Path, field: str, value: Any) -> None:
    raw = asdict(synthetic.record()) | {field: value}
    with pytest.raises(RecordError, match=rf"gate\.jsonl:2: .*'{field}'"):
        load(file_with(file, asdict(Header()), raw))


def test_a_missing_field_is_named(file: Path) -> None:
    raw = asdict(synthetic.record())
    del raw["outcome"]
    with pytest.raises(RecordError, match="'outcome' is missing"):
        load(file_with(file, asdict(Header()), raw))


def test_sizes_are_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.write(file, synthetic.green()[:3])
    for limit, value, named in (("MAX_BYTES", 1000, "1000"), ("MAX_LINE", 100, "100"), ("MAX_RECORDS", 2, "2")):
        with monkeypatch.context() as patch, pytest.raises(RecordError, match=f"more than the {named} "):
            patch.setattr(records, limit, value)
            load(file)


@settings(deadline=None)
@given(st.sampled_from(sorted(asdict(synthetic.record()))), json_values)
def test_any_value_in_any_field_loads_or_is_a_record_error(
    tmp_path_factory: pytest.TempPathFactory, field: str, value: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    try:
        _, (read,) = load(file_with(path, asdict(Header()), asdict(synthetic.record()) | {field: value}))
    except RecordError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(read, Record) and isinstance(read.outcome, Outcome)
