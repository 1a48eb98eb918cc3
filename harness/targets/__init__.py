"""Targets by name: entry points of group `decodegate.targets`, those that ship here, or `module:Class`."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import entry_points

from harness.target import Target

__all__ = ["GROUP", "TargetError", "known", "resolve"]

GROUP = "decodegate.targets"
SHIPPED = {  # the same as in pyproject.toml, for a checkout that is not installed
    "engine": "harness.targets.engine:EngineTarget",
    "mlx_lm": "harness.targets.mlx_lm:MlxLmTarget",
}
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
        adapter = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise TargetError(f"target {spec!r} cannot be imported: {error}; it must be module:Class on the Python path") from None
    return adapter()
