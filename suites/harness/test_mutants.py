"""Mutants: anchors that match once, fates that say what happened, a baseline that comes first, results that are kept."""

from __future__ import annotations

import json
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import Result
from filelock import FileLock
from typer.testing import CliRunner

from decodegate.cli import app
from harness.cases import all_cases
from harness.cells import checks_in
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


def test_a_run_goes_on_where_the_last_one_ended(repository: Path, tmp_path: Path) -> None:
    first, _ = decodegate(tmp_path, ONE_TOO_FEW)
    changed = mutant("second", "del self.tokens[kept:]", "pass")
    second, found = decodegate(tmp_path, ONE_TOO_FEW + changed)
    assert (first.exit_code, second.exit_code) == (ExitCode.OK, ExitCode.OK)
    assert "1 of 2 mutants are kept" in second.stderr
    assert {id: result["fate"] for id, result in found.items()} == {"one_too_few": "caught", "second": "caught"}


@pytest.mark.parametrize("what", ["engine", "mutant"])
def test_a_result_is_not_kept_when_engine_or_mutant_changed(repository: Path, tmp_path: Path, what: str) -> None:
    decodegate(tmp_path, ONE_TOO_FEW)
    if what == "engine":
        commit(repository, MODEL + "\n# a comment\n", "Comment")
    again, _ = decodegate(tmp_path, ONE_TOO_FEW if what == "engine" else ONE_TOO_FEW.replace("+ 1", "+ 2"))
    assert "are kept" not in again.stderr


def test_a_torn_results_file_costs_its_last_line_only(repository: Path, tmp_path: Path) -> None:
    decodegate(tmp_path, ONE_TOO_FEW + BENIGN)
    file = tmp_path / "out" / "mutants.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    again, found = decodegate(tmp_path, ONE_TOO_FEW + BENIGN)
    assert "1 of 2 mutants are kept" in again.stderr
    assert len(found) == 2


def test_in_diff_runs_mutants_of_changed_files_only(repository: Path, tmp_path: Path) -> None:
    base = run_git(repository, "rev-parse", "HEAD")
    (repository / "engine" / "other.py").write_text("A = 1\n")
    elsewhere = mutant("elsewhere", "A = 1", "A = 2", scope="", file="other.py")
    ran, found = decodegate(tmp_path, ONE_TOO_FEW + elsewhere, "--in-diff", base)
    assert set(found) == {"elsewhere"}
    (repository / "engine" / "other.py").unlink()
    ran, found = decodegate(tmp_path, ONE_TOO_FEW + elsewhere, "--in-diff", base)
    assert (ran.exit_code, found) == (ExitCode.OK, {})
    assert "no mutant lies in a file that differs" in ran.stderr


def test_a_mutant_that_states_a_headroom_it_does_not_reach_is_weak(repository: Path, tmp_path: Path) -> None:
    ran, found = decodegate(tmp_path, mutant("weak", "len(self.tokens) - count", "len(self.tokens) - count + 1", headroom=1e12))
    assert (found["weak"]["fate"], found["weak"]["weak"], ran.exit_code) == ("caught", True, ExitCode.WRONG)


def test_a_second_run_into_the_same_directory_is_refused(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        ran, _ = decodegate(tmp_path, ONE_TOO_FEW)
    assert ran.exit_code == ExitCode.USAGE
    assert "another run writes to" in ran.stderr


def test_the_source_is_left_as_it_was(repository: Path, tmp_path: Path) -> None:
    decodegate(tmp_path, ONE_TOO_FEW)
    assert run_git(repository, "status", "--porcelain") == ""


def test_the_report_shows_both_sides_of_the_table(repository: Path, tmp_path: Path) -> None:
    decodegate(tmp_path, mutant("raises", "del self.tokens[kept:]", "del self.token[kept:]"))
    report = unescape((tmp_path / "out" / "mutants.md").read_text())
    assert "error: AttributeError: 'Sequence' object has no attribute 'token'" in report
    assert "pass: max abs difference" in report


@pytest.mark.parametrize(
    ("option", "there"), [(("--id", "one_to_few"), "near: one_too_few"), (("--kind", "F99"), "there are F05")]
)
def test_a_selection_that_names_nothing_is_a_usage_error_that_says_what_there_is(
    repository: Path, tmp_path: Path, option: tuple[str, str], there: str
) -> None:
    ran, _ = decodegate(tmp_path, ONE_TOO_FEW, *option)
    assert ran.exit_code == ExitCode.USAGE
    assert option[1] in ran.stderr and there in ran.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold"),
        ("[[mutant]]\nid = 3\n", "id must be a text"),
        ("not toml", "not TOML"),
        (ONE_TOO_FEW + ONE_TOO_FEW, "is in test.toml already"),
        (mutant("one", "a", "b", colour="red"), "unknown field 'colour'"),
        (mutant("one", "a", "b", kind="X1"), "kind 'X1'"),
        (mutant("one", "a", "b", file="../model.py"), "relative to the package"),
        (mutant("one", "a", "b", file="/etc/passwd.py"), "relative to the package"),
        (mutant("one", "a", "b", check=""), "check must be given"),
        (mutant("one", "a", "b", cases=[]), "cases must be"),
        (mutant("one", "a", "b", headroom=0.5), "at least 1"),
    ],
)
def test_a_catalogue_that_is_not_as_it_should_be_names_the_field(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "test.toml").write_text(text)
    with pytest.raises(CatalogueError, match=said):
        load(tmp_path)


