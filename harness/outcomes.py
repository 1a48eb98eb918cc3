"""What a cell can end as, and the exit codes that follow from it (design: Words, Commands)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

__all__ = ["ExitCode", "Infra", "Missing", "Outcome", "Refusal", "Rejected", "Unsupported", "exit_code"]


class Outcome(str, Enum):
    PASS = "pass"
    FAIL = "fail"  # numbers beyond the bound
    ERROR = "error"  # exception
    CRASH = "crash"  # the process died
    TIMEOUT = "timeout"
    INFRA = "infra"  # no device, no weights, lock not obtained
    FLAKE = "flake"  # passed only on a repeat; never counted as a pass
    UNSUPPORTED = "unsupported"  # the target declares that it cannot, with the reason
    VACUOUS = "vacuous"  # it ran, but the feature under test did not

    def __str__(self) -> str:
        return self.value


class ExitCode(int, Enum):
    OK = 0
    WRONG = 1
    USAGE = 2
    VACUOUS = 3  # vacuous cells, or no evidence at all
    BASELINE_RED = 4  # mutants, evidence
    TEMPORARY = 75  # only infra or flake (EX_TEMPFAIL)
    INTERRUPTED = 130  # by Ctrl-C or SIGTERM, with nothing wrong until then (128 + SIGINT, as shells count)


class Unsupported(Exception):
    """A target declares that it cannot do what the schedule asks; the text is the reason."""


class Refusal(Exception):
    """A session refuses one operation by declaration and is as it was; what a schedule's `refuse` waits for, else an error."""


class Rejected(Exception):
    """A checkpoint is damaged or inconsistent, or a target takes it for that; the text, one line, is all there is to know."""


class Missing(Exception):
    """What was named on the command line is not there; the text says what could be named instead."""


class Infra(Exception):
    """The surroundings failed (no weights, no device, lock, target not installed); the text says what to do."""


WRONG = frozenset({Outcome.FAIL, Outcome.ERROR, Outcome.CRASH, Outcome.TIMEOUT})
TEMPORARY = frozenset({Outcome.INFRA, Outcome.FLAKE})


def exit_code(outcomes: Iterable[Outcome]) -> ExitCode:
    """The exit code of a run; worst news first. A run in which nothing passed has no evidence and is VACUOUS."""
    seen = set(outcomes)
    if seen & WRONG:
        return ExitCode.WRONG
    if Outcome.VACUOUS in seen:
        return ExitCode.VACUOUS
    if seen & TEMPORARY:
        return ExitCode.TEMPORARY
    return ExitCode.OK if Outcome.PASS in seen else ExitCode.VACUOUS
