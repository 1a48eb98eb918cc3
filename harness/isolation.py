"""The parent's side of isolation: one worker process, one cell at a time, replaced when it dies or overruns.

A worker has a pipe of its own and nothing is shared between workers, so that one that is killed at any moment, even while it
sends a result, costs its cell and nothing else; its exit status is read whatever it is, zero included.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from harness.outcomes import Outcome
from harness.worker import MEMORY_EXIT, Build, Describe, Job, Ran, Setup, Started, proof, serve

__all__ = ["Isolation", "default_memory_bytes", "default_threads", "signal_name"]

START_S = 120.0  # a worker that has not taken up its first cell by then will not
START_ATTEMPTS = 3
AHEAD = 2  # cells that a worker may hold: the one it runs and the next, which it starts while the parent judges
DETAIL_BYTES = 8192  # of a cell's output that a record keeps
GRACE_S = 2.0


class Isolation:
    """Runs jobs on one build. Use as a context manager; `submit` returns at once, `result` waits and never raises for a cell.

    `fresh_process`: each job gets a process of its own (`--isolate cell`).
    """

    def __init__(
        self,
        build: Build,
        *,
        timeout_s: float,
        threads: int,
        memory_bytes: int,
        fresh_process: bool = False,
    ) -> None:
        self.build = build
        self.timeout_s = timeout_s
        self.threads = threads
        self._memory_bytes = memory_bytes
        self._fresh_process = fresh_process
        self._scratch = Path(tempfile.mkdtemp(prefix="decodegate-cells-"))
        self._logs = 0
        self._worker: _Worker | None = None
        self._queue: deque[Job | Describe] = deque()  # submitted and not yet answered, in order
        self._sent = 0  # how many of them the present worker has been sent
        self._done: dict[str, Ran] = {}  # by nonce

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, while there is one."""
        return self._worker.process.pid if self._worker else None

    def start(self) -> None:
        """Start the worker before there is work, so that it loads while the caller does other things."""
        if self._worker is None:
            self._logs += 1
            log = self._scratch / f"worker-{self._logs}.log"
            self._worker = _Worker(Setup(self.build, self.threads, self._memory_bytes, log))

    def submit(self, job: Job | Describe) -> str:
        """Queue a job; the text returned names it to `result`. The job's `log` and `nonce` are set here."""
        self._logs += 1
        job = replace(job, log=self._scratch / f"{self._logs}.log", nonce=secrets.token_hex(16))
        self._queue.append(job)
        self._send()
        return job.nonce

    def result(self, nonce: str) -> Ran:
        """What came of a job; its crash, its overrun or its exception is the outcome of that job alone."""
        while nonce not in self._done:
            job = self._queue[0]
            ran = self._answer(job)
            self._queue.popleft()
            self._sent = max(0, self._sent - 1)
            if ran.outcome not in (None, Outcome.UNSUPPORTED, Outcome.INFRA) and not ran.rejected:
                ran.detail = "\n".join(filter(None, (ran.detail.rstrip(), _tail(job.log))))
            job.log.unlink(missing_ok=True)
            self._done[job.nonce] = ran
            if self._fresh_process:
                self._drop()
            self._send()
        return self._done.pop(nonce)

    def close(self) -> None:
        self._drop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _answer(self, job: Job | Describe) -> Ran:
        for _ in range(START_ATTEMPTS):
            self._send()
            assert self._worker is not None  # _send starts one when the queue is not empty
            ran = self._attend(self._worker, job)
            if ran is not None:
                return ran
            log = _tail(self._worker.log)
            self._drop()
        return Ran(outcome=Outcome.ERROR, message=f"no worker process took up this cell, {START_ATTEMPTS} tried", detail=log)

    def _attend(self, worker: _Worker, job: Job | Describe) -> Ran | None:
        """Messages of one job, from Started to Ran; None where the worker was lost before it had begun."""
        deadline = time.time() + START_S
        began: float | None = None
        while True:
            try:
                if not worker.pipe.poll(max(0.0, deadline - time.time())):
                    return self._overrun(worker, began)
                message = worker.pipe.recv()
            except (EOFError, OSError):
                return self._crash(worker, began)
            if isinstance(message, Started):
                began = message.at
                deadline = began + self.timeout_s
            elif isinstance(message, Ran):
                if message.proof != proof(job.nonce, message.replays):
                    return Ran(
                        outcome=Outcome.ERROR, message="the worker cannot prove that it ran this cell", detail=message.detail
                    )
                return message

    def _overrun(self, worker: _Worker, began: float | None) -> Ran | None:
        if began is None:
            return None
        self._drop()
        return Ran(outcome=Outcome.TIMEOUT, message=f"no result after {self.timeout_s:g} s", duration_s=self.timeout_s)

    def _crash(self, worker: _Worker, began: float | None) -> Ran | None:
        if began is None:
            return None
        worker.process.join(GRACE_S)
        code = worker.process.exitcode
        self._drop()
        return Ran(outcome=Outcome.CRASH, message=self._cause_of_death(code), duration_s=max(0.0, time.time() - began))

    def _cause_of_death(self, code: int | None) -> str:
        if code is None:
            return "the process closed its pipe and went on"
        if code == MEMORY_EXIT:
            return f"the process outgrew its memory limit of {self._memory_bytes / 2**30:.1f} GiB"
        if code >= 0:
            return f"the process ended with exit status {code}"
        hint = " (from outside, or by the kernel for want of memory)" if -code == signal.SIGKILL else ""
        return f"the process died of {signal_name(-code)}{hint}"

    def _send(self) -> None:
        """Start a worker if there is work, and keep it AHEAD."""
        if self._queue:
            self.start()
        limit = 1 if self._fresh_process else AHEAD
        while self._worker is not None and self._sent < min(limit, len(self._queue)):
            with contextlib.suppress(OSError):  # the worker has died; _answer will see it
                self._worker.pipe.send(self._queue[self._sent])
            self._sent += 1

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        self._sent = 0


class _Worker:
    """A spawned process with its end of the pipe. Spawned, never forked: a forked child of a process that has loaded an
    accelerator's runtime or started threads is not safe. It is started from the thread that lives as long as the run.
    """

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self.log = setup.log
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, setup), name="decodegate-worker", daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def stop(self) -> None:
        """End the process and whatever it has started, at once: nothing of it is needed any more."""
        pid = self.process.pid
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.log.unlink(missing_ok=True)


def default_threads(workers: int) -> int:
    return max(1, (os.cpu_count() or 1) // workers)


def default_memory_bytes(workers: int) -> int:
    """Half of the machine's memory, shared between the workers."""
    return psutil.virtual_memory().total // 2 // workers


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - DETAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text).strip()
