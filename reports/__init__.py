"""Reports: pure functions of a record file (terminal, Markdown, HTML, JUnit, before/after tables).

The same record file renders to the same bytes, whenever and wherever: no clock, no environment, no order of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.records import load
from reports import html, junit, markdown
from reports.summary import Run, Summary
from reports.text import write_text

__all__ = ["FORMATS", "read", "write", "write_all"]

FORMATS = {"md": markdown.render, "html": html.render, "xml": junit.render}


def read(*record_files: Path) -> Summary:
    """One or more record files as one summary; a directory stands for the gate.jsonl in it. Raises RecordError."""
    runs = []
    for given in record_files:
        path = given / "gate.jsonl" if given.is_dir() else given
        header, records = load(path)
        runs.append(Run(header, tuple(records), path.parent.name if path.name == "gate.jsonl" else path.stem))
    return Summary(runs)


def write(report: Summary, out_dir: Path, formats: Sequence[str] = tuple(FORMATS)) -> dict[str, Path]:
    """Write gate.md, gate.html, gate.xml (keys md, html, xml); each appears whole or not at all."""
    out_dir.mkdir(parents=True, exist_ok=True)
    written = {}
    for name in formats:
        path = out_dir / f"gate.{name}"
        write_text(path, FORMATS[name](report))
        written[name] = path
    return written


def write_all(record_file: Path, out_dir: Path) -> dict[str, Path]:
    """All reports of one record file, in out_dir. Raises RecordError where the file is not one."""
    return write(read(record_file), out_dir)
