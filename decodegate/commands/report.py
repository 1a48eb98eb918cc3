"""`decodegate report`: render record files again, also of a run that was killed or is still going, or several as one."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from decodegate.help import LOOK, examples
from decodegate.output import writable_directory
from harness.outcomes import ExitCode

__all__ = ["register"]


class Format(str, Enum):
    TERMINAL = "terminal"
    MARKDOWN = "md"
    HTML = "html"
    JUNIT = "xml"


EPILOG = examples(
    "decodegate report gate-out",
    "decodegate report base.jsonl head.jsonl --out both",
    "decodegate report gate-out --format md",
)


def register(app: typer.Typer) -> None:
    app.command("report", epilog=EPILOG, rich_help_panel=LOOK)(report)


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Record files, or directories with a gate.jsonl.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", callback=writable_directory, help="Write gate.md, gate.html and gate.xml here."),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option(
            "--format", help="One format only; without --out it goes to stdout. Default: terminal, and with --out all."
        ),
    ] = None,
) -> None:
    """Render record files again: the same file gives the same bytes. Several files are shown side by side, as several builds.

    Exits with 0 whatever the records say, and with 2 where a file is not a record file.
    """
    from harness.records import RecordError
    from reports import FORMATS, read, terminal, write

    try:
        summary = read(*files)
    except RecordError as error:
        typer.echo(f"decodegate report: {error}", err=True)
        raise typer.Exit(int(ExitCode.USAGE)) from None
    wanted = [format.value] if format and format is not Format.TERMINAL else list(FORMATS)
    if format and format is not Format.TERMINAL and out is None:
        typer.echo(FORMATS[format.value](summary), nl=False)
        return
    written = write(summary, out, wanted) if out and format is not Format.TERMINAL else {}
    terminal.summary(summary, files=written.values())
