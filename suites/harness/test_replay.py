"""Replay asks a session for what the schedule says, and names the operation where the answer has the wrong form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.outcomes import Refusal
from harness.replay import Plan, Replay, TargetError, replay
from harness.schedule import Schedule
from harness.target import GreedyResult

VOCAB = 16


class Echo:
    """A session whose row is hot at the sum of all tokens that the sequence holds; `answer` may spoil what it returns."""

    def __init__(self, answer: Any = lambda operation, rows: rows) -> None:
        self.answer = answer
        self.tokens: dict[str, list[int]] = {}
        self.saved: dict[str, list[int]] = {}
        self.log: list[str] = []

    def row(self, name: str) -> np.ndarray:
        return np.eye(VOCAB, dtype=np.float32)[sum(self.tokens[name]) % VOCAB]

    def open(self, sequence: str) -> None:
        self.log.append(f"open {sequence}")
        self.tokens[sequence] = []

    def feed(
        self, sequence: str, tokens: list[int], *, all_rows: bool, chunk: int | None, pad: int | None = None
    ) -> np.ndarray:
        if pad is not None and pad < len(tokens):
            raise Refusal("more tokens than rows")
        self.log.append(f"feed {sequence} {len(tokens)} {all_rows} {chunk}{'' if pad is None else f' {pad}'}")
        rows = []
        for token in tokens:
            self.tokens[sequence].append(token)
            rows.append(self.row(sequence))
        return self.answer("feed", np.stack(rows if all_rows else rows[-1:]))

    def step(self, tokens: dict[str, int]) -> np.ndarray:
        self.log.append(f"step {'+'.join(tokens)}")
        for name, token in tokens.items():
            self.tokens[name].append(token)
        return self.answer("step", np.stack([self.row(name) for name in tokens]))

    def greedy(self, sequence: str, count: int) -> GreedyResult:
        chosen, rows = [], []
        for _ in range(count):
            chosen.append(int(self.row(sequence).argmax()))
            self.tokens[sequence].append(chosen[-1])
            rows.append(self.row(sequence))
        return self.answer("greedy", GreedyResult(chosen, np.stack(rows)))

    def rewind(self, sequence: str, count: int) -> None:
        del self.tokens[sequence][-count:]

    def save(self, sequence: str, snapshot: str) -> None:
        self.saved[snapshot] = list(self.tokens[sequence])

    def restore(self, sequence: str, snapshot: str) -> None:
        self.log.append(f"restore {sequence} {snapshot}")
        self.tokens[sequence] = list(self.saved[snapshot])

    def close(self, sequence: str) -> None:
        del self.tokens[sequence]

    def counters(self) -> dict[str, int]:
        return {"calls": len(self.log)}


def run(text: str, session: Echo | None = None) -> Replay:
    return replay(session or Echo(), Plan(Schedule.parse(text), 0, VOCAB))


def test_every_row_follows_the_tokens_of_its_history() -> None:
    text = "feed 4 all; step 2; rewind 3; feed 5 chunk=2; greedy 3; feed b 2; step a+b 2; close a; open a; feed 4 all"
    result = run(text)
    plan = Plan(Schedule.parse(text), 0, VOCAB)
    assert [(row.operation, row.position) for row in result.rows] == plan.expected()
    for row in result.rows:
        assert row.logits.argmax() == sum(result.histories[row.history][: row.position + 1]) % VOCAB


def test_a_rewind_branches_and_a_reopened_sequence_begins_again() -> None:
    first, branched, again = run("feed 6; rewind 2; feed 2; close a; open a; feed 6").histories
    assert first[:4] == branched[:4] and first[4:] != branched[4:] and again == first


def test_a_restored_sequence_holds_the_snapshots_tokens_and_goes_on_with_others() -> None:
    text = (
        "feed a 6; save a x; feed a 2; restore a x; feed a 2; restore b x; feed b 2; save b x; close b; restore b x; step b 1"
    )
    result = run(text)
    assert [(row.operation, row.position) for row in result.rows] == Plan(Schedule.parse(text), 0, VOCAB).expected()
    for row in result.rows:
        assert row.logits.argmax() == sum(result.histories[row.history][: row.position + 1]) % VOCAB
    ends = [result.histories[row.history][: row.position + 1] for row in result.rows]
    first, before, after, other, again = ends
    assert before[:6] == after[:6] == other[:6] == first and len({before, after, other}) == 3
    assert again[:8] == other


def test_a_refused_operation_changes_nothing() -> None:
    session = Echo()
    refused, plain = run("feed a 4; refuse feed a 6 pad=5; feed a 6", session), run("feed a 4; feed a 6")
    assert refused.histories == plain.histories and len(refused.rows) == len(plain.rows)
    assert session.log == ["open a", "feed a 4 False None", "feed a 6 False None"]


def test_an_operation_that_should_have_been_refused_and_was_not_is_named() -> None:
    with pytest.raises(TargetError, match=r"operation 1 \(refuse feed a 6 pad=6\): the target did it"):
        run("feed a 4; refuse feed a 6 pad=6")


def test_a_refusal_that_no_schedule_waits_for_is_an_error() -> None:
    with pytest.raises(Refusal):
        run("feed a 6 pad=5")


def test_a_greedy_choice_is_noted_at_the_row_it_was_made_from() -> None:
    rows = run("feed 3; greedy 2").rows
    assert [row.chosen for row in rows] == [int(rows[0].logits.argmax()), int(rows[1].logits.argmax()), None]


def test_ids_without_logits_are_rows_too() -> None:
    session = Echo(lambda operation, rows: GreedyResult(rows.tokens, None) if operation == "greedy" else rows)
    rows = run("feed 3; greedy 3", session).rows
    assert [row.logits.size for row in rows] == [VOCAB, 0, 0, 0]
    assert [row.chosen is None for row in rows] == [False, False, False, True]


def test_rows_do_not_share_memory_with_the_target() -> None:
    buffer = np.zeros((1, VOCAB), np.float32)

    def reuse(operation: str, rows: np.ndarray) -> np.ndarray:
        buffer[:] = rows
        return buffer

    kept, fresh = run("step 4", Echo(reuse)), run("step 4")
    assert [row.logits.tolist() for row in kept.rows] == [row.logits.tolist() for row in fresh.rows]


def test_chunk_and_rows_reach_the_target() -> None:
    session = Echo()
    run("feed 5 all chunk=2; feed b 3; feed b 2 pad=8", session)
    assert session.log == ["open a", "feed a 5 True 2", "open b", "feed b 3 False None", "feed b 2 False None 8"]
    assert run("step a+b 1").counters == {"calls": 3}


@pytest.mark.parametrize(
    ("text", "spoil", "said"),
    [
        (
            "feed 3; step 2",
            lambda rows: rows[:, :-1],
            r"operation 1 \(step a 2\) from position 3 on returned float32 \[1, 15\]",
        ),
        ("step 2", lambda rows: rows[0], r"operation 0 \(step a 2\) from position 0 on returned float32 \[16\]"),
        ("step a+b 1", lambda rows: rows[:1], r"\(step a\+b 1\).*\[1, 16\].*\[2, 16\]"),
        ("step 1", lambda rows: rows.astype(np.float64), "float64"),
        ("step 1", lambda rows: rows.tolist(), "returned list"),
        ("step 1", lambda rows: None, "returned NoneType"),
    ],
)
def test_an_answer_of_the_wrong_form_names_operation_and_position(text: str, spoil: Any, said: str) -> None:
    session = Echo(lambda operation, rows: spoil(rows) if operation == "step" else rows)
    with pytest.raises(TargetError, match=said):
        run(text, session)


@pytest.mark.parametrize("tokens", [[1], [1, 2, VOCAB], [1, 2, -1], []])
def test_greedy_ids_that_cannot_be_are_refused(tokens: list[int]) -> None:
    session = Echo(lambda operation, rows: GreedyResult(tokens, None) if operation == "greedy" else rows)
    with pytest.raises(TargetError, match=r"operation 1 \(greedy a 3\)"):
        run("feed 3; greedy 3", session)


def test_values_are_not_replays_business() -> None:
    session = Echo(lambda operation, rows: rows * np.float32("nan"))
    assert np.isnan(run("feed 3", session).rows[0].logits).all()
