"""Mutants: anchors that match once, fates that say what happened, a baseline that comes first, results that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from decodegate.cli import app
from harness.mutants.anchor import AnchorError, Change, apply
from harness.mutants.catalogue import CatalogueError, load, select
from harness.outcomes import ExitCode
from suites.harness.fixture_engine import MODEL, commit, make_repository, run_git

REWIND = "rewind_and_go_on_matches_recompute"
INCREMENTAL = "incremental_logits_match_full_forward"


def mutant(
    id: str, anchor: str, replacement: str, check: str = REWIND, scope: str = "Sequence.rewind", **fields: object
) -> str:
    table = {
        "id": id,
        "kind": "F05",
        "why": "A test says so.",
        "report": "owner/repository#1",
        "file": "model.py",
        "scope": scope,
        "anchor": anchor,
        "replacement": replacement,
        "check": check,
        "cases": ["llama/gqa"],
        **fields,
    }
    return "[[mutant]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items() if value != "")


ONE_TOO_FEW = mutant("one_too_few", "len(self.tokens) - count", "len(self.tokens) - count + 1")
BENIGN = mutant("benign_slice", "rows[-count:]", "rows[len(rows) - count:]", check="", scope="forward", benign=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


def decodegate(tmp_path: Path, catalogue: str, *options: str) -> tuple[Result, dict[str, dict]]:
    """Exit code and report of a run, and its results by id."""
    (tmp_path / "catalogue").mkdir(exist_ok=True)
    (tmp_path / "catalogue" / "test.toml").write_text(catalogue)
    arguments = ["mutants", "--target", "suites.harness.fixture_engine:FixtureTarget", "--repo", str(tmp_path / "repository")]
    arguments += ["--catalogue", str(tmp_path / "catalogue"), "--out", str(tmp_path / "out"), "--jobs", "2", "--json", *options]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    found = json.loads(ran.stdout)["mutants"] if ran.stdout.startswith("{") else []
    return ran, {result["id"]: result for result in found}


def test_each_fate_is_told_from_the_others(repository: Path, tmp_path: Path) -> None:
    catalogue = [
        ONE_TOO_FEW,
        BENIGN,
        mutant("raises", "del self.tokens[kept:]", "del self.token[kept:]"),
        mutant("aborts", "kept = len(self.tokens) - count", "os.write(2, b'offset == 3\\n'); os.abort()"),
        mutant("missed", "del self.tokens[kept:]", "self.tokens[kept:] = []"),
        mutant("wrong_check", "del self.tokens[kept:]", "pass", check=INCREMENTAL),
        mutant("does_not_import", "import os", "import os, nowhere_to_be_found", scope=""),
        mutant("never_run", "rows * 2", "rows * 3", scope="unused"),
        mutant("matches_twice", "self.tokens", "self.token", scope="Sequence"),
        mutant("matches_nothing", "self.nothing", "self.tokens"),
        mutant("not_benign", "len(self.tokens) - count", "len(self.tokens) - count + 1", check="", benign=True),
        mutant("no_such_check", "kept", "count", check="no_check_of_this_name"),
    ]
    ran, found = decodegate(tmp_path, "\n".join(catalogue))
    assert {id: result["fate"] for id, result in found.items()} == {
        "one_too_few": "caught",
        "benign_slice": "missed",
        "raises": "caught",
        "aborts": "caught",
        "missed": "missed",
        "wrong_check": "wrong-check",
        "does_not_import": "unviable",
        "never_run": "vacuous",
        "matches_twice": "error",
        "matches_nothing": "error",
        "not_benign": "caught",
        "no_such_check": "error",
    }
    assert ran.exit_code == ExitCode.WRONG
    assert {id for id, result in found.items() if result["good"]} == {"one_too_few", "benign_slice", "raises", "aborts"}
    assert found["one_too_few"]["headroom"] > 20
    assert found["one_too_few"]["whole"]["outcome"] == "pass"
    assert "+        kept = (len(self.tokens) - count + 1)" in found["one_too_few"]["diff"]
    assert "AttributeError" in found["raises"]["broken"]["message"]
    assert found["aborts"]["broken"]["outcome"] == "crash"
    assert found["aborts"]["broken"]["detail"] == "offset == 3"
    assert "nowhere_to_be_found" in found["does_not_import"]["message"]
    assert "matches 4 times" in found["matches_twice"]["message"]


def test_a_red_baseline_ends_with_4_before_any_mutant(repository: Path, tmp_path: Path) -> None:
    commit(repository, MODEL.replace("rows[-count:]", "rows[-count:] * 2"), "Broken")
    ran, _ = decodegate(tmp_path, ONE_TOO_FEW)
    assert ran.exit_code == ExitCode.BASELINE_RED
    assert REWIND in ran.stderr
    assert not (tmp_path / "out" / "mutants.md").exists()
