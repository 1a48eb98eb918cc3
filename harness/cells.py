"""Cells: the matrix of target, case, check, dtype and layout, and the selection of a part of it."""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
import re
import shlex
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import cases
from harness.cases.case import Case
from harness.check import Check
from harness.outcomes import Outcome, Rejected
from harness.target import Target
from reference_models import model_type, text_config

__all__ = [
    "DTYPES",
    "Cell",
    "Matrix",
    "Selection",
    "SelectionError",
    "Subject",
    "cell_id_of",
    "checkpoint_subjects",
    "checks_in",
    "parse_cell_id",
    "refusal",
    "subjects",
    "unknown",
]  # fmt: skip

DTYPES = ("float32", "bfloat16", "float16")
MAX_CONFIG_BYTES = 4 * 2**20
MAX_VOCAB = 1 << 24
_CELL = re.compile(r"([^:\[\]]+)::([^:\[\]/]+/[^:\[\]]+)::([^:\[\]]+)\[([a-z0-9_]+),([a-z0-9_]+)\]\Z")


class SelectionError(ValueError):
    """A name that selects nothing; says what there is."""


@dataclass(frozen=True)
class Subject:
    """What is loaded: a tiny case, which is built from the seed, or a checkpoint that is there already."""

    case: Case
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Cell:
    """The unit of running, recording and isolating."""

    target_spec: str  # a known name or module:Class
    target: str
    subject: Subject
    check: Check
    dtype: str
    layout: str

    @property
    def id(self) -> str:
        return f"{self.target}::{self.subject.case.id}::{self.check.name}[{self.dtype},{self.layout}]"

    @property
    def order(self) -> tuple[str, str, str, str]:
        """Cells with equal order share a loaded model and an oracle; they run one after another."""
        return (self.target, self.subject.case.id, self.dtype, self.layout)

    def replay_command(self, seed: int) -> str:
        words = ["decodegate", "replay", self.id, "--seed", str(seed)]
        if self.target_spec != self.target:
            words += ["--target", self.target_spec]
        if self.subject.checkpoint is not None:
            words += ["--checkpoint", str(self.subject.checkpoint)]
        return shlex.join(words)


def cell_id_of(nodeid: str) -> str | None:
    """The cell of a pytest node id; None where the node is an ordinary test."""
    parts = nodeid.split("::")
    cell = "::".join(parts[-3:])
    return cell if len(parts) > 3 and _CELL.match(cell) else None


def parse_cell_id(text: str) -> tuple[str, str, str, str, str]:
    """Target, case, check, dtype and layout; raises SelectionError."""
    match = _CELL.match(text)
    if match is None:
        raise SelectionError(f"{text!r} is no cell; a cell reads target::family/case::check[dtype,layout]")
    target, case, check, dtype, layout = match.groups()
    return target, case, check, dtype, layout


@dataclass(frozen=True)
class Selection:
    """Empty: everything."""

    families: Collection[str] = ()
    cases: Collection[str] = ()
    checks: Collection[str] = ()
    dtypes: Collection[str] = ()
    layouts: Collection[str] = ()

    def validate(self, known: Iterable[Case]) -> None:
        """Raise SelectionError, with near matches, for names that there are not."""
        known = list(known)
        _validate("family", self.families, {case.family for case in known})
        _validate("case", self.cases, {case.id for case in known})
        _validate("dtype", self.dtypes, set(DTYPES))
        _validate("layout", self.layouts, {layout for case in known for layout in case.layouts})

    def has_case(self, case: Case) -> bool:
        return (not self.families or case.family in self.families) and (not self.cases or case.id in self.cases)


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """An error text with the near matches of a name that there is not; where nothing is near, with some of what there is."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if near or not known:
        return f"unknown {kind} {name!r}; {'near' if near else 'there is none'}: {', '.join(near)}".removesuffix(": ")
    return f"unknown {kind} {name!r}; there are {', '.join(sorted(known)[:12])}{', ...' if len(known) > 12 else ''}"


def _validate(kind: str, names: Iterable[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise SelectionError(unknown(kind, name, known))


@dataclass(frozen=True)
class Matrix:
    """A target and the subjects that it is judged on."""

    target_spec: str
    target: Target
    subjects: Sequence[Subject]
    selection: Selection = field(default_factory=Selection)

    def cells(self, check: Check) -> Iterator[Cell]:
        """The selected cells of a check, in the order of subjects."""
        if self.selection.checks and check.name not in self.selection.checks:
            return
        for subject in self.subjects:
            only = subject.case.checks
            if check.applies(subject.case) and (not only or check.name in only):
                for layout in self.selection.layouts or subject.case.layouts:
                    if layout in subject.case.layouts and check.layout in (None, layout):
                        for dtype in self._dtypes(subject.case, layout):
                            yield Cell(self.target_spec, self.target.name, subject, check, dtype, layout)

    def _dtypes(self, case: Case, layout: str) -> Collection[str]:
        """A further layout says where the same arithmetic's state is kept: unless asked for, one dtype shows that."""
        return self.selection.dtypes or (case.dtypes if layout == case.layouts[0] else case.dtypes[:1])


