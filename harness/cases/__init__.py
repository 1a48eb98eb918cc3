"""Tiny cases, one module per family with its `CASES`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from harness.cases.case import Case

__all__ = ["Case", "all_cases", "find"]

_SHARED = frozenset({"build", "case", "quantise", "routing", "stored"})  # modules here that are no families


@cache
def all_cases() -> tuple[Case, ...]:
    """The cases of all families, in the order of family and file."""
    families = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED)
    return tuple(case for family in families for case in importlib.import_module(f"{__name__}.{family}").CASES)


def find(id: str) -> Case:
    """The case of an id such as llama/gqa; KeyError with the ids that there are."""
    for case in all_cases():
        if case.id == id:
            return case
    raise KeyError(f"there is no case {id!r}; there are {', '.join(case.id for case in all_cases())}")
