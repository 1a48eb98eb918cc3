"""Evidence: the same cells on two builds, before and after a change, judged by today's checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.builds import BuildError, Made
from harness.cells import Cell
from harness.execution import Checkpoints, Execution
from harness.isolation import Isolation, default_memory_bytes, default_threads
from harness.outcomes import Outcome
from harness.records import Record
from harness.worker import Build, Describe

__all__ = ["AFTER", "BEFORE", "CANNOT_RUN", "Evidence", "reason_not_to_run"]

BEFORE, AFTER = "before", "after"
CANNOT_RUN = "cannot_run"  # key of Record.extra: why a build could not be asked this question at all
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line \d+')
_INTERFACE = ("ImportError", "ModuleNotFoundError", "AttributeError", "TypeError", "NotImplementedError")


class Evidence:
    """A worker on each build, and one oracle for both. A context manager.

    Raises BuildError where the two builds hold the same code: they could not show a difference.
    """

    def __init__(self, base: Made, head: Made, *, seed: int = 0, timeout_s: float = 60.0) -> None:
        if base.fingerprint == head.fingerprint:
            raise BuildError(f"{base.name} and {head.name} hold the same code; there is no before and after")
        self.builds = {BEFORE: base, AFTER: head}
        self._exit = ExitStack()
        self._checkpoints = Checkpoints(seed)
        self._exit.callback(self._checkpoints.close)
        self._executions: dict[str, Execution] = {}
        for role, made in self.builds.items():
            isolation = Isolation(
                Build(role, made.directory),
                timeout_s=timeout_s,
                threads=default_threads(1),  # the two take turns
                memory_bytes=default_memory_bytes(2),
            )
            self._executions[role] = Execution(isolation, seed, checkpoints=self._checkpoints, power=False)
            self._exit.callback(self._executions[role].close)

    def __enter__(self) -> Evidence:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def environment(self, target: str) -> dict[str, str]:
        """What the target says of itself on the build after the change."""
        isolation = self._executions[AFTER].isolation
        return isolation.result(isolation.submit(Describe(f"environment of {target}", target))).environment

    def described(self) -> list[dict[str, object]]:
        """The two builds, for the header: role, name, commit, dirty, subject, fingerprint."""
        return [{"role": role, **made.described()} for role, made in self.builds.items()]

    def records(self, cells: Sequence[Cell]) -> Iterator[tuple[Record, Record]]:
        """(before, after) of each cell, one cell after another, so that what disturbs the machine meets both."""
        for cell in cells:
            before, after = (self._record(role, cell) for role in (BEFORE, AFTER))
            yield before, after

    def _record(self, role: str, cell: Cell) -> Record:
        record = self._executions[role].record(cell)
        reason = reason_not_to_run(record, self.builds[role].directory)
        if reason:
            record.extra[CANNOT_RUN] = reason
        return record


def reason_not_to_run(record: Record, build: Path) -> str:
    """Why a build could not be asked at all: it declares that it cannot, or it lacks what today's adapter calls.

    An exception counts as such where it says that a name or an argument is not there, and was raised by the adapter's own code:
    the same exception from inside the build is what the build does when it is asked.
    """
    if record.outcome in (Outcome.UNSUPPORTED, Outcome.INFRA):
        return record.message
    kind = record.message.partition(":")[0]
    if record.outcome is not Outcome.ERROR or kind not in _INTERFACE:
        return ""
    frames = list(_frames(record.detail.splitlines(), kind))
    if not frames or Path(frames[-1]).is_relative_to(build):
        return ""
    return f"this build lacks what today's adapter calls ({record.message})"


def _frames(lines: Iterable[str], kind: str) -> Iterator[str]:
    """Files of a traceback's frames, outermost first, up to the line that names the exception."""
    for line in lines:
        if line.startswith(f"{kind}:") or line.strip() == kind:
            return
        match = _FRAME.match(line)
        if match:
            yield match["file"]
