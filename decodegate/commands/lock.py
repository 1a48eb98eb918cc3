"""`decodegate lock -- CMD`: run any command while holding the device lock."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from decodegate.help import LOOK, examples

__all__ = ["register", "run_locked"]

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as shells say it
FORWARDED = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
FROM_TERMINAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name))
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
EPILOG = examples(
    "decodegate lock -- nox -s smoke",
    "decodegate lock --timeout 60 -- python train.py",
    "decodegate lock --status",
)


def register(app: typer.Typer) -> None:
    context = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command("lock", epilog=EPILOG, rich_help_panel=LOOK, context_settings=context)(command)


def command(
    argv: Annotated[list[str] | None, typer.Argument(metavar="-- CMD...", help="The command to run, after `--`.")] = None,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the lock; then the exit code is 75.")] = 900.0,
    status: Annotated[bool, typer.Option("--status", help="Say who holds the lock, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --status: machine-readable.")] = False,
) -> None:
    """Run a command while holding the device lock, so that measurements do not disturb each other.

    The exit code is the command's own (128 + N when signal N ended it). Signals are passed on to the command. Commands of
    decodegate inside CMD do not take the lock a second time. The lock is free as soon as its holder is gone, however it ends.
    """
    if status:
        _print_status(as_json)
        return
    if not argv:
        raise typer.BadParameter("nothing to run; for example: decodegate lock -- nox -s bench", param_hint="CMD")
    from harness.lock import hold

    with hold(shlex.join(argv), timeout=timeout):
        code = run_locked(argv)
    raise typer.Exit(code)


def _print_status(as_json: bool) -> None:
    from harness.lock import status

    found = status()
    if as_json:
        holder = asdict(found.holder) if found.holder else None
        if holder:
            del holder["token"]  # the proof is for the holder's children only
        print(json.dumps({"path": str(found.path), "held": found.held, "holder": holder}))
    elif found.held:
        print(f"{found.path}: held by {found.holder or 'a process that has not said who it is'}")
    else:
        print(f"{found.path}: free")


def run_locked(argv: list[str]) -> int:
    """Run argv as a child, pass signals on to it, and return its exit code as a shell would say it."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: object) -> None:
        if child is None:
            early.append(number)
        elif child.poll() is None and not (number in FROM_TERMINAL and _in_foreground()):
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        child = subprocess.Popen(argv, preexec_fn=_die_with_parent(os.getpid()) if sys.platform == "linux" else None)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    except FileNotFoundError:
        print(f"decodegate: {argv[0]!r} was not found; is it installed and on PATH?", file=sys.stderr)
        return NOT_FOUND
    except PermissionError as error:
        print(f"decodegate: {argv[0]!r} cannot be run ({error.strerror}); is it executable?", file=sys.stderr)
        return NOT_EXECUTABLE
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _in_foreground() -> bool:
    """Whether a Ctrl-C has reached the child already: the terminal sends it to the whole foreground group."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _die_with_parent(parent: int):
    """For Popen on Linux: when the holder is killed the lock is free, so the command must not go on using the device."""
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os.kill(os.getpid(), signal.SIGTERM)

    return in_child
