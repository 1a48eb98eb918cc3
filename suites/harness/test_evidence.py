"""Before/after: what a build did wrong stands in its column, in its own words, and costs no other cell."""

from __future__ import annotations

import json
import shutil
from html import unescape
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from decodegate.cli import app
from harness import cases
from harness.bench import quiet
from harness.cases.build import build
from harness.outcomes import ExitCode
from harness.records import load
from reports.evidence import speed_notes, speed_rows
from suites.harness.fixture_engine import MODEL, commit, make_repository, run_git

REWIND = "rewind_and_go_on_matches_recompute"
INCREMENTAL = "incremental_logits_match_full_forward"
KEPT = "kept = len(self.tokens) - count"


@pytest.fixture(autouse=True)
def _lock_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODEGATE_LOCK", str(tmp_path / "lock"))


def decodegate(repository: Path, out: Path, *options: str) -> tuple[Result, dict]:
    arguments = [
        "evidence",
        "--target",
        "suites.harness.fixture_engine:FixtureTarget",
        "--repo",
        str(repository),
        "--out",
        str(out),
    ]
    arguments += ["--case", "llama/gqa", "--dtype", "float32", "--layout", "dense", *options]
    if "--check" not in options:
        arguments += ["--check", REWIND, "--check", INCREMENTAL]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    file = out / "evidence.json"
    return ran, json.loads(file.read_text()) if file.exists() else {}


def history(tmp_path: Path, broken: str | None) -> Path:
    """A repository whose HEAD~1 is broken and whose HEAD is whole."""
    repository = make_repository(tmp_path / "repository")
    commit(repository, broken, "Break it")
    commit(repository, MODEL, "Repair it")
    return repository


def row(report: dict, check: str) -> dict:
    return next(row for row in report["rows"] if f"::{check}[" in row["cell"])


@pytest.mark.parametrize(
    ("broken", "outcome", "said"),
    [
        ("os.write(2, b'cache->offset == 3\\n'); os.abort()", "crash", "the process died of SIGABRT; cache->offset == 3"),
        ("kept = [].pop()", "error", "IndexError: pop from empty list"),
        (f"{KEPT} + 1", "fail", "max abs difference"),
        ("while True: pass", "timeout", "no result after 10 s"),
    ],
)
def test_what_the_base_did_stands_in_its_column(tmp_path: Path, broken: str, outcome: str, said: str) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, broken))
    ran, report = decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--timeout", "10")
    assert ran.exit_code == ExitCode.OK
    repaired = row(report, REWIND)
    assert (repaired["kind"], repaired["before"]["outcome"], repaired["after"]["outcome"]) == ("repaired", outcome, "pass")
    assert said in repaired["before"]["text"]
    assert row(report, INCREMENTAL)["kind"] == "same"
    assert len(report["rows"]) == report["header"]["selected"]
    assert said in unescape(ran.stdout)
    assert "**Repaired**" in ran.stdout


def test_a_change_that_breaks_is_told_by_exit_code_and_comes_first(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repository")
    (repository / "engine" / "model.py").write_text(MODEL.replace(KEPT, f"{KEPT} + 1"))
    ran, report = decodegate(repository, tmp_path / "out", "--base", "HEAD")
    assert ran.exit_code == ExitCode.WRONG
    assert row(report, REWIND)["kind"] == "broken"
    assert ran.stdout.index("Wrong after the change") < ran.stdout.index("Right before and after")
    assert "working tree at" in ran.stdout and "with changes" in ran.stdout


def test_two_revisions_are_compared_whatever_the_working_tree_holds(tmp_path: Path) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, f"{KEPT} + 1"))
    (repository / "engine" / "model.py").write_text("raise SystemError('not this one')")
    ran, report = decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--head", "HEAD", "--check", REWIND)
    assert ran.exit_code == ExitCode.OK
    assert [build["subject"] for build in report["header"]["builds"]] == ["Break it", "Repair it"]


def test_a_base_that_lacks_what_the_adapter_calls_says_why_it_cannot_run(tmp_path: Path) -> None:
    repository = history(tmp_path, MODEL.replace("def rewind", "def go_back"))
    ran, report = decodegate(repository, tmp_path / "out", "--base", "HEAD~1")
    assert ran.exit_code == ExitCode.OK
    assert row(report, REWIND)["kind"] == "not run before"
    assert "has no attribute 'rewind'" in row(report, REWIND)["before"]["text"]
    assert row(report, INCREMENTAL)["kind"] == "same"
    assert "Cannot be run on the build before" in ran.stdout


