"""Real-checkpoint smoke: load strictly, answer a question, and compare logits with the reference on real text.

Four cells on one checkpoint. All that touches the device runs in a worker process under the device lock; the recompute runs
after the lock was given back, so that neither disturbs the other's figures.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

from engine.errors import EngineError
from harness import lock
from harness.cases.case import Case
from harness.cells import Cell, Subject, refusal
from harness.check import Check
from harness.checkpoints import resolve
from harness.divergence import divergence, identical
from harness.export import export
from harness.isolation import Isolation, default_memory_bytes, default_threads
from harness.oracle import Oracle
from harness.outcomes import Infra, Outcome, Rejected
from harness.prompts import CHAT, TEXT, Prompts, Source
from harness.records import Record
from harness.replay import Plan
from harness.schedule import Feed, Greedy, Schedule, Step
from harness.targets import resolve as resolve_target
from harness.text import QUESTION
from harness.verdict import judge
from harness.worker import Build, Describe, Job, Ran, one_line
from reference_models.recompute import ReferenceError

__all__ = ["CHECKS", "Result", "Smoke", "run"]

ANSWER = 96  # tokens of the answer
TOKENS = 257  # of text: one beyond the first allocation step of the KV cache
STEPS = 201  # of one token each, at the end of the text
CHUNKS = (1, 70, 3, 128)  # over and over until the text is fed
ENGINE_CHUNK = 48  # into which the target itself cuts the whole text
BEYOND_WINDOW = 100  # tokens by which the text is longer than a sliding window,
MOST_WINDOW = 2048  # where it is not longer than this: the recompute of the text would take minutes
MOST_LOGITS = 1 << 26  # of one schedule, 256 MiB; of a text with more, the last rows are compared

ANSWERS = "smoke_greedy_answer_follows_reference"
INCREMENTAL = "smoke_incremental_logits_match_reference"
CHUNKED = "smoke_chunked_logits_match_reference"
REPEATED = "smoke_two_runs_are_identical"
CHECKS = {
    ANSWERS: "Each greedy token is the reference's choice after the same tokens, wherever the margin allows.",
    INCREMENTAL: "Logits of real text, one token at a time, are the reference's.",
    CHUNKED: "Logits of real text, prefilled in uneven chunks, are the reference's.",
    REPEATED: "Two consecutive runs on one loaded model give the same tokens and the same bytes.",
}
PARTS = {ANSWERS: "greedy answer", INCREMENTAL: "incremental logits", CHUNKED: "chunked logits", REPEATED: "two identical runs"}
NEEDS = {ANSWERS: {"greedy"}, CHUNKED: {"all_rows", "chunk"}, REPEATED: {"greedy"}}


@dataclass(frozen=True)
class Smoke:
    """What to run. `source`: see harness.checkpoints.resolve. Times in seconds; a timeout is per cell."""

    source: str = "smollm2"
    target: str = "engine"
    dtype: str = "float32"
    build: Build = field(default_factory=Build)
    seed: int = 0
    threads: int = field(default_factory=lambda: default_threads(1))
    timeout_s: float = 300.0
    lock_timeout_s: float = lock.DEFAULT_TIMEOUT_S


@dataclass
class Result:
    """`stopped` says why no cell ran, where none did. `environment` is what the target says of itself; `lock_wait_s` is None
    where the lock was not reached."""

    records: list[Record] = field(default_factory=list)
    stopped: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    lock_wait_s: float | None = None


def run(
    smoke: Smoke,
    on_record: Callable[[Record], None] = lambda record: None,
    notify: Callable[[str], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Four records, whatever checkpoint, target and surroundings do. `on_record` gets each as soon as it is judged.

    `notify` gets a line while the run waits for the lock (harness.lock.hold); `say` gets what begins now, in a few words.
    """
    result = Result()
    with tempfile.TemporaryDirectory(prefix="decodegate-smoke-") as scratch:
        plan = _Plan(smoke)
        try:
            say("reading the checkpoint")
            plan = _plan(smoke, Path(scratch))
            say("waiting for the device lock")
            with lock.hold(f"decodegate smoke {smoke.source}", timeout=smoke.lock_timeout_s, notify=notify) as waited:
                result.lock_wait_s = waited
                replayed = _replay(plan, result, say)
        except (Infra, Rejected, EngineError, ReferenceError) as error:
            outcome = Outcome.INFRA if isinstance(error, Infra) else Outcome.ERROR
            result.stopped = one_line(error, 1000)
            replayed = {name: Ran(outcome=outcome, message=result.stopped) for name in CHECKS}
        oracle = _Oracle(plan.checkpoint)
        for name, ran in replayed.items():
            if ran.outcome is None and name != REPEATED:
                say(f"comparing {PARTS[name]} with the reference")
            record = _record(plan, plan.cell(name), ran, oracle)
            if result.lock_wait_s is not None:
                record.extra["lock_wait_s"] = round(result.lock_wait_s, 3)
            result.records.append(record)
            on_record(record)
    return result


