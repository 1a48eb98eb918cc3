"""`decodegate list`: what there is to select."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from decodegate.help import LOOK, examples

__all__ = ["register"]

SUITES = "suites.decoding"


class Kind(str, Enum):
    FAMILIES = "families"
    CASES = "cases"
    CHECKS = "checks"
    TARGETS = "targets"
    FAULTS = "faults"
    MUTANTS = "mutants"


EPILOG = examples(
    "decodegate list cases",
    "decodegate list targets --json",
)


def register(app: typer.Typer) -> None:
    app.command("list", epilog=EPILOG, rich_help_panel=LOOK)(list_)


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects instead.")] = False,
) -> None:
    """List families, cases, checks, targets, runtime faults or mutants, one a line: name, then what it is."""
    rows = _ROWS[kind]()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        facts = [value if isinstance(value, str) else ", ".join(map(str, value)) for key, value in row.items() if key != "name"]
        print(f"{row['name']:<{width}}  {'  ·  '.join(filter(None, facts))}")


def _families() -> list[dict]:
    from harness.cases import all_cases

    families: dict[str, list[str]] = {}
    for case in all_cases():
        families.setdefault(case.family, []).append(case.name)
    return [{"name": family, "cases": names} for family, names in families.items()]


def _cases() -> list[dict]:
    from harness.cases import all_cases

    return [
        {"name": case.id, "stresses": case.stresses, "dtypes": case.dtypes, "layouts": case.layouts} for case in all_cases()
    ]


def _checks() -> list[dict]:
    from harness.cells import checks_in

    return [
        {"name": check.name, "holds": check.holds, "needs": sorted(check.needs), "faults": check.faults}
        for check in checks_in(SUITES).values()
    ]


def _targets() -> list[dict]:
    from harness.outcomes import Infra
    from harness.targets import TargetError, known, resolve

    rows = []
    for name, reference in sorted(known().items()):
        try:
            resolve(name).require()
            state = "installed"
        except (Infra, TargetError) as error:
            state = str(error)
        rows.append({"name": name, "reference": reference, "state": state})
    return rows


def _faults() -> list[dict]:
    from harness.faults import ENGINE

    return [{"name": fault.name, "breaks": fault.breaks} for fault in ENGINE.values()]


def _mutants() -> list[dict]:
    from harness.mutants.catalogue import load

    return [
        {
            "name": m.id,
            "kind": m.kind,
            "check": m.check or "every check (benign)",
            "cases": m.cases,
            "report": m.report,
            "why": m.why,
        }
        for m in load()
    ]


_ROWS = {
    Kind.FAMILIES: _families,
    Kind.CASES: _cases,
    Kind.CHECKS: _checks,
    Kind.TARGETS: _targets,
    Kind.FAULTS: _faults,
    Kind.MUTANTS: _mutants,
}