def subjects(selection: Selection, checkpoints: Iterable[Path] = ()) -> list[Subject]:
    """The selected tiny cases, then the selected checkpoints."""
    real = checkpoint_subjects(checkpoints)
    selection.validate([*cases.all_cases(), *(subject.case for subject in real)])
    tiny = [Subject(case) for case in cases.all_cases()]
    return [subject for subject in (*tiny, *real) if selection.has_case(subject.case)]


def checkpoint_subjects(checkpoints: Iterable[Path]) -> list[Subject]:
    """A case of each checkpoint directory, named after it: `llama/SmolLM2-135M`.

    Raises SelectionError where there is no such directory, Rejected where its config.json can be no case.
    """
    found: list[Subject] = []
    taken = {case.id for case in cases.all_cases()}
    for path in checkpoints:
        config = _read_config(path)
        try:
            family = model_type(config).replace("-", "_")
        except ValueError as error:  # a ReferenceError, whose module loads torch
            raise Rejected(f"{path}/config.json: {error}") from None
        if not re.fullmatch(r"[a-z0-9_]{1,64}", family):
            raise Rejected(f"{path}/config.json: model_type is {config['model_type']!r:.80}, not the name of a family")
        vocab = text_config(config).get("vocab_size")  # prompts are drawn from it before any target has checked the config
        if type(vocab) is not int or not 2 <= vocab <= MAX_VOCAB:
            raise Rejected(f"{path}/config.json: vocab_size must be from 2 to {MAX_VOCAB} (got {vocab!r:.80})")
        base = re.sub(r"[^A-Za-z0-9._-]+", "_", path.resolve().name)[:80]
        name, number = base, 1
        while f"{family}/{name}" in taken:
            number += 1
            name = f"{base}-{number}"
        taken.add(f"{family}/{name}")
        found.append(Subject(Case(family, name, f"checkpoint {path}", config), path.resolve()))
    return found


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not path.is_dir():
        raise SelectionError(f"checkpoint {str(path)!r} is no directory; a checkpoint is one with config.json and safetensors")
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would block
            raise Rejected(f"{file}: not a file")
        with file.open("rb") as opened:
            data = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise Rejected(f"{file}: {error.strerror}; a checkpoint is a directory with config.json and safetensors") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise Rejected(f"{file}: larger than {MAX_CONFIG_BYTES} bytes, not a model's config")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{file}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise Rejected(f"{file}: must be a JSON object (got {type(config).__name__})")
    return config


def checks_in(package: str) -> dict[str, Check]:
    """Name -> check of every Check that the modules of a suite package declare."""
    root = importlib.import_module(package)
    modules = [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(root.__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Check)]
    return {check.name: check for check in found}


def refusal(cell: Cell, target: Target) -> tuple[Outcome, str] | None:
    """What the target declares that it cannot do of this cell, with the reason."""
    can = target.capabilities
    if can.families is not None and cell.subject.case.family not in can.families:
        return Outcome.UNSUPPORTED, f"{target.name} does not serve the {cell.subject.case.family} family"
    if cell.dtype not in can.dtypes:
        return Outcome.UNSUPPORTED, f"{target.name} does not compute in {cell.dtype}"
    if cell.layout not in can.layouts:
        return Outcome.UNSUPPORTED, f"{target.name} has no {cell.layout} layout"
    for need in sorted(cell.check.needs):
        able = can.able(need, cell.layout)
        if able is not True:
            return Outcome.UNSUPPORTED, f"{need}: {able or 'not supported'}"
    return None