def test_an_attribute_error_inside_the_base_is_what_it_did_not_a_reason(tmp_path: Path) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, "kept = self.offset"))
    _, report = decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--check", REWIND)
    assert row(report, REWIND)["kind"] == "repaired"


def test_a_base_that_does_not_import_costs_its_own_column_only(tmp_path: Path) -> None:
    repository = history(tmp_path, "import nowhere_to_be_found\n")
    ran, report = decodegate(repository, tmp_path / "out", "--base", "HEAD~1")
    assert ran.exit_code == ExitCode.OK
    assert {r["kind"] for r in report["rows"]} == {"repaired"}
    assert "No module named 'nowhere_to_be_found'" in row(report, REWIND)["before"]["text"]


def test_without_a_before_and_after_the_exit_code_is_4(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repository")
    ran, _ = decodegate(repository, tmp_path / "out", "--base", "HEAD")
    assert ran.exit_code == ExitCode.BASELINE_RED
    assert ran.stderr.startswith("decodegate evidence: ")


@pytest.mark.parametrize("options", [("--base", "nowhere"), ("--base", "HEAD~1", "--head", "nowhere")])
def test_a_revision_that_there_is_not_is_a_usage_error_of_one_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, f"{KEPT} + 1"))
    ran, _ = decodegate(repository, tmp_path / "out", *options)
    assert ran.exit_code == ExitCode.USAGE
    assert ran.stderr.startswith("decodegate evidence: 'nowhere' is no commit") and ran.stderr.count("\n") == 1


def test_a_base_without_the_package_ends_with_4_and_says_so(tmp_path: Path) -> None:
    repository = history(tmp_path, None)
    ran, _ = decodegate(repository, tmp_path / "out", "--base", "HEAD~1")
    assert ran.exit_code == ExitCode.BASELINE_RED
    assert "no usable engine/" in ran.stderr


def test_a_selection_of_nothing_is_a_usage_error(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repository")
    ran, _ = decodegate(repository, tmp_path / "out", "--base", "HEAD", "--check", "no_such_check")
    assert ran.exit_code == ExitCode.USAGE
    assert "no_such_check" in ran.stderr


def test_records_of_both_builds_are_a_record_file_that_names_them(tmp_path: Path) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, f"{KEPT} + 1"))
    decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--check", REWIND)
    header, records = load(tmp_path / "out" / "evidence.jsonl")
    assert [(record.build, record.outcome.value) for record in records] == [("before", "fail"), ("after", "pass")]
    assert [build["role"] for build in header.builds] == ["before", "after"]
    assert header.builds[0]["commit"] == run_git(repository, "rev-parse", "HEAD~1")


def test_the_html_page_has_the_texts_escaped_and_loads_nothing(tmp_path: Path) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, "raise ValueError('<script>alert(1)</script>')"))
    decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--check", REWIND)
    page = (tmp_path / "out" / "evidence.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_the_header_says_the_wait_for_the_lock_and_not_its_proof(tmp_path: Path) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, f"{KEPT} + 1"))
    ran, report = decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--check", REWIND)
    assert "lock wait 0.0 s" in ran.stdout
    assert not any(name.startswith("DECODEGATE_LOCK") for name in report["header"]["flags"])


def measured(before: float, after: float) -> dict:
    """What harness.bench.run.measure gives for two builds whose speeds differ by a factor, with some scatter."""
    scatter = [1.0, 1.02, 0.99, 1.01, 0.98, 1.0]
    peers = [
        {
            "name": name,
            "environment": {"blas": "mkl, 2 threads"},
            "samples": [
                {"decode_tok_s": speed * s, "prefill_tok_s": speed * s} for s in (scatter if name == "after" else scatter[::-1])
            ],
        }
        for name, speed in (("after", after), ("before", before))
    ]
    common = {"prompt_tokens": 128, "decode_tokens": 48, "rounds": 6, "missing": [], "warnings": [], "checkpoint": "smollm2"}
    return {"peers": peers, **common}


@pytest.mark.parametrize(
    ("before", "after", "verdict"), [(100.0, 100.0, "~"), (100.0, 150.0, "faster"), (100.0, 60.0, "slower")]
)
def test_speed_rows_have_n_an_interval_and_a_mark_for_no_difference(before: float, after: float, verdict: str) -> None:
    rows = speed_rows(measured(before, after))
    assert [(row.verdict, row.after.n) for row in rows] == [(verdict, 6)] * 2
    assert all(row.ratio is not None and row.ratio.low <= row.ratio.median <= row.ratio.high for row in rows)


def test_a_build_that_cannot_be_measured_before_the_change_says_why() -> None:
    result = measured(100.0, 100.0)
    del result["peers"][1]
    result["missing"] = [{"name": "before", "reason": "peer before ended (exit code 1): ImportError"}]
    assert [row.verdict for row in speed_rows(result)] == ["not measured before"] * 2
    assert any("ImportError" in note for note in speed_notes(result))


def test_a_checkpoint_to_bench_that_there_is_not_ends_the_run_before_its_cells(tmp_path: Path) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, f"{KEPT} + 1"))
    ran, _ = decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--bench", "nowhere")
    assert ran.exit_code == ExitCode.USAGE and "'nowhere' does not exist" in ran.stderr
    assert not list((tmp_path / "out").iterdir())


