"""Builds: directories that hold another version of the package under test, and nothing else.

A worker puts the directory first on its path and proves that the package it imported lies there (harness.worker). Because the
directory holds that package only, checks, references and adapters stay today's, whatever the build.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.git import GitError, git

__all__ = ["BuildError", "Builds", "Made", "NoCommit", "Source", "fingerprint"]

WORKING_TREE = "working tree"
_SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.tmp", ".*")


class BuildError(RuntimeError):
    """A build cannot be made; says what is missing and what to do."""


class NoCommit(BuildError):
    """What was named as a revision is no commit of the repository."""


@dataclass(frozen=True)
class Source:
    """Where the package under test lies: `directory` holds it, `repository` is the git work tree around it, or None."""

    package: str
    directory: Path
    repository: Path | None

    @classmethod
    def find(cls, package: str, repository: Path | None = None) -> Source:
        """The package that this Python would import; with `repository`, the one that lies there (at its top or in src/)."""
        if repository is None:
            directory = _importable(package)
        else:
            places = [repository / package, repository / "src" / package]
            found = [place for place in places if place.is_dir()]
            if not found:
                raise BuildError(f"{repository} has no package {package!r} (looked for {' and '.join(map(str, places))})")
            directory = found[0].parent
        directory = directory.resolve()
        try:
            return cls(package, directory, Path(git(directory, "rev-parse", "--show-toplevel")).resolve())
        except GitError:
            return cls(package, directory, None)

    @property
    def path(self) -> Path:
        return self.directory / self.package

    def changed_since(self, revision: str) -> frozenset[str]:
        """Files of the package, relative to it, that differ between a revision and the working tree; new ones included."""
        repository = self._repository("compare with a revision")
        commit = _commit(repository, revision)
        prefix = self.path.relative_to(repository).as_posix()
        names = git(repository, "diff", "--name-only", "-z", "--no-renames", commit, "--", prefix).split("\0")
        names += git(repository, "ls-files", "--others", "--exclude-standard", "-z", "--", prefix).split("\0")
        return frozenset(name.removeprefix(f"{prefix}/") for name in names if name)

    def _repository(self, purpose: str) -> Path:
        if self.repository is None:
            raise BuildError(
                f"{self.path} lies in no git repository, so there is nothing to {purpose}; "
                "run from a checkout (pip install -e .), or name one with --repo"
            )
        return self.repository


@dataclass(frozen=True)
class Made:
    """A build that is on disk. `directory` is what a worker gets; the rest is for the reader of a report."""

    name: str  # unique in a run: "working tree", an abbreviated commit, a mutant's id
    directory: Path
    fingerprint: str  # of the package's files
    commit: str | None = None
    dirty: bool | None = None  # the package differs from that commit
    subject: str = ""  # first line of the commit's message

    def described(self) -> dict[str, Any]:
        """For records and reports: all but the place on this disk."""
        return {name: value for name, value in asdict(self).items() if name != "directory"}


class Builds:
    """Makes builds of one source in a temporary folder. A context manager: on leaving, by Ctrl-C or otherwise, all are removed,
    git's own record of its worktrees included.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._exit = contextlib.ExitStack()
        self._root = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="decodegate-builds-"))).resolve()

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def working_tree(self) -> Made:
        """The package as it is on disk now; a copy, so that edits made while a run goes on do not reach it."""
        source = self.source
        directory = self._copy(WORKING_TREE)
        commit, dirty, subject = None, None, ""
        if source.repository is not None:
            with contextlib.suppress(GitError):  # a repository without a commit
                commit, subject = _describe(source.repository, "HEAD")
                dirty = bool(git(source.repository, "status", "--porcelain", "--", str(source.path)))
        return Made(WORKING_TREE, directory, fingerprint(directory), commit, dirty, subject)

    def revision(self, revision: str) -> Made:
        """The package of a git revision, checked out into a worktree that holds nothing but it. Raises BuildError."""
        source = self.source
        repository = source._repository("check out")
        commit = _commit(repository, revision)
        prefix = source.path.relative_to(repository).as_posix()
        name = commit[:10]
        worktree = self._root / f"revision-{name}"
        if not worktree.exists():
            self._exit.callback(_remove_worktree, repository, worktree)
            try:
                git(repository, "worktree", "prune")  # of runs that were killed
                git(repository, "worktree", "add", "--quiet", "--detach", "--no-checkout", str(worktree), commit)
                git(worktree, "checkout", "--quiet", commit, "--", prefix)
            except GitError as error:
                raise BuildError(f"revision {revision!r} ({name}) has no usable {prefix}/: {error}") from None
        directory = worktree / Path(prefix).parent
        _, subject = _describe(repository, commit)
        return Made(name, directory, fingerprint(directory), commit, False, subject)

    @contextlib.contextmanager
    def changed(self, name: str, file: str, text: str) -> Iterator[Made]:
        """The working tree's package with one file's text replaced; removed again when the block ends."""
        directory = self._copy(name)
        try:
            target = directory / self.source.package / file
            if not target.is_file():
                raise BuildError(f"{self.source.package}/{file} does not exist")
            target.write_text(text, encoding="utf-8")
            yield Made(name, directory, fingerprint(directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _copy(self, name: str) -> Path:
        directory = Path(tempfile.mkdtemp(prefix=f"{re.sub('[^a-z0-9]+', '-', name.lower())}-", dir=self._root))
        shutil.copytree(self.source.path, directory / self.source.package, ignore=_SKIPPED)
        return directory


def fingerprint(directory: Path, pattern: str = "*") -> str:
    """SHA-256 over names and bytes of all files below that match, caches and hidden files left out."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob(pattern)):
        parts = path.relative_to(directory).parts
        if path.is_file() and "__pycache__" not in parts and not any(part.startswith(".") for part in parts):
            content = path.read_bytes()
            digest.update(f"{'/'.join(parts)}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _importable(package: str) -> Path:
    """The directory that holds a top-level package; finding it does not import it."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise BuildError(f"no package {package!r} can be imported from here; install it, or name its repository with --repo")
    return Path(places[0]).parent


def _commit(repository: Path, revision: str) -> str:
    try:
        return git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except GitError:
        shallow = (repository / ".git" / "shallow").exists()
        hint = "; the clone is shallow, fetch more of its history" if shallow else ""
        raise NoCommit(f"{revision!r} is no commit of {repository}{hint}") from None


def _describe(repository: Path, revision: str) -> tuple[str, str]:
    """Full commit id and the first line of its message."""
    commit, _, subject = git(repository, "log", "-1", "--format=%H%n%s", "--end-of-options", revision).partition("\n")
    return commit, subject


def _remove_worktree(repository: Path, worktree: Path) -> None:
    shutil.rmtree(worktree, ignore_errors=True)
    git(repository, "worktree", "prune")
