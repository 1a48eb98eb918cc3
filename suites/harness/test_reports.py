"""The reports: pure functions of the record file, red before green, and safe whatever the records hold."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from decodegate.commands.report import register
from harness.choice import in_words
from harness.outcomes import Outcome
from harness.records import Header
from reports import html, job_summary, junit, markdown, read, write_all
from reports.summary import MARKS, Run, Summary
from reports.text import code_span, duration, figure, visible
from suites.harness import synthetic
from suites.harness.synthetic import printed, summary_of

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a | b || c",
    "`code` ``fence`` ```",
    "line\nbreak\r\n\n# heading\n- item",
    "\x1b[31mred\x1b]0;title\x07",
    "\x00\x0b\ufffe\ud800 ]]>",
    "\u202egnp.exe",
    "{{ 7 * 7 }} {% raw %}",
    "[link](javascript:alert(1)) ![i](x) @all <!-- -->",
    "[bold red]markup[/]",
    "</pre></details></article>",
    "\\",
]
hostile = settings(max_examples=40, deadline=None)
texts = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(codec=None), min_size=1, max_size=40).filter(str.strip))


def told_by(text: str, outcome: Outcome = Outcome.FAIL) -> Summary:
    """A red and a smoke record in which every free text is `text`."""
    free: dict[str, Any] = {"message": text, "detail": text, "replay": text, "schedule": [text], "counters": {text: 1}}
    free["power"] = {text: 30.0}
    red = synthetic.record(outcome, **free, first_bad_token={"expected": text, "got": text})
    smoke = synthetic.record(check="smoke", case="real", extra={"text": text + "\n" + text, text: {text: text + "\n"}}, **free)
    run = synthetic.header(selected=2, command=text, device=text, versions={text: text}, flags={text: text}, notes=[text])
    return Summary([Run(run, (red, smoke))])


# --- what they say


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_named_in_every_report(outcome: Outcome) -> None:
    report = summary_of([synthetic.record(outcome), synthetic.record(case="mha")])
    assert f"{MARKS[outcome].glyph} 1 {outcome}" in markdown.render(report) or outcome is Outcome.PASS
    assert f'class="cell o-{outcome} ' in html.render(report)
    assert f'value="{outcome}"' in junit.render(report)
    assert MARKS[outcome].glyph in printed(report)


def test_no_two_outcomes_look_alike_without_colour() -> None:
    assert set(MARKS) == set(Outcome)
    assert len({mark.glyph for mark in MARKS.values()}) == len(Outcome)


def test_a_failure_shows_check_case_position_ratio_bound_and_replay_command() -> None:
    record = synthetic.record(Outcome.FAIL)
    report = summary_of([record])
    shown = [record.check, "llama/gqa", str(record.first_bad_position), figure(record.error_ratio), record.replay]
    for text in (printed(report), markdown.render(report), html.render(report).replace("&#39;", "'")):
        assert [part for part in shown if part not in text] == []


@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("check", ["incremental", "smoke_incremental_logits_match_reference"])
def test_a_failing_cell_says_in_every_report_that_its_experts_hang_by_a_thread(count: int, check: str) -> None:
    routing = {
        "margin": 0.0041,
        "rounding": 0.0058,
        "row_margin": 0.0041,
        "least_margin": 0.00012,
        "least_position": 91,
        "flips": 2,
        "last_flip": 119,
    }
    words = in_words(routing, "bfloat16")
    assert "0.0041 at this token" in words and "last at position 119" in words
    message = f"{'why it failed ' * 15}; {words}"
    bad = synthetic.record(Outcome.FAIL, check=check, dtype="bfloat16", routing=routing, message=message)
    others = [synthetic.record(Outcome.FAIL, check=f"other_{index}", dtype="bfloat16") for index in range(count - 1)]
    report = summary_of([bad, *others])
    for rendered in (printed(report), markdown.render(report), html.render(report), junit.render(report)):
        assert words in rendered
    assert "router margin</dt><dd>0.0041" in html.render(report)


def test_red_comes_before_green_in_terminal_and_markdown() -> None:
    records = synthetic.red()
    bad = [record.replay for record in records if record.outcome in (Outcome.FAIL, Outcome.CRASH, Outcome.VACUOUS)]
    text = printed(summary_of(records))
    assert all(text.index(replay) < text.index("21 cells" if "21 cells" in text else " pass\n") for replay in bad)
    text = markdown.render(summary_of(records))
    assert all(text.index(replay) < text.index("| case |") for replay in bad)


def test_markdown_lists_every_red_cell_however_many() -> None:
    records = [synthetic.record(Outcome.FAIL, case=f"case{index}") for index in range(150)]
    text = markdown.render(summary_of(records))
    assert all(text.count(record.replay) == 1 for record in records)
    assert "<details" not in text


def test_green_markdown_has_at_most_40_lines_with_several_hundred_cells() -> None:
    families = tuple(f"family_{index}" for index in range(30))
    checks = [f"check_{index}_holds" for index in range(20)]
    many = [
        synthetic.record(family=family, check=check, dtype=d)
        for family in families
        for check in checks
        for d in ("float32", "bfloat16")
    ]
    unsupported = [
        synthetic.record(Outcome.UNSUPPORTED, case="x", check=f"c{index}", message=f"no {index}") for index in range(9)
    ]
    smokes = [synthetic.record(check="smoke", case=f"real{index}") for index in range(5)]
    for records in ([*synthetic.green(("llama", "gemma3")), synthetic.smoke(), *unsupported], many + unsupported + smokes):
        report = summary_of(records)
        assert len(report.records) >= 230 and report.green
        assert len(markdown.render(report).splitlines()) <= 40


def test_passing_cells_are_not_listed_in_the_terminal() -> None:
    report = summary_of(synthetic.green())
    assert len(printed(report).splitlines()) < 12
    assert "112 cells pass" in printed(report)


@pytest.mark.parametrize("render", [markdown.render, html.render, junit.render, printed])
def test_a_run_that_was_cut_short_says_so_and_is_not_green(render) -> None:  # type: ignore[no-untyped-def]
    report = summary_of(synthetic.green()[:10], selected=112)
    assert not report.green
    text = render(report)
    assert "102 of 112" in text and "cut short" in text


def test_nothing_recorded_is_no_evidence() -> None:
    report = summary_of([], selected=0)
    assert "no evidence" in report.verdict and not report.green
    for render in (markdown.render, html.render, junit.render, printed):
        assert render(report)


def test_a_check_without_planted_fault_is_said() -> None:
    report = summary_of([synthetic.record(power={}), synthetic.record(case="mha", check="other")])
    assert report.without_power == [synthetic.CHECKS[0]]
    assert "no fault planted on 1 check" in markdown.render(report)
    assert "no fault planted on 1 check" in printed(report)


def test_the_weakest_power_figure_is_the_one_shown_and_too_weak_is_marked() -> None:
    report = summary_of([synthetic.record(power={"a": 900.0, "b": 7.5}), synthetic.record(case="mha", power={"a": 40.0})])
    assert (report.power[0].fault, report.power[0].times, report.power[0].weak) == ("b", 7.5, True)
    assert "**weak** 7.5×" in markdown.render(report)
    assert "weakest planted fault 7.5× the bound, at least 20× is wanted" in printed(report)


def test_nan_is_the_worst_error_and_proves_no_power() -> None:
    report = summary_of([synthetic.record(error_ratio=float("nan"), power={"a": float("nan")}), synthetic.record(case="mha")])
    assert report.dtypes[0].worst is not None and report.dtypes[0].worst.case == "gqa"
    assert report.power[0].weak


def test_several_runs_are_columns_of_one_matrix() -> None:
    base = Run(synthetic.header(selected=1), (synthetic.record(Outcome.FAIL, build="base"),), "base")
    head = Run(synthetic.header(selected=1), (synthetic.record(build="head"),), "head")
    report = Summary([base, head])
    assert [column.label for column in report.columns] == ["base", "head"]
    assert len(report.matrix().of("llama/gqa", synthetic.CHECKS[0])) == 2
    page = html.render(report)
    assert page.count('class="cell o-') == 2 and "from top to bottom: base, head" in page


def test_two_runs_of_a_build_with_one_name_stay_apart() -> None:
    runs = [Run(synthetic.header(selected=1), (synthetic.record(),), name) for name in ("monday", "tuesday")]
    assert [column.label for column in Summary(runs).columns] == ["worktree (monday)", "worktree (tuesday)"]


def test_a_cell_recorded_twice_in_a_run_counts_by_its_last_record() -> None:
    report = summary_of([synthetic.record(Outcome.CRASH), synthetic.record()], selected=1)
    assert report.counts == {Outcome.PASS: 1} and report.green


def test_every_mark_of_the_matrix_is_in_the_legend() -> None:
    records = synthetic.red()
    records += [replace(r, layout="model_owned", cell=r.cell.replace("dense", "model_owned")) for r in records[:20]]
    page = html.render(summary_of(records))
    legend = page[page.index('<p class="legend">') : page.index('role="region" aria-label="Matrix')]
    matrix = page[page.index('<table class="matrix">') : page.index("</table>")]
    drawn = {tuple(classes.split()) for classes in re.findall(r'class="cell (o-[^"]+)"', matrix)}
    assert {outcome for outcome, _ in drawn} == {f"o-{outcome}" for outcome in Outcome}
    assert all(f'class="mark {outcome}"' in legend for outcome, _ in drawn)
    assert {layout for _, layout in drawn} == {"l-0", "l-1"} == set(re.findall("shape (l-[0-9])", legend))
    assert "dense: the engine holds the state" in legend and "model_owned: the model holds its own state" in legend


def test_layouts_of_a_field_stand_in_the_order_of_the_legend_whatever_their_outcomes() -> None:
    dense = synthetic.record()
    owned = replace(synthetic.record(Outcome.FAIL), layout="model_owned", cell=dense.cell.replace("dense", "model_owned"))
    page = html.render(summary_of([owned, dense]))
    assert re.findall(r'class="cell (o-[a-z]+ l-[0-9])"', page) == ["o-pass l-0", "o-fail l-1"]


# --- purity


def test_rendering_twice_is_byte_identical_and_ignores_the_order_of_records(tmp_path: Path) -> None:
    records = synthetic.red()
    head = synthetic.header(selected=len(records))
    first = write_all(synthetic.write(tmp_path / "a.jsonl", records, head), tmp_path / "first")
    random.Random(1).shuffle(records)
    second = write_all(synthetic.write(tmp_path / "b.jsonl", records, head), tmp_path / "second")
    assert sorted(first) == ["html", "md", "xml"]
    assert [path.read_bytes() for path in first.values()] == [path.read_bytes() for path in second.values()]
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["gate.html", "gate.md", "gate.xml"]


def test_the_page_is_one_small_file_without_network(tmp_path: Path) -> None:
    records = synthetic.green(("llama", "gemma3")) + synthetic.red()[:50]
    page = html.render(summary_of(records))
    assert len(page.encode()) < 1_500_000 * len(summary_of(records).records) / 200
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*|url\(|@import|https?://", page) == []
    assert "default-src 'none'" in page


def test_every_link_of_the_page_leads_somewhere() -> None:
    page = html.render(summary_of(synthetic.red()))
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.7e308, 0.0, -1.0])
def test_a_plot_survives_any_number(bad: float) -> None:
    record = synthetic.record(Outcome.FAIL)
    record.series = {
        "position": [0, 1, 2, bad],
        "error": [bad, 1e-3, bad, 1.0],
        "noise": [1e-6, bad, 0.0, 1.0],
        "bound": [3e-6] * 4,
    }
    page = html.render(summary_of([record]))
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    assert drawn and not re.search("nan|inf", drawn.split(">", 1)[1])


# --- hostile texts


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(sorted(name for name, _ in attrs))))


def tags(page: str) -> list[tuple[str, tuple[str, ...]]]:
    parser = Tags()
    parser.feed(page)
    return parser.found


@cache
def harmless_tags() -> list[tuple[str, tuple[str, ...]]]:
    return tags(html.render(told_by("harmless")))


@hostile
@given(texts)
def test_no_text_brings_markup_into_the_page(text: str) -> None:
    page = html.render(told_by(text))
    assert tags(page) == harmless_tags()
    assert not CONTROL.search(page)
    page.encode("utf-8")


@hostile
@given(texts)
def test_no_text_breaks_the_markdown(text: str) -> None:
    parser = MarkdownIt("commonmark").enable("table")
    rendered = markdown.render(told_by(text))
    harmless = markdown.render(told_by("harmless"))
    tokens = parser.parse(rendered)
    assert [token.type for token in tokens] == [token.type for token in parser.parse(harmless)]
    assert len(rendered.split("\n")) == len(harmless.split("\n"))
    for token in tokens:
        for child in token.children or []:
            assert child.type in {
                "text",
                "text_special",
                "code_inline",
                "strong_open",
                "strong_close",
                "html_inline",
                "softbreak",
            }, rendered
            assert child.type != "html_inline" or child.content == "<br>"


@hostile
@given(texts, st.sampled_from(Outcome))
def test_the_xml_is_valid_whatever_the_texts(text: str, outcome: Outcome) -> None:
    root = ET.fromstring(junit.render(told_by(text, outcome)).encode("utf-8"))
    assert len(list(root.iter("testcase"))) == 2


@hostile
@given(texts)
def test_no_text_reaches_the_terminal_as_a_control_character(text: str) -> None:
    assert not CONTROL.search(printed(told_by(text)).replace("\n", ""))


@hostile
@given(st.text(st.characters(codec=None)))
def test_visible_text_is_valid_and_stays_as_it_is(text: str) -> None:
    shown = visible(text)
    shown.encode("utf-8")
    assert not CONTROL.search(shown.replace("\n", "")) or "\t" in shown
    assert visible(shown) == shown


def test_a_code_span_may_hold_backticks_and_bars() -> None:
    assert code_span("a`b|c") == "``a`b\\|c``"
    assert code_span("`") == "`` ` ``"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.306, "1.31"),
        (812.4, "812"),
        (3.14e-6, "3.1e-6"),
        (1.7e308, "∞"),
        (float("nan"), "nan"),
        (None, "–"),
        (52949, "52949"),
    ],
)
def test_figures_take_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.012, "12 ms"), (41.23, "41.2 s"), (59.97, "1 min 00 s"), (7620, "2 h 07 min")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- JUnit


def test_junit_counts_add_up() -> None:
    root = ET.fromstring(junit.render(summary_of(synthetic.red())))
    assert {name: int(root.get(name, "")) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": 113,
        "failures": 18,  # 17 fail, 1 vacuous
        "errors": 4,  # crash, error, timeout, infra
        "skipped": 1,
    }
    assert len(list(root.iter("flakyFailure"))) == 1


# --- job summary


def test_the_job_summary_is_appended_by_the_outermost_run_only(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    file.write_text("before\n")
    environ = {"GITHUB_STEP_SUMMARY": str(file)}
    assert job_summary.claim(environ)
    inner = environ | {next(name for name in environ if "OUTERMOST" in name): "1"}
    assert job_summary.append("inner\n", inner) is None
    assert job_summary.append("outer\n", environ) == file
    assert file.read_text() == "before\n\nouter\n\n"


def test_without_a_job_summary_file_nothing_is_written() -> None:
    assert job_summary.append("text", {}) is None


def test_a_job_summary_beyond_the_limit_keeps_the_verdict(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    job_summary.append("## verdict\n" + "x" * 2**20, {"GITHUB_STEP_SUMMARY": str(file)})
    assert "## verdict" in file.read_text() and file.stat().st_size < 1000


# --- decodegate report


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    register(app)
    return app


def test_report_shows_a_run_that_is_still_going(app: typer.Typer, tmp_path: Path) -> None:
    file = synthetic.write(tmp_path / "gate.jsonl", synthetic.green()[:5], Header(selected=112))
    with file.open("a") as stream:
        stream.write('{"cell": "engine::lla')
    ran = CliRunner().invoke(app, [str(tmp_path)])
    assert ran.exit_code == 0
    assert "107 of 112 did not finish" in ran.output and "torn" in ran.output


def test_report_writes_all_formats_or_the_one_asked_for(app: typer.Typer, tmp_path: Path) -> None:
    file = synthetic.write(tmp_path / "gate.jsonl", synthetic.green())
    assert CliRunner().invoke(app, [str(file), "--out", str(tmp_path / "all")]).exit_code == 0
    assert CliRunner().invoke(app, [str(file), "--out", str(tmp_path / "one"), "--format", "xml"]).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["gate.html", "gate.md", "gate.xml"]
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["gate.xml"]
    assert CliRunner().invoke(app, [str(file), "--format", "md"]).stdout == markdown.render(read(file))


def test_report_of_something_else_is_a_one_line_usage_error(app: typer.Typer, tmp_path: Path) -> None:
    (tmp_path / "no.jsonl").write_text("not json\n")
    for path in (tmp_path / "no.jsonl", tmp_path / "absent.jsonl"):
        ran = CliRunner().invoke(app, [str(path)])
        assert ran.exit_code == 2
        assert len(ran.output.splitlines()) == 1 and path.name in ran.output