@dataclass(frozen=True)
class _Plan:
    """`checkpoint` and `prompts` are None where the source could not be had."""

    smoke: Smoke
    family: str = "unknown"
    checkpoint: Path | None = None
    source: Source | None = None
    prompts: Prompts | None = None
    answer: int = ANSWER

    def schedules(self, name: str) -> tuple[Schedule, ...]:
        if self.prompts is None:
            return ()
        chat, text = len(self.prompts.chat), len(self.prompts.text)
        answer = Schedule((Feed(chat, CHAT), Greedy(self.answer, CHAT)))
        compared = max(STEPS + 1, MOST_LOGITS // max(1, self.source.vocab if self.source else 1))
        if name == CHUNKED:
            left, pieces = text, []
            for count in _pieces(text):
                pieces.append(Feed(count, TEXT, all_rows=left - count < compared))
                left -= count
            return Schedule(tuple(pieces)), Schedule(tuple(_feeds(text, compared, ENGINE_CHUNK)))
        if name == INCREMENTAL:
            fed = max(1, text - STEPS)
            return (Schedule((*_feeds(fed, max(1, compared - STEPS), None), Step(text - fed, (TEXT,)))),)
        return (answer, answer) if name == REPEATED else (answer,)

    def plans(self, name: str) -> tuple[Plan, ...]:
        assert self.prompts is not None and self.source is not None
        return tuple(self.prompts.plan(schedule, self.source.vocab) for schedule in self.schedules(name))

    def cell(self, name: str) -> Cell:
        smoke = self.smoke
        label = smoke.source if "/" not in smoke.source else Path(smoke.source).stem or "checkpoint"
        printable = "".join(c if c.isalnum() or c in "._-" else "_" for c in label)[:80]
        case = Case(self.family, printable, f"checkpoint {smoke.source}", {})
        check = Check(name, CHECKS[name], lambda _: self.schedules(name), (), frozenset(NEEDS.get(name, ())))
        target = resolve_target(smoke.target)
        return Cell(smoke.target, target.name, Subject(case, self.checkpoint), check, smoke.dtype, "dense")


def _plan(smoke: Smoke, scratch: Path) -> _Plan:
    resolve_target(smoke.target).require()
    path = resolve(smoke.source)
    source = Source(path)
    limit = source.context or TOKENS + ANSWER
    window = source.window
    tokens = max(TOKENS, window + BEYOND_WINDOW) if window is not None and window <= MOST_WINDOW else TOKENS
    prompts = source.prompts(min(tokens, limit), smoke.seed)
    answer = min(ANSWER, limit - len(prompts.chat))
    if answer < 1:
        raise Infra(
            f"the question has {len(prompts.chat)} tokens and the checkpoint a context of {limit}; no room for an answer"
        )
    if source.is_gguf and smoke.target != "engine":  # other targets read directories
        path = export(path, scratch, [smoke.dtype])[smoke.dtype]
    return _Plan(smoke, source.family, path, source, prompts, answer)


def _feeds(total: int, compared: int, chunk: int | None) -> Iterator[Feed]:
    """Feeds the text with the rows of its last `compared` tokens."""
    if total > compared:
        yield Feed(total - compared, TEXT, chunk=chunk)
    yield Feed(min(total, compared), TEXT, all_rows=min(total, compared) > 1, chunk=chunk)


def _pieces(total: int) -> Iterator[int]:
    for count in cycle(CHUNKS):
        yield min(count, total)
        total -= count
        if total <= 0:
            return


def _replay(plan: _Plan, result: Result, say: Callable[[str], None]) -> dict[str, Ran]:
    """What the worker made of each cell; the answer comes first, on a machine where nothing else of ours runs."""
    smoke, target = plan.smoke, resolve_target(plan.smoke.target)
    assert plan.prompts is not None and plan.checkpoint is not None
    ran: dict[str, Ran] = {}
    isolation = Isolation(smoke.build, timeout_s=smoke.timeout_s, threads=smoke.threads, memory_bytes=default_memory_bytes(1))
    with isolation:
        say(f"starting {target.name}")
        asked = isolation.submit(Describe(f"environment of {target.name}", smoke.target))
        result.environment = isolation.result(asked).environment
        for name in CHECKS:
            cell = plan.cell(name)
            refused = refusal(cell, target)
            if refused is not None:
                ran[name] = Ran(outcome=refused[0], message=refused[1])
                continue
            job = Job(
                cell=cell.id,
                target=smoke.target,
                checkpoint=plan.checkpoint,
                dtype=smoke.dtype,
                layout=cell.layout,
                plans=plan.plans(name),
                faults=(),
            )
            say(f"{PARTS[name]} on {target.name}" if ran else f"load, then {PARTS[name]} on {target.name}")
            ran[name] = isolation.result(isolation.submit(job))
            if ran[name].rejected:
                raise Rejected(ran[name].message)
    return ran


class _Oracle:
    """The oracle, made when the first cell asks for it; `missing` says why there is none."""

    def __init__(self, checkpoint: Path | None) -> None:
        self._checkpoint = checkpoint
        self._made: Oracle | None = None
        self.missing = ""

    def get(self) -> Oracle | None:
        if self._made is None and not self.missing and self._checkpoint is not None:
            try:
                self._made = Oracle(self._checkpoint)
            except ReferenceError as error:
                self.missing = one_line(error)
        return self._made


def _record(plan: _Plan, cell: Cell, ran: Ran, oracle: _Oracle) -> Record:
    smoke = plan.smoke
    command = ["decodegate", "smoke", smoke.source]
    command += ["--target", smoke.target] if smoke.target != "engine" else []
    command += ["--dtype", smoke.dtype] if smoke.dtype != "float32" else []
    record = Record(
        cell=cell.id,
        target=cell.target,
        build=smoke.build.name,
        family=cell.subject.case.family,
        case=cell.subject.case.id,
        check=cell.check.name,
        dtype=cell.dtype,
        layout=cell.layout,
        schedule=list(map(str, plan.schedules(cell.check.name))),
        outcome=ran.outcome or Outcome.PASS,
        message=ran.message,
        detail=ran.detail,
        duration_s=ran.duration_s,
        seed=smoke.seed,
        replay=shlex.join(command),
    )
    if ran.outcome is None:
        try:
            _judge(plan, ran, record, oracle)
        except Exception as error:  # rows, or a checkpoint, that no recompute can be compared with
            record.outcome, record.message = (
                Outcome.ERROR,
                f"the rows could not be judged: {type(error).__name__}: {one_line(error)}",
            )
    return record


def _judge(plan: _Plan, ran: Ran, record: Record, oracle: _Oracle) -> None:
    record.counters = dict(ran.replays[0].counters)
    record.extra = {"memory": {f"{name}_bytes": value for name, value in ran.memory.items()}}
    assert plan.prompts is not None
    if plan.prompts.notes:
        record.extra["notes"] = list(plan.prompts.notes)
    facts: list[str] = []
    if record.check == ANSWERS:
        facts.append(_answer(plan, ran, record))
    if record.check == REPEATED:
        record.rows, difference = identical(*ran.replays)
        record.outcome = Outcome.FAIL if difference else Outcome.PASS if record.rows else Outcome.VACUOUS
        record.message = difference or f"{record.rows} rows are the same bit by bit"
        return
    reference = oracle.get()
    if reference is None:
        facts.append(f"nothing was compared: {oracle.missing}")
        record.outcome, record.message = Outcome.VACUOUS, "; ".join(filter(None, facts))
        return
    verdict = judge(ran.replays, plan.plans(record.check), reference, record.dtype)
    for name, value in verdict.fields().items():
        setattr(record, name, value)
    found = divergence(ran.replays, reference)
    record.extra["divergence"] = asdict(found)
    facts.append(f"KL mean {found.kl_mean:.2g}, p99 {found.kl_p99:.2g}, max {found.kl_max:.2g}")
    facts.append(f"top-1 {found.top1_agreement:.1%} of {found.rows}")
    record.message = "; ".join(filter(None, [record.message, *facts]))


def _answer(plan: _Plan, ran: Ran, record: Record) -> str:
    """Text, speeds and memory of the answer into the record; returns them in a few words."""
    assert plan.prompts is not None and plan.source is not None
    replay = ran.replays[0]
    prompt = len(plan.prompts.chat)
    tokens = list(replay.histories[0][prompt:])
    prefill_s, decode_s = replay.seconds
    speed = {"prefill_tok_s": prompt / prefill_s, "decode_tok_s": len(tokens) / decode_s}
    tokenizer = plan.source.tokenizer
    text = tokenizer.decode(tokens) if tokenizer is not None else ""
    record.extra |= {"question": QUESTION if tokenizer is not None else "", "answer": text, "tokens": tokens, "speed": speed}
    peak = ran.memory["peak"] / 2**20
    return f"prefill {speed['prefill_tok_s']:.0f} tok/s, decode {speed['decode_tok_s']:.0f} tok/s, peak {peak:.0f} MiB"
