"""Text for reports: hostile characters made visible, numbers and times in few characters, escapes of each format."""

from __future__ import annotations

import html
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.figures import figure

__all__ = [
    "build_name", "code_span", "duration", "figure", "lines", "markdown", "one_line", "plural", "shorten", "times", "visible",
    "write_text",
]  # fmt: skip

# Characters that a terminal obeys, that XML forbids or that reorder what a reader sees: C0 and C1 controls, line and paragraph
# separators, bidirectional controls, surrogates, non-characters. Newline and tab are handled by the callers.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def visible(text: str) -> str:
    """The text with control, bidirectional and unpaired characters as \\xNN or \\uNNNN; newlines and tabs stay.

    The result is valid in XML 1.0 and encodes as UTF-8 whatever the input was.
    """
    return _INVISIBLE.sub(_escape, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """`visible` on one line: runs of white space become one space, so that a pasted command cannot run half way."""
    return visible(" ".join(text.split()))


def lines(text: str) -> list[str]:
    """The lines of a traceback or of stderr, made visible, without empty lines at either end."""
    return visible(text).expandtabs(4).strip("\n").split("\n") if text.strip() else []


def shorten(text: str, width: int) -> str:
    """At most `width` characters; what is left out is shown by an ellipsis."""
    return text if len(text) <= width else text[: max(width - 1, 0)].rstrip() + "…"


def markdown(text: str) -> str:
    """Text for a cell of a GitHub table or a paragraph: nothing in it is markup, HTML, a mention or a line break."""
    escaped = re.sub(r"([\\`*\[\]|~$])", r"\\\1", html.escape(one_line(text), quote=False))
    escaped = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)  # between letters an underscore is only a letter
    return escaped.replace("@", "&#64;")


def code_span(text: str, *, table: bool = True) -> str:
    """An inline code span; its fence is longer than any run of backticks inside. In a table `|` is escaped even there."""
    text = one_line(text) or " "
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text.replace('|', chr(92) + '|') if table else text}{padding}{fence}"


def build_name(build: Mapping[str, Any]) -> str:
    """The name of a build (Made.described()); a working tree says the commit that it stands on, and whether it has changes."""
    name, commit = str(build.get("name", "")), str(build.get("commit") or "")
    if not commit or commit.startswith(name):
        return name
    return f"{name} at {commit[:10]}{' with changes' if build.get('dirty') else ''}"


def times(value: float | None) -> str:
    """A factor: 61×, 4.2e6×."""
    return figure(value) + ("×" if value is not None and not math.isnan(value) else "")


def duration(seconds: float) -> str:
    """12 ms, 41.2 s, 3 min 05 s, 2 h 07 min."""
    if not math.isfinite(seconds) or seconds < 0:
        return "–"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def plural(count: int, noun: str) -> str:
    """1 cell, 2 cells."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def write_text(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