def test_every_mutant_that_ships_applies_to_the_engine() -> None:
    """The anchors match exactly once, and the changed file compiles, with and without the mark that it ran."""
    engine = Path(find_spec("engine").submodule_search_locations[0])  # type: ignore[union-attr, index]
    for shipped in load():
        source = (engine / shipped.file).read_text()
        assert apply(source, shipped.change) != source, shipped.id
        compile(apply(source, shipped.change, "/a/file"), shipped.file, "exec")


def test_every_mutant_that_ships_names_checks_and_cases_that_there_are() -> None:
    checks, known = checks_in("suites.decoding"), {case.id for case in all_cases()}
    for shipped in load():
        assert shipped.benign or shipped.check in checks, shipped.id
        assert set(shipped.cases) <= known, shipped.id


SOURCE = """class A:
    def f(self, x):
        "Text."
        y = x + 1  # kept
        if x:
            return y
        elif y:
            return [x]; z = 1
        return f"{x + 1}"

    def g(self, x=2): return (x, x)

def h():
    pass
"""


@pytest.mark.parametrize(
    ("scope", "anchor", "replacement", "line"),
    [
        ("A.f", "x+1", "x - 1", "        y = (x - 1)  # kept"),
        ("A.f", "y = x + 1", "y = x\ny += 2", "        y = x\n        y += 2  # kept"),
        ("A.f", "[x]", "[]", "            return []; z = 1"),
        ("A.f", "z = 1", "z = 2", "            return [x]; z = 2"),
        ("A.g", "return x, x", "return x", "    def g(self, x=2): return x"),
        ("", "2", "3", "    def g(self, x=3): return (x, x)"),
        ("A", "def g(self, x=2):\n    return (x, x)", "g = None", "    g = None"),
    ],
)
def test_a_change_is_made_in_place_and_nowhere_else(scope: str, anchor: str, replacement: str, line: str) -> None:
    changed = apply(SOURCE, Change(scope, anchor, replacement))
    assert line in changed
    before, after = SOURCE.splitlines(), changed.splitlines()
    assert sum(old not in after for old in before) == 1


@pytest.mark.parametrize(
    ("scope", "anchor", "replacement", "said"),
    [
        ("A.f", "x", "y", "matches 3 times"),
        ("A.f", "nothing", "y", "matches 0 times"),
        ("A.nowhere", "x", "y", "'nowhere' is defined 0 times"),
        ("A.f", "[x]", "[ x ]", "changes nothing"),
        ("A.f", "x + 1", "y = 3", "replacement 'y = 3' is none"),
        ("A.f", "y = x + 1", "y = (", "does not parse"),
        ("A.f", "y = (", "y", "does not parse"),
        ("A.f", "", "y", "the anchor is empty"),
    ],
)
def test_an_anchor_that_does_not_hold_is_an_error(scope: str, anchor: str, replacement: str, said: str) -> None:
    with pytest.raises(AnchorError, match=said):
        apply(SOURCE, Change(scope, anchor, replacement))


@pytest.mark.parametrize(
    ("scope", "anchor", "replacement", "call"),
    [
        ("A.f", "x + 1", "x + 2", "A().f(1)"),
        ("A.f", "z = 1", "z = 2", "A().f(0)"),
        ("A.g", "return x, x", "return 1", "A().g()"),
        ("h", "pass", "if 1: pass", "h()"),
    ],
)
def test_the_mark_is_left_when_the_changed_code_runs_and_not_before(
    tmp_path: Path, scope: str, anchor: str, replacement: str, call: str
) -> None:
    reached = tmp_path / "it's reached"
    names: dict = {}
    exec(apply(SOURCE.replace("return [x];", "pass;"), Change(scope, anchor, replacement), str(reached)), names)
    assert not reached.exists()
    eval(call, names)
    assert reached.exists()


def test_a_name_that_is_defined_twice_is_no_scope() -> None:
    with pytest.raises(AnchorError, match="'f' is defined 2 times"):
        apply("def f(): return 1\ndef f(): return 2\n", Change("f", "1", "3"))


def test_a_selection_is_by_id_kind_and_file(tmp_path: Path) -> None:
    (tmp_path / "test.toml").write_text(ONE_TOO_FEW + mutant("other", "a", "b", kind="F01", file="state/kv.py"))
    mutants = load(tmp_path)
    assert [m.id for m in select(mutants, kinds=["F01"])] == ["other"]
    assert [m.id for m in select(mutants, files={"model.py"})] == ["one_too_few"]
    assert select(mutants, ids=["other"], files={"model.py"}) == []
    assert mutants[1].module == "state.kv"


def test_a_results_file_that_is_none_is_a_usage_error(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mutants.jsonl").write_text('{"schema": 1}\n{"colour": "red"}\n')
    ran, _ = decodegate(tmp_path, ONE_TOO_FEW)
    assert ran.exit_code == ExitCode.USAGE
    assert "mutants.jsonl:2" in ran.stderr
