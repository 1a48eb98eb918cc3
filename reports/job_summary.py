"""CI job summaries: the Markdown is appended to the file that the CI offers, by the outermost run only."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["append", "claim"]

_OWNER = "_DECODEGATE_OUTERMOST_RUN"  # not among the variables that change numerics, which a header lists
_FILE = "GITHUB_STEP_SUMMARY"
_LIMIT = 2**20  # a summary beyond 1 MiB is rejected as a whole


def claim(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Call when a run starts, before it starts processes: True for the outermost one. Runs inside it inherit the mark."""
    return environ.setdefault(_OWNER, str(os.getpid())) == str(os.getpid())


def append(markdown: str, environ: MutableMapping[str, str] = os.environ) -> Path | None:
    """Append to the job-summary file and return its path; None where there is none, or where this run is inside another."""
    path = environ.get(_FILE)
    if not path or not claim(environ):
        return None
    file = Path(path)
    if (file.stat().st_size if file.exists() else 0) + len(markdown.encode()) >= _LIMIT:
        markdown = f"{markdown.splitlines()[0]}\n\nThe rest is too long for a job summary; gate.md has it.\n"
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"\n{markdown}\n")
    return file
