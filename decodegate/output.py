"""Where a command writes: checked before the work begins, so that an hour's run is not lost for a name that cannot be, and a
stdout whose reader has gone costs no command its exit code.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import TextIO, cast

import typer

__all__ = ["outlives_its_reader", "reader_is_gone", "writable_directory", "writable_file"]


class _Pipe(io.FileIO):
    """A file descriptor that drops what is written to it once its reader has gone."""

    reader_is_gone = False

    def write(self, data, /) -> int:  # type: ignore[no-untyped-def, override]  # Buffer has a name from Python 3.12 on
        try:
            return super().write(data)
        except BrokenPipeError:
            self.reader_is_gone = True
            return memoryview(data).nbytes


def outlives_its_reader(stream: TextIO) -> TextIO:
    """stdout or stderr as it is, but for a pipe whose reader ends, as `head` does: what comes after goes nowhere.

    Here rather than in a handler of BrokenPipeError: pytest and rich have their own, which would end a run or change its code.
    """
    if not isinstance(stream, io.TextIOWrapper) or stream.isatty():
        return stream
    raw = _Pipe(stream.fileno(), "wb", closefd=False)
    buffer = cast(io.BufferedWriter, raw) if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )


def reader_is_gone(stream: TextIO) -> bool:
    """Whether what is written to a stream of `outlives_its_reader` goes nowhere by now."""
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "reader_is_gone", False)


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
