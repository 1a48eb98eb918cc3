"""Whether the machine is quiet enough to measure."""

from __future__ import annotations

import time
from typing import Any

import psutil

from harness.outcomes import Infra

__all__ = ["QUIET", "busy_fraction", "busy_seconds", "require_quiet"]

QUIET = 0.15  # share of the cores that others may use; an idle desktop has 0.02 to 0.08


def require_quiet(allow_busy: bool) -> list[str]:
    """Warnings for the result: what others use of the machine where that is too much. Infra then, unless `allow_busy`."""
    busy = busy_fraction()
    if busy <= QUIET:
        return []
    text = f"other processes use {busy:.0%} of the machine; figures would not be comparable"
    if not allow_busy:
        raise Infra(f"{text}. Wait or end them, or measure all the same with --busy-ok")
    return [text]


def busy_fraction(seconds: float = 2.0) -> float:
    """The share of all cores that is in use now, 0 to 1, measured over `seconds` while this process sleeps."""
    before = busy_seconds(psutil.cpu_times())
    time.sleep(seconds)
    used = (busy_seconds(psutil.cpu_times()) - before) / (seconds * (psutil.cpu_count() or 1))
    return min(1.0, max(0.0, used))


def busy_seconds(times: Any) -> float:
    """CPU seconds spent, of psutil.cpu_times()."""
    return times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
