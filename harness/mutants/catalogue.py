"""The catalogue: mutants declared in TOML files next to this module, checked when they are read."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from harness.mutants.anchor import Change

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["CATALOGUE", "HEADROOM", "CatalogueError", "Mutant", "load", "select"]

CATALOGUE = Path(__file__).parent / "catalogue"
HEADROOM = 20.0  # error / bound that a mutant must reach, unless it states another figure and why
MAX_FILE_BYTES = 1 << 20
MAX_TEXT = 4000
_ID = re.compile(r"[a-z][a-z0-9_]{2,79}\Z")
_KIND = re.compile(r"F[0-9]{2}\Z")


class CatalogueError(ValueError):
    """A catalogue file is not as it should be, or a selection names what is not there; says file, mutant and field."""


@dataclass(frozen=True)
class Mutant:
    """One planted fault. A benign mutant changes the code but not what it computes: no check may turn red on it."""

    id: str
    kind: str  # of fault, as in the catalogue of reported faults: F01
    why: str  # one sentence: what goes wrong, and how it shows
    report: str  # the public report it stands for, owner/repo#number; for a benign one the equal rewriting
    file: str  # relative to the package under test
    scope: str
    anchor: str
    replacement: str
    check: str = ""  # the check that must catch it; empty only for a benign one, which every check must let pass
    cases: tuple[str, ...] = ()  # on which it must be caught, each of them
    dtype: str = "float32"
    layout: str = "dense"
    benign: bool = False
    headroom: float = HEADROOM

    @property
    def change(self) -> Change:
        return Change(self.scope, self.anchor, self.replacement)

    @property
    def digest(self) -> str:
        """Of everything that is declared: a result stands for exactly this mutant."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def module(self) -> str:
        """The file's module, relative to the package: `state.kv`."""
        parts = PurePosixPath(self.file).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def load(directory: Path = CATALOGUE) -> list[Mutant]:
    """Mutants of all TOML files of a directory, by file name and in their order. Raises CatalogueError."""
    files = sorted(directory.glob("*.toml"))
    if not files:
        raise CatalogueError(f"{directory}: no .toml files, a catalogue has at least one")
    mutants: list[Mutant] = []
    where: dict[str, str] = {}
    for file in files:
        for mutant in _load_file(file):
            if mutant.id in where:
                raise CatalogueError(f"{file.name}: id {mutant.id!r} is in {where[mutant.id]} already")
            where[mutant.id] = file.name
            mutants.append(mutant)
    return mutants


def select(
    mutants: Iterable[Mutant], ids: Collection[str] = (), kinds: Collection[str] = (), files: Collection[str] | None = None
) -> list[Mutant]:
    """Those with one of the ids, of one of the kinds, and in one of the files; empty (files: None) selects all.

    Raises CatalogueError for an id or a kind that no mutant has.
    """
    mutants = list(mutants)
    for what, wanted, known in (("id", ids, {m.id for m in mutants}), ("kind", kinds, {m.kind for m in mutants})):
        for name in wanted:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                some = f"there are {', '.join(sorted(known)[:12])}{', ...' if len(known) > 12 else ''}"
                raise CatalogueError(f"no mutant has {what} {name!r}; {'near: ' + ', '.join(near) if near else some}")
    return [
        mutant
        for mutant in mutants
        if (not ids or mutant.id in ids) and (not kinds or mutant.kind in kinds) and (files is None or mutant.file in files)
    ]


def _load_file(file: Path) -> list[Mutant]:
    content = file.read_bytes()
    if len(content) > MAX_FILE_BYTES:
        raise CatalogueError(f"{file.name}: {len(content)} bytes, more than {MAX_FILE_BYTES}")
    try:
        raw = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{file.name}: not TOML ({error})") from None
    entries = raw.get("mutant")
    if raw.keys() != {"mutant"} or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CatalogueError(f"{file.name}: must hold [[mutant]] tables and nothing else (got {', '.join(raw) or 'nothing'})")
    return [
        _mutant(entry, f"{file.name}: {str(entry.get('id', f'mutant {index}'))[:80]}") for index, entry in enumerate(entries, 1)
    ]


def _mutant(entry: dict[str, Any], where: str) -> Mutant:
    kinds = {item.name: str(item.type) for item in fields(Mutant)}
    for name, value in entry.items():
        if name not in kinds:
            raise CatalogueError(f"{where}: unknown field {name!r}; known: {', '.join(kinds)}")
        good = {
            "str": isinstance(value, str) and len(value) <= MAX_TEXT,
            "bool": isinstance(value, bool),
            "float": isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1,
            "tuple[str, ...]": isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value),
        }[kinds[name]]
        if not good:
            raise CatalogueError(f"{where}: {name} must be {_WORDS[kinds[name]]} (got {str(value)[:60]!r})")
    missing = [
        name for name in ("id", "kind", "why", "report", "file", "anchor", "replacement", "cases") if not entry.get(name)
    ]
    if missing:
        raise CatalogueError(f"{where}: {', '.join(missing)} must be given")
    mutant = Mutant(**{"scope": "", **entry, "cases": tuple(entry["cases"])})
    for name, value, pattern in (("id", mutant.id, _ID), ("kind", mutant.kind, _KIND)):
        if not pattern.match(value):
            raise CatalogueError(f"{where}: {name} {value!r} must match {pattern.pattern}")
    path = PurePosixPath(mutant.file)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
        raise CatalogueError(f"{where}: file {mutant.file!r} must be a Python file, relative to the package")
    if not mutant.check and not mutant.benign:
        raise CatalogueError(f"{where}: check must be given, the one that must catch it (only a benign mutant has none)")
    return mutant


_WORDS = {
    "str": f"a text of at most {MAX_TEXT} characters",
    "bool": "true or false",
    "float": "a number, at least 1",
    "tuple[str, ...]": "a list of texts",
}
