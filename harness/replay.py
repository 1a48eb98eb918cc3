"""Replay: a schedule and its token streams become calls on a session. Runs in the worker; numpy is all that it needs.

The target's answers are checked for form here (shape, dtype, number of rows), where the operation at fault is known. Values are
the judge's business: NaN goes through.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from harness.outcomes import Refusal
from harness.schedule import (
    Close,
    Feed,
    Greedy,
    Open,
    Operation,
    Refuse,
    Restore,
    Rewind,
    Save,
    Schedule,
    ScheduleError,
    Step,
)  # fmt: skip
from harness.target import GreedyResult, Row, Session, SnapshotSession
from harness.tokens import TokenStream

__all__ = ["Plan", "Replay", "TargetError", "replay", "where"]


class TargetError(RuntimeError):
    """The target answered in a form that the protocol does not allow; the text names operation and position."""


@dataclass(frozen=True)
class Plan:
    """A schedule and the streams of its tokens. Raises ScheduleError where no target could run it."""

    schedule: Schedule
    seed: int
    vocab: int
    avoid: frozenset[int] = frozenset()
    fixed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # tokens of sequences that are not drawn
    planted: Mapping[int, int] = field(default_factory=dict)  # position -> token, in all other sequences

    def __post_init__(self) -> None:
        self.stream()
        self.expected()

    def stream(self) -> TokenStream:
        return TokenStream(self.seed, self.vocab, self.avoid, self.fixed, self.planted)

    def expected(self) -> list[tuple[int, int]]:
        """(operation, position) of every row that a replay yields, in order."""
        return [(index, position) for index, operation, start in self._walk() for position in _positions(operation, start)]

    def _walk(self) -> Iterator[tuple[int, Operation, dict[str, int]]]:
        """Each operation with the length of its sequences before it."""
        lengths: dict[str, int] = {}
        computed: set[str] = set()  # sequences whose last row belongs to their last token
        closed: set[str] = set()
        saved: dict[str, int] = {}  # snapshot -> the length it was taken at
        for index, operation in enumerate(self.schedule.operations):
            asked = operation.operation if isinstance(operation, Refuse) else operation
            names = asked.sequences if isinstance(asked, Step) else (asked.sequence,)
            for name in names:
                if isinstance(asked, Open) and name in lengths:
                    raise ScheduleError(f"operation {index} ({operation}): sequence {name} is open already")
                if not isinstance(asked, Open | Restore) and name in closed:
                    raise ScheduleError(
                        f"operation {index} ({operation}): sequence {name} is closed; 'open {name}' opens it again"
                    )
                if isinstance(asked, Close | Rewind | Greedy | Save) and name not in lengths:
                    raise ScheduleError(f"operation {index} ({operation}): sequence {name} was never fed")
            if isinstance(asked, Rewind) and asked.count > lengths[asked.sequence]:
                held = lengths[asked.sequence]
                raise ScheduleError(f"operation {index} ({operation}): sequence {asked.sequence} holds {held} tokens only")
            if isinstance(asked, Restore) and asked.snapshot not in saved:
                raise ScheduleError(f"operation {index} ({operation}): there is no snapshot {asked.snapshot}; save it before")
            if isinstance(operation, Refuse):
                if not isinstance(asked, Open | Restore) and not lengths.keys() >= set(names):
                    raise ScheduleError(f"operation {index} ({operation}): its sequences must be open before")
                yield index, operation, {}
                continue
            closed.difference_update(names)
            for name in names:
                lengths.setdefault(name, 0)
            yield index, operation, {name: lengths[name] for name in names}
            if isinstance(operation, Rewind):
                lengths[operation.sequence] -= operation.count
                computed.discard(operation.sequence)
            elif isinstance(operation, Save):
                saved[operation.snapshot] = lengths[operation.sequence]
            elif isinstance(operation, Restore):
                lengths[operation.sequence] = saved[operation.snapshot]
                computed.discard(operation.sequence)
            elif isinstance(operation, Close):
                del lengths[operation.sequence]
                closed.add(operation.sequence)
                computed.discard(operation.sequence)
            elif not isinstance(operation, Open):
                if isinstance(operation, Greedy) and operation.sequence not in computed:
                    raise ScheduleError(
                        f"operation {index} ({operation}): there is no row to choose from; feed or step before it"
                    )
                computed.update(names)
                for name in names:
                    lengths[name] += operation.count


def _positions(operation: Operation, start: dict[str, int]) -> list[int]:
    if isinstance(operation, Feed):
        first = start[operation.sequence]
        last = first + operation.count
        return list(range(first if operation.all_rows else last - 1, last))
    if isinstance(operation, Step):
        return [start[name] + step for step in range(operation.count) for name in operation.sequences]
    if isinstance(operation, Greedy):
        return list(range(start[operation.sequence], start[operation.sequence] + operation.count))
    return []


def where(plans: Sequence[Plan], schedule: int, operation: int, position: int) -> str:
    """A row's place, in the words of every message."""
    operations = plans[schedule].schedule.operations
    return f"position {position} of schedule {schedule}, operation {operation} ({operations[operation]})"


