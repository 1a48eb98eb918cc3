"""The child side of isolation: a spawned process that runs one cell after another on one build of a target.

Nothing a target prints can break the protocol: results travel through a pipe of their own, and standard output and error of
each cell go to a file of that cell, whose first line is the cell's name.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

from harness.outcomes import Infra, Outcome, Refusal, Rejected, Unsupported
from harness.records import utf8
from harness.replay import Plan, Replay, replay
from harness.target import Loaded, Target
from harness.targets import resolve

__all__ = ["MEMORY_EXIT", "Build", "BuildError", "Describe", "Job", "Ran", "Setup", "Started", "proof", "serve"]

MEMORY_EXIT = 86  # exit status of a worker that outgrew its memory limit
MAX_LOG_BYTES = 8 * 2**20  # of one cell's standard output and error; a target that prints without end fills no disk
WATCH_S = 0.2
KEPT_MODELS = 2  # cells are ordered by case, dtype and layout, so one model serves many; two for a shuffled neighbour


class BuildError(ValueError):
    """A text that names no build."""


@dataclass(frozen=True)
class Build:
    """One version of a target's code: a directory that is put first on sys.path; None for the code that is installed."""

    name: str = "tree"
    directory: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Build:
        """`NAME=DIR`; raises BuildError."""
        name, _, directory = text.partition("=")
        if not name or not directory or not Path(directory).is_dir():
            raise BuildError(f"a build is NAME=DIR with a directory that is there (got {text!r})")
        return cls(name, Path(directory).resolve())


@dataclass(frozen=True)
class Setup:
    """What a worker is started with."""

    build: Build
    threads: int  # of BLAS and of the engine's CPU kernels
    memory_bytes: int  # of private memory; 0: no limit
    log: Path  # what it prints before its first cell


@dataclass(frozen=True)
class Job:
    """One cell. `faults` are replayed after the cell itself, each on its own, for the power figure."""

    cell: str
    target: str  # a name or module:Class
    checkpoint: Path
    dtype: str
    layout: str
    plans: tuple[Plan, ...]
    faults: tuple[str, ...]
    log: Path = Path()  # this and `nonce` are set when the job is submitted
    nonce: str = ""


@dataclass(frozen=True)
class Describe:
    """Ask for the target's environment (versions, device, BLAS)."""

    cell: str
    target: str
    log: Path = Path()
    nonce: str = ""


@dataclass(frozen=True)
class Started:
    nonce: str
    at: float  # time.time() in the worker


@dataclass
class Ran:
    """What came of a job. `outcome` is None where it ran to its end and the numbers are still to be judged."""

    proof: str = ""
    outcome: Outcome | None = None
    message: str = ""
    detail: str = ""
    rejected: bool = False  # the target does not take the checkpoint, for the reason in `message`
    replays: list[Replay] = field(default_factory=list)
    faults: dict[str, list[Replay] | str] = field(default_factory=dict)  # text: why this fault gave no numbers
    environment: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)  # bytes of the process: resident after the job, peak since it began
    duration_s: float = 0.0


def proof(nonce: str, replays: list[Replay]) -> str:
    """Shows that the worker ran this job to the end: the parent's nonce, mixed with what the job yielded."""
    rows = ",".join(str(len(one.rows)) for one in replays)
    return hashlib.sha256(f"{nonce}:{rows}".encode()).hexdigest()


