"""The `decodegate` command. Each module of `decodegate.commands` registers its own; heavy imports stand inside."""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import signal
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from decodegate import commands
from decodegate.output import outlives_its_reader
from harness.outcomes import ExitCode, Infra, Missing, Rejected

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


HELP = """
Proves that a language-model engine decodes what its model computes, or shows the token where it breaks.

A *case* is a small model that stresses something, a *check* a way of decoding it (in chunks, batched, rewound, ...), a *target*
an engine. Each *cell* of target, case, check and dtype replays the check's schedule of operations and compares every row of
logits with a full recompute in float64, the oracle.

Start with `decodegate doctor`, then `decodegate gate`; a failure comes with the `decodegate replay` that shows its rows.
"""


class Commands(TyperGroup):
    """The commands, and what they end with where they raise: one line on stderr, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Missing as error:
            self._end(ctx, ExitCode.USAGE, str(error))
        except Rejected as error:
            self._end(ctx, ExitCode.WRONG, str(error))
        except Infra as error:
            self._end(ctx, ExitCode.TEMPORARY, f"infra: {error}")
        except OSError as error:
            if error.errno not in FULL:
                raise
            said = f"infra: cannot write: {error.strerror}; make room, or write to another place"
            self._end(ctx, ExitCode.TEMPORARY, said)

    def _end(self, ctx: Any, code: ExitCode, text: str) -> NoReturn:
        typer.echo(" ".join(filter(None, ("decodegate", ctx.invoked_subcommand))) + f": {text}", err=True)
        raise typer.Exit(int(code)) from None


app = typer.Typer(
    name="decodegate",
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _group() -> None:
    """With a callback the app takes a command's name even while it has a single command."""


ORDER = ["gate", "smoke", "evidence", "mutants", "bench", "replay", "report", "list", "doctor", "lock", "generate", "convert"]
_modules = sorted(module.name for module in pkgutil.iter_modules(commands.__path__))
for _module in sorted(_modules, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
    importlib.import_module(f"decodegate.commands.{_module}").register(app)


def main() -> None:
    """Console script."""
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    else:
        sys.stdout = outlives_its_reader(sys.stdout)
    sys.stderr = outlives_its_reader(sys.stderr)
    # A CI that cancels sends it; as Ctrl-C does, it leaves reports of what was done, and no worktree or process behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()


if __name__ == "__main__":
    main()
