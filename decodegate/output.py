"""Where a command writes: checked before the work begins, so that an hour's run is not lost for a name that cannot be."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

__all__ = ["writable_directory", "writable_file"]


def writable_directory(path: Path | None) -> Path | None:
    """An option's callback: the directory, which is made where it is not there; a usage error where it cannot be written to."""
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise typer.BadParameter(f"{str(path)!r} is no directory that can be written to ({error.strerror})") from None
    return path


def writable_file(path: Path | None) -> Path | None:
    """An option's callback: the file's name, whose directory can be written to."""
    if path is not None:
        if path.is_dir():
            raise typer.BadParameter(f"{str(path)!r} is a directory; name a file")
        writable_directory(path.parent)
    return path