def serve(connection: Connection, setup: Setup) -> None:
    """The process's main: answers each request with Started and then Ran, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    redirect(setup.log, "worker starts")
    faulthandler.enable()
    _die_with_parent()
    bind_threads(setup.threads)
    limit_memory(setup.memory_bytes)
    if setup.build.directory is not None:
        sys.path.insert(0, str(setup.build.directory))
    watch = _Watch(setup.memory_bytes)
    models = _Models(setup.build)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone or has no more work
        while True:
            request = connection.recv()
            redirect(request.log, request.cell)
            watch.log = request.log
            connection.send(Started(request.nonce, time.time()))
            began = time.perf_counter()
            ran = _run(request, models)
            ran.duration_s = time.perf_counter() - began
            _flush()
            connection.send(ran)


def _run(request: Job | Describe, models: _Models) -> Ran:
    """Every exception of a target becomes an outcome of this cell."""
    try:
        target = models.target(request.target)
        target.require()
        if isinstance(request, Describe):
            return Ran(proof(request.nonce, []), environment=target.environment())
        loaded = models.load(target, request)
        ran = Ran(replays=_replay_all(loaded, request))
        for name in request.faults:
            ran.faults[name] = _under_fault(target, name, loaded, request)
        ran.memory = _memory()
        ran.proof = proof(request.nonce, ran.replays)
        return ran
    except Unsupported as error:
        return Ran(proof(request.nonce, []), Outcome.UNSUPPORTED, one_line(error))
    except Infra as error:
        return Ran(proof(request.nonce, []), Outcome.INFRA, one_line(error))
    except Refusal as error:
        return Ran(proof(request.nonce, []), Outcome.ERROR, f"the target refuses: {one_line(error)}")
    except Rejected as error:
        return Ran(proof(request.nonce, []), Outcome.ERROR, one_line(error), rejected=True)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        models.forget()  # the model may be what broke
        return Ran(
            proof(request.nonce, []), Outcome.ERROR, f"{type(error).__name__}: {one_line(error)}", utf8(traceback.format_exc())
        )


def _replay_all(loaded: Loaded, job: Job) -> list[Replay]:
    return [replay(loaded.start(), plan) for plan in job.plans]


def _under_fault(target: Target, name: str, loaded: Loaded, job: Job) -> list[Replay] | str:
    """Replays of the plans up to the first in which the fault took effect: its figure needs no more."""
    fault = getattr(target, "faults", {}).get(name)
    if fault is None:
        return f"target {target.name} has no fault of this name"
    replays: list[Replay] = []
    try:
        with fault.planted() as planted:
            for plan in job.plans:
                replays.append(replay(loaded.start(), plan))
                if planted.called:
                    return replays
    except Exception as error:
        return f"raised {type(error).__name__}: {one_line(error)}"
    return "the code that it breaks was never called"


class _Models:
    """Targets and loaded models of this process, and the check that the code under test is the build's."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._targets: dict[str, Target] = {}
        self._loaded: dict[tuple[str, Path, str, str], Loaded] = {}

    def target(self, spec: str) -> Target:
        if spec not in self._targets:
            self._targets[spec] = resolve(spec)
        return self._targets[spec]

    def load(self, target: Target, job: Job) -> Loaded:
        key = (job.target, job.checkpoint, job.dtype, job.layout)
        if key not in self._loaded:
            while len(self._loaded) >= KEPT_MODELS:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[key] = target.load(job.checkpoint, dtype=job.dtype, layout=job.layout)
            self._prove_build(target)
        self._loaded[key] = self._loaded.pop(key)  # the latest used is the last to go
        return self._loaded[key]

    def forget(self) -> None:
        self._loaded.clear()

    def _prove_build(self, target: Target) -> None:
        package = getattr(target, "package", None)
        if package is None or self._build.directory is None:
            return
        found = Path(str(importlib.import_module(package).__file__)).resolve()
        if not found.is_relative_to(self._build.directory.resolve()):
            raise RuntimeError(
                f"build {self._build.name}: {package} was imported from {found}, not from {self._build.directory}"
            )


def bind_threads(threads: int) -> None:
    """Before any BLAS is loaded: N workers on C cores get C / N threads each."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ[name] = str(threads)


def limit_memory(limit: int) -> None:
    """Let allocation beyond the limit fail, so that the cell ends as an error. Linux only; elsewhere _Watch ends the worker."""
    if limit and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def redirect(log: Path, title: str) -> None:
    """Standard output and error of the process, C code included, go to `log`, whose first line is `title`."""
    _flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    os.write(2, f"{title}\n".encode())


def one_line(error: BaseException, limit: int = 500) -> str:
    text = utf8(" ".join(str(error).split()))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _memory() -> dict[str, int]:
    import psutil

    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):  # Windows
        return {"resident": info.rss, "peak": info.peak_wset}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes there, KiB elsewhere
    return {"resident": info.rss, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a target may have closed or replaced them
            stream.flush()


def _die_with_parent() -> None:
    """Linux: the kernel ends this process with the parent, even while a target holds the interpreter lock."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


class _Watch:
    """A thread that ends the process when its parent is gone or its memory outgrows the limit, and keeps the log bounded."""

    def __init__(self, limit: int) -> None:
        self.log: Path | None = None
        self._limit = limit
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _run(self) -> None:
        import psutil

        parent = parent_process()
        assert parent is not None  # serve() runs in a child process only
        process = psutil.Process()
        while not wait([parent.sentinel], timeout=WATCH_S):
            resident = process.memory_info().rss
            if self._limit and resident > self._limit:
                os.write(2, f"{resident} bytes resident, more than the limit of {self._limit}\n".encode())
                os._exit(MEMORY_EXIT)
            log = self.log
            if log is not None and log.stat().st_size > MAX_LOG_BYTES:
                os.truncate(log, 0)
        os._exit(1)
