"""A failing row says when a choice of experts that it depends on hangs by a thread; its verdict is none of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from decodegate.commands.replay import _show
from harness.cases import find
from harness.cases.build import build
from harness.checkpoints import shipped
from harness.choice import in_words
from harness.oracle import Noise, Oracle
from harness.outcomes import Outcome
from harness.prompts import Source
from harness.records import Record, decode, encode
from harness.replay import Plan, Replay
from harness.routing import Routing, compare
from harness.schedule import Schedule
from harness.target import Row
from harness.tokens import TokenStream, special_ids
from harness.verdict import Verdict, judge
from reference_models.recompute import Recompute

MARGINS = [0.3, 0.004, 0.2, 0.1, 0.001, 0.5]
K = 3
WORD = "router margin"


class Routed:
    """An oracle whose rows are all the same, with margins and flips of its own."""

    vocab = 3

    def __init__(self, margins: list[float], level: float, flipped: Sequence[int], routed: bool) -> None:
        marks = np.isin(np.arange(len(margins)), list(flipped))
        moved = np.full(len(margins), level)
        self.routing = Routing(np.array(margins), moved, marks, level) if routed else None

    def rows(self, tokens: tuple[int, ...]) -> np.ndarray:
        return np.tile([9.0, 1.0, 0.0], (len(tokens), 1))

    def noise(self, tokens: tuple[int, ...], dtype: str) -> Noise:
        flat = np.full(len(tokens), 0.1)
        return Noise(flat, flat, 0.1, 0.1, self.routing)


def judged(bad: int | None, level: float, flipped: Sequence[int] = (), *, error: float = 5.0, routed: bool = True) -> Verdict:
    """Of six rows that one feed gives; the bad one is off by `error`."""
    oracle = Routed(MARGINS, level, flipped, routed)
    logits = oracle.rows(tuple(range(6))).astype(np.float32)
    if bad is not None:
        logits[bad, 1] -= error
    rows = [Row(0, 0, position, logits[position]) for position in range(6)]
    plan = Plan(Schedule.parse("feed 6 all"), 0, 3)
    return judge([Replay([tuple(range(6))], rows)], [plan], oracle, "bfloat16")  # type: ignore[arg-type]


def test_a_record_has_the_least_margin_of_its_rows() -> None:
    assert judged(None, 0.01).routing == {"margin": 0.001, "rounding": pytest.approx(K * 0.01)}
    assert judged(None, 0.01).outcome is Outcome.PASS and not judged(None, 0.01).message
    assert judged(None, 0.01, routed=False).routing == {}


def test_a_failing_row_has_its_own_margin_and_the_least_of_all_tokens_before_it() -> None:
    assert judged(3, 0.01, [0, 2, 5]).routing == {
        "margin": 0.001,
        "rounding": pytest.approx(K * 0.01),
        "row_margin": 0.1,
        "least_margin": 0.004,
        "least_position": 1,
        "flips": 2,
        "last_flip": 2,
    }


def test_a_margin_that_rounding_reaches_is_said_with_its_position() -> None:
    assert "router margin 0.004 at position 1: rounding in bfloat16 may move one by 0.006" in judged(3, 0.002).message
    assert "router margin 0.001 at this token: rounding" in judged(4, 0.002).message
    assert "router margin 0.1 at this token, 0.004 at position 1: rounding" in judged(3, 0.05).message


def test_a_choice_that_the_reference_itself_makes_otherwise_in_the_dtype_is_said() -> None:
    said = "the reference itself, in bfloat16, chooses other experts for 1 token up to here, last at position 2"
    assert said in judged(3, 1e-9, [2]).message
    assert WORD not in judged(3, 1e-9, [2]).message
    assert "2 tokens up to here, last at position 3" in judged(3, 1e-9, [2, 3]).message


def test_a_wide_margin_or_a_later_flip_is_no_excuse() -> None:
    assert judged(3, 1e-4).message == judged(3, 1e-4, routed=False).message
    assert judged(3, 1e-4, [4]).message == judged(3, 1e-4, routed=False).message


def test_logits_that_are_not_finite_are_not_blamed_on_experts() -> None:
    assert judged(3, 0.05, [2], error=np.inf).message.endswith("the logits are not finite")


@pytest.mark.parametrize("bad", [None, 0, 4])
def test_a_thin_margin_changes_no_verdict(bad: int | None) -> None:
    thin, plain = judged(bad, 1.0, [0, 1, 2, 3, 4, 5]), judged(bad, 1.0, routed=False)
    left = {"message", "routing"}
    assert {k: v for k, v in thin.fields().items() if k not in left} == {
        k: v for k, v in plain.fields().items() if k not in left
    }
    assert thin.message.startswith(plain.message)


def test_a_record_without_numbers_has_nothing_to_say() -> None:
    whole = judged(3, 0.05, [2]).routing
    assert in_words(whole, "bfloat16").count(";") == 1
    assert in_words({name: None for name in whole}, "bfloat16") == ""
    assert in_words({name: value for name, value in whole.items() if name == "least_margin"}, "bfloat16") == ""


def test_the_words_survive_a_record_file() -> None:
    names = dict.fromkeys(("cell", "target", "build", "family", "case", "check", "dtype", "layout"), "x")
    verdict = judged(3, 0.05, [2])
    kept = decode(encode(Record(**names, schedule=[], **verdict.fields())))
    assert kept.routing == verdict.routing and in_words(kept.routing, "bfloat16") in kept.message


def test_a_replay_marks_rows_whose_margin_rounding_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    names = dict.fromkeys(("cell", "target", "build", "family", "case", "check", "dtype", "layout"), "x")
    for routed in (True, False):
        verdict = judged(3, 0.002, routed=routed)
        _show(Record(**names, schedule=[], **verdict.fields()), verdict.judged)
        header, *rows = capsys.readouterr().out.splitlines()
        assert ("router" in header) == routed
        assert ["thin" in row for row in rows[:6]] == [routed and margin <= 0.006 for margin in MARGINS]


def test_families_that_always_use_every_expert_have_no_choice() -> None:
    rows, choices = torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.int64)
    every = Recompute(rows, torch.full((4,), torch.inf), choices)
    some = Recompute(rows, torch.full((4,), 0.5), choices)
    assert compare(every, every, None) is None and compare(Recompute(rows), Recompute(rows), None) is None
    assert compare(some, some, None) is not None


def test_a_short_history_takes_its_level_from_the_usual_run_too(tmp_path: Path) -> None:
    oracle = Oracle(build(find("nemotron_h/no_mamba"), 0, tmp_path))
    short = oracle.noise([5, 6], "bfloat16").routing
    tokens = TokenStream(0, oracle.vocab, special_ids(oracle.text)).tokens("calibration", 0, range(48))
    usual = oracle.noise(tokens, "bfloat16").routing
    assert short is not None and usual is not None and len(short.moved) == 2
    assert short.level == pytest.approx(np.sqrt(np.mean(np.append(short.moved, usual.moved) ** 2)))


def test_one_flipped_expert_of_a_trained_checkpoint_fails_and_is_named() -> None:
    """The target is the oracle with the runner-up of the thinnest choice lifted over the last chosen expert."""
    (checkpoint,) = [path for path in shipped() if path.name == "nemotron_h"]
    oracle = Oracle(checkpoint)
    tokens = Source(checkpoint).prompts(100).text
    exact = oracle.exact(tokens)
    assert exact.margins is not None and exact.choices is not None
    thinnest = int(exact.margins.argmin())
    for name in [name for name in oracle.weights if name.endswith("e_score_correction_bias")]:
        for expert in range(len(oracle.weights[name])):
            lifted = oracle.weights[name].double().clone()
            lifted[expert] += 1.01 * exact.margins[thinnest]
            other = oracle.reference.recompute(oracle.config, {**oracle.weights, name: lifted}, tokens)
            assert other.choices is not None
            if (other.choices != exact.choices).any(-1).nonzero().flatten().tolist() == [thinnest]:
                rows = [Row(0, 0, position, row.float().numpy()) for position, row in enumerate(other.logits)]
                plan = Plan(Schedule.parse("feed 100 all"), 0, oracle.vocab)
                verdict = judge([Replay([tuple(tokens)], rows)], [plan], oracle, "float16")
                assert verdict.outcome is Outcome.FAIL and verdict.first_bad_position == thinnest
                assert verdict.judged[thinnest].choice is not None
                assert "at this token: rounding in float16 may move one by" in verdict.message
                assert asdict(verdict.judged[0])["choice"].keys() >= {"margin", "rounding"}
                return
    pytest.fail("no expert was the runner-up")
