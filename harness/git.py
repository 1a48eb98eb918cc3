"""Git, as a program: one call, with the surroundings of a hook or another work tree kept out of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["GitError", "git"]

GIT_S = 120.0
# Set by git for the hooks that it runs; they would make `git -C` speak of another work tree.
_LOCAL = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE")


class GitError(RuntimeError):
    """Git is not there, or refused; the text is the last line of what it said."""


def git(directory: Path, *arguments: str, timeout_s: float = GIT_S) -> str:
    """Standard output of `git -C directory arguments...`, without the last newline. No hooks run. Raises GitError."""
    environment = {name: value for name, value in os.environ.items() if name not in _LOCAL} | {"LC_ALL": "C"}
    command = ["git", "-C", str(directory), "-c", f"core.hooksPath={os.devnull}", *arguments]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False, env=environment
        )
    except FileNotFoundError:
        raise GitError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {arguments[0]} gave no answer within {timeout_s:g} s") from None
    if ran.returncode:
        said = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
        raise GitError(f"git {arguments[0]}: {said[-1]}")
    return ran.stdout.rstrip("\n")