@dataclass(frozen=True)
class Replay:
    """What a target yielded for one plan."""

    histories: list[tuple[int, ...]]  # the tokens of each run of a sequence between rewinds
    rows: list[Row]  # in order of the operations
    counters: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # that the calls of each operation took


class _Sequence:
    """The tokens that a sequence holds, the branch that its next ones come from, and the index of its history."""

    def __init__(self, histories: list[list[int]]) -> None:
        self.histories = histories
        self.branch = 0
        self.last_row: int | None = None
        self._start([])

    def _start(self, tokens: list[int]) -> None:
        self.history = len(self.histories)
        self.tokens = tokens
        self.histories.append(tokens)

    def rewind(self, count: int) -> None:
        self.branch += 1
        self.last_row = None
        self._start(self.tokens[: len(self.tokens) - count])

    def restore(self, tokens: list[int]) -> None:
        """Hold these tokens; the next ones are of a new branch, so that they differ from what followed them before."""
        self.branch += 1
        self.last_row = None
        self._start(list(tokens))


class _Replayer:
    def __init__(self, session: Session, plan: Plan) -> None:
        self.session, self.plan = session, plan
        self.stream = plan.stream()
        self.histories: list[list[int]] = []
        self.rows: list[Row] = []
        self.sequences: dict[str, _Sequence] = {}
        self.saved: dict[str, list[int]] = {}  # snapshot -> the tokens it was taken after

    def sequence(self, name: str) -> _Sequence:
        if name not in self.sequences:
            self.session.open(name)
            self.sequences[name] = _Sequence(self.histories)
        return self.sequences[name]

    def next_tokens(self, name: str, count: int) -> list[int]:
        sequence = self.sequence(name)
        start = len(sequence.tokens)
        return self.stream.tokens(name, sequence.branch, range(start, start + count))

    def row(self, index: int, sequence: _Sequence, position: int, logits: np.ndarray, chosen: int | None = None) -> None:
        sequence.last_row = len(self.rows)
        self.rows.append(Row(index, sequence.history, position, logits, chosen))

    def checked(self, index: int, operation: Operation, position: int, logits: Any, count: int) -> np.ndarray:
        wanted = (count, self.plan.vocab)
        if isinstance(logits, np.ndarray) and logits.dtype == np.float32 and logits.shape == wanted:
            return logits.copy()  # a target may use its buffer again
        got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, np.ndarray) else type(logits).__name__
        raise TargetError(
            f"operation {index} ({operation}) from position {position} on returned {got}; "
            f"the protocol asks for float32 logits {list(wanted)}"
        )

    def feed(self, index: int, operation: Feed) -> None:
        sequence, tokens = self.sequence(operation.sequence), self.next_tokens(operation.sequence, operation.count)
        start = len(sequence.tokens)
        options: dict[str, Any] = {} if operation.pad is None else {"pad": operation.pad}  # an adapter without has not the word
        logits = self.session.feed(
            operation.sequence, list(tokens), all_rows=operation.all_rows, chunk=operation.chunk, **options
        )
        count = operation.count if operation.all_rows else 1
        logits = self.checked(index, operation, start, logits, count)
        sequence.tokens += tokens
        for row, position in zip(logits, range(start + operation.count - count, start + operation.count), strict=True):
            self.row(index, sequence, position, row)

    def step(self, index: int, operation: Step) -> None:
        for _ in range(operation.count):
            tokens = {name: self.next_tokens(name, 1)[0] for name in operation.sequences}
            position = len(self.sequences[operation.sequences[0]].tokens)
            logits = self.checked(index, operation, position, self.session.step(dict(tokens)), len(tokens))
            for row, (name, token) in zip(logits, tokens.items(), strict=True):
                sequence = self.sequences[name]
                sequence.tokens.append(token)
                self.row(index, sequence, len(sequence.tokens) - 1, row)

    def greedy(self, index: int, operation: Greedy) -> None:
        sequence = self.sequence(operation.sequence)
        start, result = len(sequence.tokens), self.session.greedy(operation.sequence, operation.count)
        where = f"operation {index} ({operation}) from position {start} on"
        if not isinstance(result, GreedyResult):
            raise TargetError(f"{where} returned {type(result).__name__}; the protocol asks for GreedyResult")
        tokens = [int(token) for token in result.tokens]
        if len(tokens) != operation.count or not all(0 <= token < self.plan.vocab for token in tokens):
            raise TargetError(
                f"{where} returned {len(tokens)} token ids {tokens[:8]}; "
                f"the protocol asks for {operation.count} ids below {self.plan.vocab}"
            )
        rows = np.empty((operation.count, 0), np.float32)
        if result.rows is not None:
            rows = self.checked(index, operation, start, result.rows, operation.count)
        assert sequence.last_row is not None  # Plan has seen to it
        self.rows[sequence.last_row] = replace(self.rows[sequence.last_row], chosen=tokens[0])
        sequence.tokens += tokens
        for i, (row, chosen) in enumerate(zip(rows, [*tokens[1:], None], strict=True)):
            self.row(index, sequence, start + i, row, chosen)

    def restore(self, operation: Restore) -> None:
        cast(SnapshotSession, self.session).restore(operation.sequence, operation.snapshot)
        if operation.sequence not in self.sequences:
            self.sequences[operation.sequence] = _Sequence(self.histories)
        self.sequences[operation.sequence].restore(self.saved[operation.snapshot])

    def refuse(self, index: int, operation: Refuse) -> None:
        try:
            self.perform(index, operation.operation)
        except Refusal:
            return
        raise TargetError(f"operation {index} ({operation}): the target did it, and should have refused")

    def perform(self, index: int, operation: Operation) -> None:
        if isinstance(operation, Feed):
            self.feed(index, operation)
        elif isinstance(operation, Step):
            for name in operation.sequences:
                self.sequence(name)
            self.step(index, operation)
        elif isinstance(operation, Greedy):
            self.greedy(index, operation)
        elif isinstance(operation, Rewind):
            self.session.rewind(operation.sequence, operation.count)
            self.sequence(operation.sequence).rewind(operation.count)
        elif isinstance(operation, Save):
            cast(SnapshotSession, self.session).save(operation.sequence, operation.snapshot)
            self.saved[operation.snapshot] = list(self.sequence(operation.sequence).tokens)
        elif isinstance(operation, Restore):
            self.restore(operation)
        elif isinstance(operation, Open):
            self.sequence(operation.sequence)
        elif isinstance(operation, Refuse):
            self.refuse(index, operation)
        else:
            self.session.close(operation.sequence)
            del self.sequences[operation.sequence]

    def run(self) -> Replay:
        seconds: list[float] = []
        for index, operation in enumerate(self.plan.schedule.operations):
            started = time.perf_counter()
            self.perform(index, operation)
            seconds.append(time.perf_counter() - started)
        counters = {str(name): int(value) for name, value in self.session.counters().items()}
        return Replay([tuple(history) for history in self.histories], self.rows, counters, seconds)


def replay(session: Session, plan: Plan) -> Replay:
    """Run the plan's schedule on a fresh session; raises TargetError where an answer has the wrong form."""
    return _Replayer(session, plan).run()
