"""Whatever a target does to its process, it costs that cell and nothing else."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness import cases
from harness.cases.build import build
from harness.isolation import DETAIL_BYTES, Isolation
from harness.outcomes import Outcome
from harness.replay import Plan
from harness.schedule import Schedule
from harness.worker import Build, Describe, Job, Ran
from suites.harness.runs import FAKE

GOOD = "feed 4; step 2"
BAD = "feed 4; rewind 2; feed 1"  # the fakes misbehave once something was rewound
MEMORY = 2 * 2**30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(cases.find("llama/gqa"), 0, tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def isolation() -> Iterator[Isolation]:
    """One for the whole module: each test leaves it fit for the next, which is the point."""
    with Isolation(Build(), timeout_s=20, threads=1, memory_bytes=MEMORY) as isolation:
        yield isolation


def job(checkpoint: Path, variant: str, schedule: str = BAD) -> Job:
    plan = Plan(Schedule.parse(schedule), 0, 128)
    return Job(f"fake::llama/gqa::{variant}[float32,dense]", f"{FAKE}:{variant}", checkpoint, "float32", "dense", (plan,), ())


def between_good_cells(isolation: Isolation, checkpoint: Path, variant: str) -> Ran:
    """The cell that misbehaves, submitted between two that do not; both must be as if it were not there."""
    before, bad, after = (
        isolation.submit(job(checkpoint, *words)) for words in (("Honest", GOOD), (variant,), ("Honest", GOOD))
    )
    assert isolation.result(before).outcome is None
    ran = isolation.result(bad)
    ended = isolation.result(after)
    assert ended.outcome is None
    assert len(ended.replays[0].rows) == 3
    return ran


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("Segfaults", "the process died of SIGSEGV"),
        ("Aborts", "the process died of SIGABRT"),
        ("Exits", "the process ended with exit status 7"),
        ("ExitsWithZero", "the process ended with exit status 0"),
        ("IsKilled", "the process died of SIGKILL"),
    ],
)
def test_a_process_that_dies_is_a_crash_of_its_cell_with_its_last_words(
    isolation: Isolation, checkpoint: Path, variant: str, message: str
) -> None:
    ran = between_good_cells(isolation, checkpoint, variant)
    assert ran.outcome is Outcome.CRASH
    assert ran.message.startswith(message)
    assert ran.detail.startswith(f"fake::llama/gqa::{variant}[float32,dense]")
    if variant == "Aborts":
        assert "assertion failed: cache->offset == 3" in ran.detail


@pytest.mark.parametrize(
    ("variant", "outcome", "message"),
    [
        ("Raises", Outcome.ERROR, "KeyError: 'layer 3\\nhas no cache'"),
        ("CallsSysExit", Outcome.ERROR, "SystemExit: no licence"),
        ("GivesWrongShape", Outcome.ERROR, "TargetError: operation 2 (feed a 1)"),
        ("GivesTooFewRows", Outcome.ERROR, "TargetError: operation 2 (feed a 1)"),
        ("RaisesUnsupported", Outcome.UNSUPPORTED, "a ring cache cannot go back"),
        ("IsNotInstalled", Outcome.INFRA, "fake-engine is not installed; pip install fake-engine"),
    ],
)
def test_an_exception_is_the_outcome_of_its_cell(
    isolation: Isolation, checkpoint: Path, variant: str, outcome: Outcome, message: str
) -> None:
    ran = between_good_cells(isolation, checkpoint, variant)
    assert ran.outcome is outcome
    assert ran.message.startswith(message)
    assert ("Traceback" in ran.detail) == (outcome is Outcome.ERROR)


def test_a_target_that_runs_out_of_memory_costs_its_cell_and_not_the_machine(checkpoint: Path) -> None:
    with Isolation(Build(), timeout_s=20, threads=1, memory_bytes=2**29) as isolation:
        ran = between_good_cells(isolation, checkpoint, "RunsOutOfMemory")
    assert ran.outcome in (Outcome.ERROR, Outcome.CRASH)
    assert "MemoryError" in ran.message or "memory limit" in ran.message


def test_garbage_on_standard_output_breaks_nothing_and_is_no_part_of_a_good_cell(
    isolation: Isolation, checkpoint: Path
) -> None:
    ran = between_good_cells(isolation, checkpoint, "PrintsGarbage")
    assert ran.outcome is None
    assert ran.detail == ""


def test_the_output_that_a_record_keeps_is_bounded_and_printable(isolation: Isolation, checkpoint: Path) -> None:
    ran = between_good_cells(isolation, checkpoint, "PrintsGarbageAndDies")
    assert ran.outcome is Outcome.CRASH
    assert 0 < len(ran.detail) <= DETAIL_BYTES
    assert all(c.isprintable() or c in "\n\t" for c in ran.detail)


@pytest.mark.parametrize("variant", ["Hangs", "HangsWithTheInterpreterLock"])
def test_a_cell_that_overruns_is_a_timeout_and_its_worker_is_replaced(checkpoint: Path, variant: str) -> None:
    with Isolation(Build(), timeout_s=1, threads=1, memory_bytes=MEMORY) as isolation:
        ran = between_good_cells(isolation, checkpoint, variant)
    assert ran.outcome is Outcome.TIMEOUT
    assert ran.message == "no result after 1 s"


def test_a_worker_that_is_killed_between_cells_costs_none(isolation: Isolation, checkpoint: Path) -> None:
    assert isolation.result(isolation.submit(job(checkpoint, "Honest", GOOD))).outcome is None
    assert isolation.pid is not None
    os.kill(isolation.pid, signal.SIGKILL)
    assert isolation.result(isolation.submit(job(checkpoint, "Honest", GOOD))).outcome is None


def test_a_worker_that_is_killed_from_outside_while_a_cell_runs_is_a_crash_of_that_cell(checkpoint: Path) -> None:
    with Isolation(Build(), timeout_s=20, threads=1, memory_bytes=MEMORY) as isolation:
        first, second = (isolation.submit(job(checkpoint, *words)) for words in (("Hangs",), ("Honest", GOOD)))
        pid = isolation.pid
        assert pid is not None

        def kill() -> None:
            time.sleep(3)
            os.kill(pid, signal.SIGKILL)

        threading.Thread(target=kill).start()
        ran = isolation.result(first)
        assert ran.outcome is Outcome.CRASH
        assert "SIGKILL" in ran.message
        assert isolation.result(second).outcome is None


def test_each_cell_has_a_process_of_its_own_where_that_is_asked_for(checkpoint: Path) -> None:
    with Isolation(Build(), timeout_s=20, threads=1, memory_bytes=MEMORY, fresh_process=True) as isolation:
        processes = []
        for _ in range(2):
            nonce = isolation.submit(job(checkpoint, "Honest", GOOD))
            processes.append(isolation.pid)
            assert isolation.result(nonce).outcome is None
    assert len(set(processes)) == 2


def test_a_result_without_proof_that_the_cell_ran_is_an_error(checkpoint: Path) -> None:
    with Isolation(Build(), timeout_s=20, threads=1, memory_bytes=MEMORY) as isolation:
        isolation.submit(job(checkpoint, "Honest", GOOD))
        ran = isolation._answer(replace(isolation._queue[0], nonce="another"))
    assert ran.outcome is Outcome.ERROR
    assert ran.message == "the worker cannot prove that it ran this cell"


def test_a_worker_proves_that_it_imported_the_build(tmp_path: Path, checkpoint: Path) -> None:
    package = tmp_path / "other"
    package.mkdir()
    with Isolation(Build("other", package), timeout_s=20, threads=1, memory_bytes=MEMORY) as isolation:
        ran = isolation.result(isolation.submit(job(checkpoint, "IsBuiltElsewhere", GOOD)))
    assert ran.outcome is Outcome.ERROR
    assert "build other: json was imported from" in ran.message


def test_the_environment_of_a_target_comes_from_a_worker(isolation: Isolation) -> None:
    ran = isolation.result(isolation.submit(Describe("environment", f"{FAKE}:Honest")))
    assert ran.environment["device"] == "numpy"


def test_no_process_is_left_behind(checkpoint: Path) -> None:
    with Isolation(Build(), timeout_s=20, threads=1, memory_bytes=MEMORY) as isolation:
        assert isolation.result(isolation.submit(job(checkpoint, "StartsAProcess", "feed 4; rewind 2"))).outcome is None
        children = psutil.Process(isolation.pid).children(recursive=True)
        assert len(children) == 1
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
