"""Targets by name: entry points of group `decodegate.targets`, those that ship here, or `module:Class`."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import entry_points

from harness.target import Capabilities, Target

__all__ = ["GROUP", "TargetError", "known", "resolve"]

GROUP = "decodegate.targets"
SHIPPED = {  # the same as in pyproject.toml, for a checkout that is not installed
    "engine": "harness.targets.engine:EngineTarget",
    "mlx_lm": "harness.targets.mlx_lm:MlxLmTarget",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}\Z")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


class TargetError(ValueError):
    """A target's name or reference that leads nowhere; says what there is."""


def known() -> dict[str, str]:
    """Name -> `module:Class` of every target there is, installed engine or not."""
    return {**SHIPPED, **{point.name: point.value for point in entry_points(group=GROUP)}}


def resolve(spec: str) -> Target:
    """The target for a known name or for `module:Class`. Imports the adapter, never the engine it adapts."""
    reference = known().get(spec, spec)
    if not _REFERENCE.match(reference):
        raise TargetError(
            f"unknown target {spec!r}; known: {', '.join(sorted(known()))}, or module:Class of an adapter of yours"
        )
    module_name, class_name = reference.split(":")
    try:
        target = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:  # an adapter is code of somebody else's
        text = " ".join(str(error).split())[:300]
        raise TargetError(
            f"target {spec!r} cannot be made: {type(error).__name__}: {text}; it must be module:Class on the Python path, "
            "a class without constructor arguments"
        ) from None
    name = getattr(target, "name", None)
    if not isinstance(name, str) or not _NAME.match(name):
        raise TargetError(
            f"target {spec!r}: its name must be letters, digits, '_', '.' and '-', cells are named after it (got {name!r:.80})"
        )
    if not isinstance(getattr(target, "capabilities", None), Capabilities):
        raise TargetError(f"target {spec!r}: its capabilities must be a harness.target.Capabilities")
    missing = [method for method in ("require", "environment", "load") if not callable(getattr(target, method, None))]
    if missing:
        raise TargetError(f"target {spec!r} has no method {missing[0]}; harness.target.Target says what a target offers")
    return target
