"""What help texts have in common. They are Markdown: paragraphs flow, whatever the width."""

from __future__ import annotations

__all__ = ["JUDGE", "LOOK", "USE", "examples"]

JUDGE, LOOK, USE = "Judge an engine", "Look closer", "Use the engine"  # headings in `decodegate --help`


def examples(*commands: str) -> str:
    """The epilog of a command's help: each of the commands on a line of its own."""
    return "Examples:\n\n" + "\\\n".join(commands)