def test_a_speed_that_cannot_be_measured_is_a_note_on_the_table_and_75(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(quiet, "busy_fraction", lambda: 0.6)
    repository = history(tmp_path, MODEL.replace(KEPT, f"{KEPT} + 1"))
    checkpoint = build(cases.find("llama/gqa"), 0, tmp_path / "checkpoint")
    ran, report = decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--check", REWIND, "--bench", str(checkpoint))
    assert ran.exit_code == ExitCode.TEMPORARY
    assert row(report, REWIND)["kind"] == "repaired"
    assert "note: speed was not measured: other processes use 60%" in ran.stdout


def test_a_damaged_checkpoint_to_bench_is_a_note_on_the_table_and_wrong(tmp_path: Path) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, f"{KEPT} + 1"))
    (tmp_path / "damaged").mkdir()
    bench = ("--bench", str(tmp_path / "damaged"))
    ran, report = decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--check", REWIND, *bench)
    assert ran.exit_code == ExitCode.WRONG and row(report, REWIND)["kind"] == "repaired"
    assert "note: speed was not measured: checkpoint" in ran.stdout and "config.json" in ran.stdout


def test_speed_of_both_builds_of_our_engine_stands_below_the_table(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(quiet, "busy_fraction", lambda: 0.01)
    root = Path(__file__).parents[2]
    repository = make_repository(tmp_path / "repository")
    shutil.rmtree(repository / "engine")
    shutil.copytree(root / "engine", repository / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    run_git(repository, "add", "-A")
    run_git(repository, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "Our engine")
    (repository / "engine" / "README").write_text("a change")
    checkpoint = build(cases.find("llama/gqa"), 0, tmp_path / "checkpoint")
    options = ("--target", "engine", "--base", "HEAD", "--check", INCREMENTAL, "--bench", str(checkpoint), "--rounds", "1")
    ran, report = decodegate(repository, tmp_path / "out", *options)
    assert ran.exit_code == ExitCode.OK
    assert [(peer["name"], peer["build"]["name"]) for peer in report["speed"]["peers"]] == [
        ("after", "working tree"),
        ("before", run_git(repository, "rev-parse", "HEAD")[:10]),
    ]
    assert "| decode |" in ran.stdout and "n = 1, no interval" in ran.stdout
    assert report["speed"]["peers"][0]["environment"]["blas"] in ran.stdout


def test_what_a_target_declares_that_it_cannot_is_no_verdict_on_the_change(tmp_path: Path) -> None:
    repository = history(tmp_path, MODEL.replace(KEPT, f"{KEPT} + 1"))
    target = "suites.harness.fixture_engine:WithoutRewind"
    ran, report = decodegate(repository, tmp_path / "out", "--base", "HEAD~1", "--target", target)
    assert (row(report, REWIND)["kind"], row(report, INCREMENTAL)["kind"]) == ("unsupported", "same")
    assert (ran.exit_code, report["outcome"]) == (ExitCode.OK, "pass")
