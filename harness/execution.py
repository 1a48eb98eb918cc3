"""A run of cells: each is replayed in a worker, judged here against its oracle, and becomes one record."""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from harness.cases.build import build
from harness.cells import Cell, Subject, refusal
from harness.check import POWER, POWER_DTYPE
from harness.isolation import Isolation
from harness.oracle import Oracle
from harness.outcomes import Infra, Outcome
from harness.records import Record, utf8
from harness.replay import Plan, Replay
from harness.target import Target
from harness.targets import resolve
from harness.tokens import special_ids
from harness.verdict import JudgedRow, Verdict, judge
from harness.worker import Job, Ran, one_line

__all__ = ["Checkpoints", "Execution"]

KEPT_ORACLES = 32  # an oracle keeps the recomputes of one checkpoint


@dataclass
class _Pending:
    """A cell on its way: what the worker was asked, or the outcome that needs no worker."""

    cell: Cell
    plans: tuple[Plan, ...] = ()
    nonce: str = ""
    faults: tuple[str, ...] = ()
    known: Ran | None = None


class Checkpoints:
    """Checkpoints of subjects and their oracles, which may serve several executions: recomputes do not depend on the build."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._scratch = Path(tempfile.mkdtemp(prefix="decodegate-cases-"))
        self._oracles: dict[Path, Oracle] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def path(self, subject: Subject) -> Path:
        """The checkpoint of a subject; a tiny case's is built from the seed."""
        return subject.checkpoint or build(subject.case, self.seed, self._scratch)

    def oracle(self, subject: Subject) -> Oracle:
        checkpoint = self.path(subject)
        with self._lock:
            if checkpoint not in self._oracles:
                if subject.checkpoint is not None:
                    self._oracles.clear()  # rows of a real vocabulary are large
                while len(self._oracles) >= KEPT_ORACLES:
                    del self._oracles[next(iter(self._oracles))]
                self._oracles[checkpoint] = Oracle(checkpoint)
            return self._oracles[checkpoint]


@dataclass
class Execution:
    """Runs cells on one build, and owns its isolation. `submit` is cheap and may run ahead; `record` waits and never raises for
    a cell, whatever target, reference or check do.

    `checkpoints`: those of another execution, which then owns them. `power`: replay each check under its runtime faults too.
    """

    isolation: Isolation
    seed: int = 0
    checkpoints: Checkpoints | None = None
    power: bool = True
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _targets: dict[str, Target] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(self.isolation.threads)
        self._checkpoints = self.checkpoints or Checkpoints(self.seed)

    def close(self) -> None:
        self.isolation.close()
        if self.checkpoints is None:
            self._checkpoints.close()

    def submit(self, cell: Cell) -> None:
        if cell.id not in self._pending:
            self._pending[cell.id] = pending = _Pending(cell)
            try:
                self._prepare(pending)
            except Infra as error:
                pending.known = Ran(outcome=Outcome.INFRA, message=one_line(error))
            except Exception as error:
                pending.known = _broken("the cell could not be prepared", error)

    def record(self, cell: Cell) -> Record:
        return self.record_with_rows(cell)[0]

    def record_with_rows(self, cell: Cell) -> tuple[Record, list[JudgedRow]]:
        """The record, and every row as it was judged; no rows where the cell did not get that far."""
        self.submit(cell)
        pending = self._pending.pop(cell.id)
        ran = pending.known or self.isolation.result(pending.nonce)
        record = Record(
            cell=cell.id,
            target=cell.target,
            build=self.isolation.build.name,
            family=cell.subject.case.family,
            case=cell.subject.case.id,
            check=cell.check.name,
            dtype=cell.dtype,
            layout=cell.layout,
            schedule=[str(plan.schedule) for plan in pending.plans],
            outcome=ran.outcome or Outcome.PASS,
            message=ran.message,
            detail=ran.detail,
            duration_s=ran.duration_s,
            seed=self.seed,
            replay=cell.replay_command(self.seed),
        )
        rows: list[JudgedRow] = []
        if ran.outcome is None:
            try:
                rows = self._judge(pending, ran, record)
            except Exception as error:
                broken = _broken("the cell could not be judged", error)
                record.outcome, record.message, record.detail = Outcome.ERROR, broken.message, broken.detail
        return record, rows

    def _prepare(self, pending: _Pending) -> None:
        cell = pending.cell
        target = self._target(cell.target_spec)
        target.require()
        refused = refusal(cell, target)
        if refused is not None:
            pending.known = Ran(outcome=refused[0], message=refused[1])
            return
        case = cell.subject.case
        vocab, avoid = case.text["vocab_size"], special_ids(case.text)
        pending.plans = tuple(
            Plan(schedule, self.seed, vocab, avoid, planted=case.planted) for schedule in cell.check.schedules(case)
        )
        # Power is a property of check and case: a further layout, or a real checkpoint, would say nothing new.
        shown_here = cell.layout == (cell.check.layout or case.layouts[0])
        if self.power and shown_here and cell.dtype == POWER_DTYPE and cell.subject.checkpoint is None:
            there = getattr(target, "faults", None) or {}
            pending.faults = tuple(
                name for name in cell.check.faults if there and (name not in there or there[name].touches(case))
            )
        job = Job(
            cell=cell.id,
            target=cell.target_spec,
            checkpoint=self._checkpoints.path(cell.subject),
            dtype=cell.dtype,
            layout=cell.layout,
            plans=pending.plans,
            faults=pending.faults,
        )
        pending.nonce = self.isolation.submit(job)

    def _target(self, spec: str) -> Target:
        if spec not in self._targets:
            self._targets[spec] = resolve(spec)
        return self._targets[spec]

    def _judge(self, pending: _Pending, ran: Ran, record: Record) -> list[JudgedRow]:
        cell = pending.cell
        oracle = self._checkpoints.oracle(cell.subject)
        verdict = judge(ran.replays, pending.plans, oracle, cell.dtype, repeats=cell.check.repeats)
        for name, value in verdict.fields().items():
            setattr(record, name, value)
        record.counters = _counters(ran.replays)
        weak = []
        for fault, replays in ran.faults.items():
            if isinstance(replays, str):
                weak.append(f"fault {fault} gives no figure: {replays}")
                continue
            power = record.power[fault] = _power(judge(replays, pending.plans[: len(replays)], oracle, cell.dtype))
            if not power >= POWER:
                weak.append(f"fault {fault} moves the error to {power:.3g} times the bound only (needs {POWER:g})")
        if record.outcome is Outcome.PASS:
            idle = [
                f"counter {name} is {record.counters.get(name, 'missing')}, needs {least}"
                for name, least in cell.check.counters.items()
                if record.counters.get(name, 0) < least
            ]
            if idle or weak:
                record.outcome, record.message = Outcome.VACUOUS, "; ".join(idle + weak)
        return verdict.judged


def _power(broken: Verdict) -> float:
    """How many times the bound the fault is: the error, or how far below the top a chosen token is. Infinite where rows are
    missing or not finite."""
    if broken.error_ratio is None or broken.bound is None:
        return math.inf
    return max(broken.error_ratio / broken.bound, *(row.deficit / (2 * row.allowed) for row in broken.judged))


def _counters(replays: Sequence[Replay]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for replay in replays:
        total.update(replay.counters)
    return dict(total)


def _broken(what: str, error: Exception) -> Ran:
    return Ran(
        outcome=Outcome.ERROR, message=f"{what}: {type(error).__name__}: {one_line(error)}", detail=utf8(traceback.format_exc())
    )
