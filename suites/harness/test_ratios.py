"""The first bad row and the worst one: every report tells them apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.outcomes import Outcome
from harness.records import Record
from reports import html, junit, markdown, read
from suites.harness import synthetic
from suites.harness.synthetic import printed, summary_of


def failed(first: float | None, worst: float | None, **changes: Any) -> Record:
    """Rows at position 7 (the first bad one) and 40."""
    place = {"first_bad_position": 7, "first_bad_schedule": 0, "worst_position": 40, "worst_schedule": 0}
    return synthetic.record(Outcome.FAIL, first_bad_ratio=first, error_ratio=worst, **(place | changes))


def test_every_report_tells_the_ratio_at_the_first_bad_row_from_the_worst_one() -> None:
    report = summary_of([failed(5.1, 312.0)])
    assert (
        "    first bad position 7 of schedule 0 · error ratio there 5.1 (bound 3) · token 17 expected, 93 got · margin"
        in printed(report)
    )
    assert "\n    worst error ratio 312 at position 40\n" in printed(report)
    assert "| 7 | **5.1** (≤ 3) | **312** (≤ 3) at position 40 |" in markdown.render(report)
    page = re.sub("<[^>]+>", "", html.render(report))
    assert "first bad position 7 of schedule 0error ratio there 5.1 (bound 3)worst error ratio 312 at position 40" in page


def test_a_first_bad_row_that_is_the_worst_has_one_ratio() -> None:
    report = summary_of([failed(312.0, 312.0, worst_position=7)])
    assert "first bad position 7 of schedule 0 · error ratio there 312 (bound 3) · token" in printed(report)
    assert "worst error ratio" not in printed(report).split("wrong of")[0]
    assert "| 7 | **312** (≤ 3) | **312** (≤ 3) |" in markdown.render(report)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"worst_schedule": 2}, "first bad position 7 of schedule 0 · error ratio there 5.1 (bound 3)"),
        ({"worst_schedule": 2}, "worst error ratio 312 at position 40 of schedule 2"),
        ({"worst_position": 7}, "worst error ratio 312 in another row at position 7"),
        ({"first": None}, "worst error ratio 312 at position 40 (bound 3)"),
        ({"worst": None}, "worst error ratio ∞ at position 40"),
        ({"first": None, "worst": None, "worst_position": 7}, "first bad position 7 of schedule 0 · error ratio there ∞"),
    ],
)  # fmt: skip
def test_the_worst_row_is_placed_where_it_cannot_be_taken_for_the_first_bad_one(changes: dict[str, Any], said: str) -> None:
    assert said in printed(summary_of([failed(**{"first": 5.1, "worst": 312.0} | changes)]))


def test_records_of_schema_1_have_the_worst_ratio_alone_and_render(tmp_path: Path) -> None:
    file = synthetic.write(tmp_path / "gate.jsonl", [failed(None, 312.0)], synthetic.header(selected=1, schema=1))
    new = ("first_bad_ratio", "worst_position", "worst_schedule")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in line.items() if k not in new}) + "\n" for line in lines))
    report = read(file)
    assert "first bad position 7 of schedule 0 · token" in printed(
        report
    ) and "\n    worst error ratio 312 (bound 3)\n" in printed(report)
    assert "| 7 | – | **312** (≤ 3) |" in markdown.render(report)
    assert "worst error ratio" in html.render(report) and junit.render(report)


# --- legend
