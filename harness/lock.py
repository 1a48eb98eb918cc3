"""The device lock: one lock per device, one path, this one module; held over device work only.

The lock itself is a kernel file lock (filelock's flock), so that the kernel frees it when its holder dies, however it dies.
Who holds it stands in a file beside it, written by the holder after it got the lock and removed before it gives it back.
A reader believes that file only while the process it names is alive and is the same process (start time), so what a killed
holder left is never believed.

A process that holds the lock may take it again in the same thread. Its children inherit a proof (environment variable
DECODEGATE_LOCK_HELD) that is checked against the holder's file; with a valid proof they contend among themselves for a lock
one level below, so that `decodegate lock -- CMD` does not deadlock when CMD takes the lock, and two children of CMD still
exclude each other. Not covered: a child that goes on after its holder gave the lock back.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import secrets
import shlex
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import psutil

from harness.outcomes import Infra

__all__ = ["DEFAULT_TIMEOUT_S", "Holder", "Status", "default_device", "hold", "lock_path", "status"]

PATH_VARIABLE = "DECODEGATE_LOCK"
PROOF_VARIABLE = "DECODEGATE_LOCK_HELD"
DEFAULT_TIMEOUT_S = 900.0
POLL_S = 0.05
FIRST_NOTICES_S = (0.0, 10.0, 30.0)  # when a waiter says again who holds the lock; then once a minute
HOLDER_BYTES = 4096  # a holder file beyond this is not ours
COMMAND_CHARACTERS = 200
START_TOLERANCE_S = 2.0  # psutil derives start times from the wall clock, which may be stepped between two readings


@dataclass(frozen=True)
class Holder:
    """Who holds the lock. `started` (of the process) and `since` (of the lock) are in seconds since the epoch."""

    pid: int
    started: float
    command: str
    since: float
    token: str

    def __str__(self) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"pid {self.pid} ({self.command}) since {clock}, for {max(0.0, time.time() - self.since):.0f} s"


@dataclass(frozen=True)
class Status:
    """`holder` is None where the lock is free, and for the instant in which a holder has not yet written who it is."""

    path: Path
    held: bool
    holder: Holder | None


class _InProcess:
    """What this process knows of one lock path: its threads exclude each other, one thread may enter again."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.depth = 0


_registry: dict[Path, _InProcess] = {}
_registry_mutex = threading.Lock()


def default_device() -> str:
    """The device that MLX would use here, without importing MLX: `metal`, `cuda0` or `cpu`."""
    if sys.platform == "darwin":
        return "metal"
    if Path("/dev/nvidiactl").exists() and _mlx_cuda_installed():
        return f"cuda{os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(',')[0].strip() or '0'}"
    return "cpu"


def _mlx_cuda_installed() -> bool:
    return any(
        (found.metadata["Name"] or "").lower().replace("_", "-").startswith("mlx-cuda")
        for found in importlib.metadata.distributions()
    )


def lock_path(device: str | None = None) -> Path:
    """The one path of a device's lock: $DECODEGATE_LOCK, else a file in a private directory named for the user.

    The directory does not follow TMPDIR on POSIX: two shells with different settings must agree. Raises Infra where the
    directory is not ours alone.
    """
    override = os.environ.get(PATH_VARIABLE)
    if override:
        return Path(override).absolute()
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    directory = Path("/tmp" if os.name == "posix" else tempfile.gettempdir()) / f"decodegate-{user}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise Infra(
            f"the lock's directory {directory} cannot be made ({error}); set {PATH_VARIABLE} to a file you own"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022)):
        raise Infra(
            f"the lock's directory {directory} is writable by others; remove it, or set {PATH_VARIABLE} to a file you own"
        )
    return directory / f"{device or default_device()}.lock"


def status(path: Path | None = None) -> Status:
    """Who holds the lock now. Takes the lock for an instant only where nobody believable says that he holds it."""
    path = path or lock_path()
    holder = _read_holder(path)
    if holder is not None:
        return Status(path, True, holder)
    if not path.exists():
        return Status(path, False, None)
    probe = filelock.FileLock(path, thread_local=False)
    try:
        with probe.acquire(timeout=0):
            return Status(path, False, None)
    except filelock.Timeout:
        return Status(path, True, _read_holder(path))
    except (OSError, NotImplementedError) as error:
        raise _unusable(path, error) from error


