"""Builds hold the package of a revision, of the working tree, or with one change, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.builds import BuildError, Builds, Source, fingerprint
from suites.harness.fixture_engine import MODEL, commit, make_repository, run_git


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


def worktrees(repository: Path) -> int:
    return len(run_git(repository, "worktree", "list").splitlines())


def test_a_revision_is_checked_out_as_it_was_and_removed_again(repository: Path) -> None:
    first = run_git(repository, "rev-parse", "HEAD")
    commit(repository, MODEL + "\nLATER = 1\n", "Something later")
    with Builds(Source.find("engine", repository)) as builds:
        made = builds.revision("HEAD~1")
        assert (made.directory / "engine" / "model.py").read_text() == MODEL
        assert (made.commit, made.dirty, made.subject) == (first, False, "A first engine")
        assert worktrees(repository) == 2
    assert not made.directory.exists()
    assert worktrees(repository) == 1


def test_a_revision_holds_the_package_and_nothing_else(repository: Path) -> None:
    (repository / "harness").mkdir()
    (repository / "harness" / "old.py").write_text("")
    commit(repository, MODEL, "With a harness of that time")
    with Builds(Source.find("engine", repository)) as builds:
        visible = {path.name for path in builds.revision("HEAD").directory.iterdir() if path.name != ".git"}
    assert visible == {"engine"}


def test_the_same_revision_twice_is_one_worktree(repository: Path) -> None:
    with Builds(Source.find("engine", repository)) as builds:
        assert builds.revision("HEAD") == builds.revision("main")
        assert worktrees(repository) == 2


def test_a_package_below_src_is_found_in_the_tree_and_in_revisions(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repository")
    run_git(repository, "rm", "-r", "--quiet", "engine")
    package = repository / "src" / "engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("A = 1\n")
    run_git(repository, "add", "-A")
    run_git(repository, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "src")
    with Builds(Source.find("engine", repository)) as builds:
        for made in (builds.working_tree(), builds.revision("HEAD")):
            assert (made.directory / "engine" / "__init__.py").read_text() == "A = 1\n"


def test_the_working_tree_is_copied_with_its_changes_and_called_dirty(repository: Path) -> None:
    with Builds(Source.find("engine", repository)) as builds:
        clean = builds.working_tree()
        (repository / "engine" / "model.py").write_text("A = 2\n")
        changed = builds.working_tree()
        assert (clean.dirty, changed.dirty) == (False, True)
        assert (clean.directory / "engine" / "model.py").read_text() == MODEL
        assert (changed.directory / "engine" / "model.py").read_text() == "A = 2\n"
        assert clean.fingerprint != changed.fingerprint


def test_the_fingerprint_of_a_clean_tree_is_that_of_its_revision(repository: Path) -> None:
    with Builds(Source.find("engine", repository)) as builds:
        assert builds.working_tree().fingerprint == builds.revision("HEAD").fingerprint


def test_caches_do_not_change_the_fingerprint_but_a_renamed_file_does(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = fingerprint(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("x")
    assert fingerprint(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert fingerprint(tmp_path) != before


def test_a_changed_build_differs_in_one_file_and_ends_with_its_block(repository: Path) -> None:
    with Builds(Source.find("engine", repository)) as builds:
        with builds.changed("mutant", "model.py", "A = 3\n") as made:
            assert (made.directory / "engine" / "model.py").read_text() == "A = 3\n"
        assert not made.directory.exists()
    assert (repository / "engine" / "model.py").read_text() == MODEL


@pytest.mark.parametrize("revision", ["nowhere", "--help", "HEAD:engine", ""])
def test_a_revision_that_is_no_commit_is_an_error_that_names_it(repository: Path, revision: str) -> None:
    with Builds(Source.find("engine", repository)) as builds, pytest.raises(BuildError, match="is no commit"):
        builds.revision(revision)


def test_a_revision_without_the_package_is_an_error_and_leaves_no_worktree(repository: Path) -> None:
    gone = commit(repository, None, "No engine any more")
    commit(repository, MODEL, "There it is again")
    with Builds(Source.find("engine", repository)) as builds, pytest.raises(BuildError, match="no usable engine/"):
        builds.revision(gone)
    assert worktrees(repository) == 1


def test_a_directory_without_git_has_a_working_tree_and_no_revisions(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("")
    with Builds(Source.find("engine", tmp_path)) as builds:
        assert builds.working_tree().commit is None
        with pytest.raises(BuildError, match="lies in no git repository"):
            builds.revision("HEAD")


def test_the_surroundings_of_a_hook_do_not_lead_git_elsewhere(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(repository / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / "nowhere" / "index"))
    with Builds(Source.find("engine", repository)) as builds:
        assert builds.revision("HEAD").subject == "A first engine"


def test_files_that_differ_from_a_revision_are_committed_changed_and_new_ones(repository: Path) -> None:
    base = run_git(repository, "rev-parse", "HEAD")
    commit(repository, MODEL + "\n", "Committed since")
    (repository / "engine" / "__init__.py").write_text("B = 1\n")
    (repository / "engine" / "new.py").write_text("")
    (repository / "readme").write_text("outside of the package")
    assert Source.find("engine", repository).changed_since(base) == {"model.py", "__init__.py", "new.py"}


def test_an_interrupt_removes_worktrees_too(repository: Path, tmp_path: Path) -> None:
    program = (
        "import signal, sys, time; from pathlib import Path; from harness.builds import Builds, Source\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job of a shell starts with it ignored
        "with Builds(Source.find('engine', Path(sys.argv[1]))) as builds:\n"
        "    made = builds.revision('HEAD'); print(made.directory, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(repository)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    assert directory.is_dir()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(120) != 0
    assert not directory.exists()
    assert worktrees(repository) == 1


def test_what_a_killed_run_left_in_gits_record_is_pruned_by_the_next(repository: Path, tmp_path: Path) -> None:
    run_git(repository, "worktree", "add", "--quiet", "--detach", str(tmp_path / "killed"), "HEAD")
    subprocess.run(["rm", "-r", str(tmp_path / "killed")], check=True)
    with Builds(Source.find("engine", repository)) as builds:
        builds.revision("HEAD")
    assert worktrees(repository) == 1
