"""A runtime fault: what is patched while it is planted, and whether that had an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from harness.cases.case import Case

__all__ = ["Fault", "Patch", "Planted"]

Patch = tuple[object, str, Callable[..., Any]]  # an object, the name of its attribute, and what to put there


@dataclass
class Planted:
    """What a planted fault reports."""

    called: bool = False  # the broken code ran and did what is wrong

    def mark(self) -> None:
        self.called = True


@dataclass(frozen=True)
class Fault:
    """`make` is called in the worker, after the engine was imported."""

    name: str
    breaks: str  # what goes wrong, one clause
    make: Callable[[Planted], list[Patch]]
    traits: frozenset[str] = frozenset()  # it breaks nothing in a case that has none of these; empty: it may break any
    unless: frozenset[str] = frozenset()  # nor is it planted in a case that has one of these: others show enough there

    def touches(self, case: Case) -> bool:
        return (not self.traits or bool(self.traits & case.traits)) and not self.unless & case.traits

    @contextmanager
    def planted(self) -> Iterator[Planted]:
        report = Planted()
        patches = self.make(report)
        if not patches:
            raise LookupError(f"fault {self.name} finds nothing to break")
        with ExitStack() as stack:
            for owner, attribute, replacement in patches:
                stack.enter_context(mock.patch.object(owner, attribute, replacement))
            yield report
