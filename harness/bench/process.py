"""One peer of a benchmark, a process that is asked by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine import blas
from harness.bench.quiet import busy_seconds
from harness.builds import Made
from harness.outcomes import Infra

__all__ = ["Peer", "PeerProcess", "Sample"]

SCRIPTS = Path(__file__).parent / "peers"
MODULES = {"engine": "mlx", "mlx_lm": "mlx_lm", "transformers": "transformers"}
INSTALL = {"engine": "mlx", "mlx_lm": "mlx-lm", "transformers": "transformers torch"}


@dataclass(frozen=True)
class Peer:
    """An engine in one dtype, run by `python`. `build`: of our engine, which it must import; `label` replaces its name."""

    engine: str
    dtype: str
    python: str
    build: Made | None = None
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or f"{self.engine}[{self.dtype}]"

    def require(self) -> None:
        """Raise Infra with the install command where its Python does not have the engine."""
        probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
        try:
            missing = subprocess.run([self.python, "-c", probe, MODULES[self.engine]], timeout=60).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Infra(f"peer {self.name}: {self.python} cannot be run ({error})") from error
        if missing:
            raise Infra(
                f"peer {self.name} is not installed for {self.python}; install it there (pip install {INSTALL[self.engine]}), "
                "or name another environment's Python with --peer-python"
            )


@dataclass(frozen=True)
class Sample:
    """One request. `foreign_cpu` is the share of the machine that other processes used meanwhile, 0 to 1."""

    prefill_s: float
    decode_s: float
    tokens: list[int]
    foreign_cpu: float


class PeerProcess:
    """A running peer; a context manager that ends it. Raises Infra when it dies, does not answer in time, or runs another build
    of our engine than it stands for.
    """

    def __init__(self, peer: Peer, checkpoint: Path, timeout: float) -> None:
        self.peer, self.timeout = peer, timeout
        environment = {name: value for name, value in os.environ.items() if name not in blas.variables()}
        if peer.build is not None:
            inherited = filter(None, [environment.get("PYTHONPATH")])
            environment["PYTHONPATH"] = os.pathsep.join([str(peer.build.directory), *inherited])
        script = SCRIPTS / f"serve_{peer.engine}.py"
        self.process = subprocess.Popen(
            [peer.python, str(script), str(checkpoint), peer.dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.replies: queue.Queue[str] = queue.Queue()
        self.complaints: list[str] = []
        for target in (self._read_replies, self._read_complaints):
            threading.Thread(target=target, daemon=True).start()
        self.environment: dict[str, Any] = self._reply()["environment"]
        imported = self.environment.pop("engine", None)  # a path of this machine, for the proof only
        if peer.build is not None and not Path(imported).resolve().is_relative_to(peer.build.directory.resolve()):
            self.close()
            raise Infra(
                f"peer {peer.name} imported engine from {imported} instead of its own build; "
                "does something put that on Python's path before PYTHONPATH?"
            )
        self.watched = psutil.Process(self.process.pid)

    def ask(self, prompt: Sequence[int], decode: int) -> Sample:
        before, own, started = psutil.cpu_times(), self.watched.cpu_times(), time.monotonic()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"prompt": list(prompt), "decode": decode}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._lost("ended") from None
        reply = self._reply()
        if len(reply["tokens"]) != decode:
            raise Infra(
                f"peer {self.peer.name} stopped after {len(reply['tokens'])} of {decode} tokens; take another prompt length"
            )
        elapsed, after, mine = time.monotonic() - started, psutil.cpu_times(), self.watched.cpu_times()
        used = busy_seconds(after) - busy_seconds(before) - (mine.user + mine.system - own.user - own.system)
        share = min(1.0, max(0.0, used / (elapsed * (psutil.cpu_count() or 1))))
        return Sample(reply["prefill_s"], reply["decode_s"], reply["tokens"], share)

    def _read_replies(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.replies.put(line)
        self.replies.put("")

    def _read_complaints(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.complaints = [*self.complaints[-19:], line.rstrip()]

    def _reply(self) -> dict[str, Any]:
        try:
            line = self.replies.get(timeout=self.timeout)
        except queue.Empty:
            raise self._lost(f"did not answer within {self.timeout:g} s") from None
        if not line:
            raise self._lost("ended")
        return json.loads(line)

    def _lost(self, what: str) -> Infra:
        self.close()
        last = next((line for line in reversed(self.complaints) if line.strip()), "it said nothing")
        return Infra(f"peer {self.peer.name} {what} (exit code {self.process.returncode}): {last[:300]}")

    def close(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()  # end of requests: the peer returns
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