@contextlib.contextmanager
def hold(
    command: str | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
    path: Path | None = None,
    notify: Callable[[str], None] | None = None,
) -> Iterator[float]:
    """Hold the device lock; yields the seconds waited.

    `command` is what waiters are told (default: this process's command line). `notify(text)` is called at once when there
    is someone to wait for, and again as the wait goes on (default: a line on stderr). Raises Infra when `timeout` seconds
    have passed.
    """
    if not (timeout >= 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout must be zero or more seconds (got {timeout})")
    path = path or lock_path()
    started = time.monotonic()
    deadline = started + timeout
    with _registry_mutex:
        mine = _registry.setdefault(path, _InProcess())
    if not mine.mutex.acquire(timeout=timeout):
        raise _deadline(path, _read_holder(path), timeout)
    try:
        mine.depth += 1
        if mine.depth > 1:
            yield 0.0
            return
        level = _level(path)
        with _acquired(_at_level(path, level), deadline, timeout, notify or _to_stderr) as held:
            holder = _write_holder(_at_level(path, level), command)
            before = os.environ.get(PROOF_VARIABLE)
            os.environ[PROOF_VARIABLE] = f"{level}:{holder.token}"
            try:
                yield held - started
            finally:
                if before is None:
                    os.environ.pop(PROOF_VARIABLE, None)
                else:
                    os.environ[PROOF_VARIABLE] = before
                _holder_path(_at_level(path, level)).unlink(missing_ok=True)
    finally:
        mine.depth -= 1
        mine.mutex.release()


@contextlib.contextmanager
def _acquired(path: Path, deadline: float, timeout: float, notify: Callable[[str], None]) -> Iterator[float]:
    """Poll for the kernel lock at `path`; yields the monotonic time at which it was got."""
    lock = filelock.FileLock(path, mode=0o600, thread_local=False)
    started = time.monotonic()
    notices = 0
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except filelock.Timeout:
            now = time.monotonic()
        except (OSError, NotImplementedError) as error:
            raise _unusable(path, error) from error
        if now >= deadline:
            raise _deadline(path, _read_holder(path), timeout)
        due = FIRST_NOTICES_S[notices] if notices < len(FIRST_NOTICES_S) else 60.0 * (notices - len(FIRST_NOTICES_S) + 1)
        if now - started >= due:
            holder = _read_holder(path)
            if holder is not None or now - started > 1.0:  # a fresh holder needs an instant to say who it is
                notify(f"waiting for the device lock {path}, held by {holder or 'a process that has not said who it is'}")
                notices += 1
        time.sleep(min(POLL_S, max(0.0, deadline - now)))
    try:
        yield time.monotonic()
    finally:
        lock.release()


def _deadline(path: Path, holder: Holder | None, timeout: float) -> Infra:
    who = holder or "a process that has not said who it is"
    return Infra(
        f"the device lock {path} was not free within {timeout:g} s: held by {who}; wait, end that process, or raise the timeout"
    )


def _unusable(path: Path, error: Exception) -> Infra:
    return Infra(f"the device lock {path} cannot be used ({error}); set {PATH_VARIABLE} to a file you own on a local disk")


def _to_stderr(text: str) -> None:
    print(f"decodegate: {text}", file=sys.stderr, flush=True)


def _at_level(path: Path, level: int) -> Path:
    return path if level == 0 else path.with_name(f"{path.name}.{level}")


def _level(path: Path) -> int:
    """0, or one more than the level at which an ancestor proves to hold the lock."""
    level, _, token = os.environ.get(PROOF_VARIABLE, "").partition(":")
    if not (level.isdecimal() and len(level) <= 3 and token):
        return 0
    holder = _read_holder(_at_level(path, int(level)))
    return int(level) + 1 if holder is not None and secrets.compare_digest(holder.token, token) else 0


def _holder_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.holder")


def _write_holder(path: Path, command: str | None) -> Holder:
    text = command if command is not None else shlex.join([Path(sys.argv[0] or "python").name, *sys.argv[1:]])
    holder = Holder(os.getpid(), psutil.Process().create_time(), _printable(text), time.time(), secrets.token_hex(16))
    target = _holder_path(path)
    fresh = target.with_name(f"{target.name}.{holder.pid}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(asdict(holder), file)
    os.replace(fresh, target)  # a reader sees all of it or none
    return holder


def _read_holder(path: Path) -> Holder | None:
    """The holder's own word, or None where there is none that can be believed."""
    try:
        with open(_holder_path(path), "rb") as file:
            raw = json.loads(file.read(HOLDER_BYTES + 1)[:HOLDER_BYTES])
        holder = Holder(
            int(raw["pid"]), float(raw["started"]), _printable(str(raw["command"])), float(raw["since"]), str(raw["token"])
        )
        alive = holder.pid > 0 and abs(psutil.Process(holder.pid).create_time() - holder.started) <= START_TOLERANCE_S
        zombie = alive and psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE
    except (OSError, ValueError, KeyError, TypeError, OverflowError, psutil.Error):
        return None
    return holder if alive and not zombie and holder.token.isascii() and math.isfinite(holder.since) else None


def _printable(text: str) -> str:
    """One line that cannot drive a terminal."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= COMMAND_CHARACTERS else f"{line[: COMMAND_CHARACTERS - 1]}…"
