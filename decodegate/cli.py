"""The `decodegate` command. Each module of `decodegate.commands` registers its own; heavy imports stand inside."""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import sys

import typer

from decodegate import commands
from harness.outcomes import ExitCode, Infra

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

app = typer.Typer(
    name="decodegate",
    help="Proves that a language-model engine decodes what its model computes, or shows the token where it breaks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _group() -> None:
    """With a callback the app takes a command's name even while it has a single command."""


for _module in sorted(module.name for module in pkgutil.iter_modules(commands.__path__)):
    importlib.import_module(f"decodegate.commands.{_module}").register(app)


def main() -> None:
    """Console script. What surroundings lack ends with TEMPORARY and one line on stderr, never a traceback."""
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        app()
    except Infra as error:
        print(f"decodegate: infra: {error}", file=sys.stderr)
        raise SystemExit(int(ExitCode.TEMPORARY)) from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"decodegate: infra: cannot write: {error.strerror}; make room, or write to another place", file=sys.stderr)
        raise SystemExit(int(ExitCode.TEMPORARY)) from None


if __name__ == "__main__":
    main()
