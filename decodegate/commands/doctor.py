"""`decodegate doctor`: what there is here to run a gate with, and what to install."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from decodegate.help import LOOK, examples

if TYPE_CHECKING:
    from harness.diagnosis import Diagnosis, Finding

__all__ = ["register"]
EPILOG = examples(
    "decodegate doctor",
    "decodegate doctor --json",
)


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog=EPILOG, rich_help_panel=LOOK)(command)


def command(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """Say which device, BLAS and versions a gate would use, who holds the lock, and what is missing.

    Ends 0 unless something makes a gate impossible; what is merely absent (a peer, a checkpoint) is listed with its
    install command.
    """
    from harness.diagnosis import diagnose
    from harness.outcomes import ExitCode

    found = diagnose()
    print(json.dumps(found.to_json()) if as_json else _text(found))
    if found.blocking:
        raise typer.Exit(int(ExitCode.TEMPORARY))


def _text(found: Diagnosis) -> str:
    held = f"held by {found.lock['holder'] or 'a process that has not said who it is'}" if found.lock.get("held") else "free"
    dirty = " with uncommitted changes" if found.dirty else ""
    rows = [
        ("device", found.device),
        ("blas", found.blas),
        ("cores", str(found.cores)),
        ("memory", f"{found.available_bytes / 2**30:.1f} of {found.memory_bytes / 2**30:.1f} GiB free"),
        ("commit", f"{found.commit}{dirty}" if found.commit else "not a git work tree"),
        ("lock", f"{found.lock['path']}: {held}" if found.lock else "unusable"),
        *((f"flag {name}", value) for name, value in found.flags.items()),
        *((name, value) for name, value in found.versions.items()),
    ]
    lines = [f"{name:<22} {value}" for name, value in rows]
    lines += ["", "targets", *_lines(found.targets), "", "checkpoints for smoke and bench", *_lines(found.checkpoints), ""]
    lines += [f"Warning: {text}" for text in found.warnings]
    lines += [f"NOT ABLE TO RUN A GATE: {text}" for text in found.blocking] or ["A gate can run here."]
    return "\n".join(lines)


def _lines(findings: list[Finding]) -> list[str]:
    width = max(len(finding.name) for finding in findings)
    return [f"  {'yes' if one.available else 'no ':<4} {one.name:<{width}}  {one.text}" for one in findings]
