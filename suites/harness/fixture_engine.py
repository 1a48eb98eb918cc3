"""A git repository with a package `engine` in numpy, made by a test, and the target that runs whatever build of it is first on
the path. It has the seams that a fault needs (a history per sequence, a rewind, a slice of rows) and loads in no time.
"""

from __future__ import annotations

import importlib
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np

from suites.harness import fake

MODEL = '''"""A recompute per call; what is kept of a sequence is its tokens."""

import os

from suites.harness.fake import llama


class Sequence:
    def __init__(self):
        self.tokens = []

    def append(self, tokens):
        self.tokens += tokens

    def rewind(self, count):
        kept = len(self.tokens) - count
        del self.tokens[kept:]


def forward(config, weights, sequence, count):
    rows = llama(config, weights, sequence.tokens)
    return rows[-count:]


def unused(rows):
    return rows * 2
'''


class FixtureTarget(fake.Honest):
    """Runs the `engine` that lies first on the path."""

    name = "fixture"
    package = "engine"

    def start(self) -> FixtureSession:
        return FixtureSession(self, self._config, self._weights)

    def load(self, checkpoint: Path, *, dtype: str, layout: str) -> FixtureTarget:
        importlib.import_module("engine.model")
        super().load(checkpoint, dtype=dtype, layout=layout)
        return self


class WithoutRewind(FixtureTarget):
    capabilities = replace(FixtureTarget.capabilities, rewind="it keeps no history")


class FixtureSession(fake.Session):
    def open(self, sequence: str) -> None:
        self._sequences = getattr(self, "_sequences", {})
        self._sequences[sequence] = importlib.import_module("engine.model").Sequence()
        super().open(sequence)

    def feed(self, sequence: str, tokens: list[int], *, all_rows: bool, chunk: int | None) -> np.ndarray:
        self._sequences[sequence].append(tokens)
        return super().feed(sequence, tokens, all_rows=all_rows, chunk=chunk)

    def step(self, tokens: dict[str, int]) -> np.ndarray:
        for sequence, token in tokens.items():
            self._sequences[sequence].append([token])
        return super().step(tokens)

    def rewind(self, sequence: str, count: int) -> None:
        self._sequences[sequence].rewind(count)
        super().rewind(sequence, count)

    def _rows(self, sequence: str, count: int) -> np.ndarray:
        engine = importlib.import_module("engine.model")
        return engine.forward(self._config, self._weights, self._sequences[sequence], count)


def make_repository(directory: Path, model: str = MODEL) -> Path:
    """A repository at `directory` with one commit."""
    directory.mkdir(parents=True)
    run_git(directory, "init", "--quiet", "--initial-branch=main")
    commit(directory, model, "A first engine")
    return directory


def commit(repository: Path, model: str | None, message: str) -> str:
    """Commit a text of engine/model.py (None: remove the package); returns the commit id."""
    package = repository / "engine"
    if model is None:
        run_git(repository, "rm", "-r", "--quiet", "engine")
        (repository / "readme").write_text(message)
    else:
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "model.py").write_text(model)
    run_git(repository, "add", "-A")
    run_git(repository, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", message)
    return run_git(repository, "rev-parse", "HEAD")


def run_git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *arguments], check=True, capture_output=True, text=True).stdout.strip()
