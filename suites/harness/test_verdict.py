"""The judge sees what is wrong, where it is wrong, and nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import find
from harness.cases.build import build
from harness.figures import figure
from harness.oracle import Noise, Oracle
from harness.outcomes import Outcome
from harness.records import Record
from harness.replay import Plan, Replay, replay
from harness.schedule import Schedule
from harness.target import GreedyResult, Row
from harness.tokens import special_ids
from harness.tolerance import TABLE
from harness.verdict import SERIES_POINTS, Verdict, judge
from reference_models.recompute import ReferenceError

LENGTH, VOCAB = 40, 128
DTYPES = st.sampled_from(["float32", "bfloat16"])
positions = st.integers(0, LENGTH - 1)


class Naive:
    """A session that is right by construction: the naive run itself, one full forward for each call."""

    def __init__(self, oracle: Oracle, dtype: str) -> None:
        self.oracle, self.dtype, self.tokens = oracle, dtype, dict[str, list[int]]()

    def rows(self, name: str) -> np.ndarray:
        return self.oracle.naive(self.tokens[name], self.dtype)

    def open(self, sequence: str) -> None:
        self.tokens[sequence] = []

    def feed(self, sequence: str, tokens: list[int], *, all_rows: bool, chunk: int | None) -> np.ndarray:
        self.tokens[sequence] += tokens
        return self.rows(sequence)[-len(tokens) if all_rows else -1 :]

    def step(self, tokens: dict[str, int]) -> np.ndarray:
        return np.concatenate([self.feed(name, [token], all_rows=False, chunk=None) for name, token in tokens.items()])

    def greedy(self, sequence: str, count: int) -> GreedyResult:
        chosen: list[int] = []
        for _ in range(count):
            chosen.append(int(self.rows(sequence)[-1].argmax()))
            self.tokens[sequence].append(chosen[-1])
        return GreedyResult(chosen, self.rows(sequence)[-count:])

    def rewind(self, sequence: str, count: int) -> None:
        del self.tokens[sequence][-count:]

    def close(self, sequence: str) -> None:
        del self.tokens[sequence]

    def counters(self) -> dict[str, int]:
        return {}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(build(find("llama/gqa"), 0, tmp_path_factory.mktemp("verdict")))


def run(oracle: Oracle, text: str, dtype: str = "float32") -> tuple[list[Replay], list[Plan]]:
    plan = Plan(Schedule.parse(text), 0, VOCAB, special_ids(oracle.config))
    return [replay(Naive(oracle, dtype), plan)], [plan]


@pytest.fixture(scope="module")
def honest(oracle: Oracle) -> dict[str, tuple[list[Replay], list[Plan]]]:
    return {dtype: run(oracle, f"feed {LENGTH} all", dtype) for dtype in TABLE}


def changed(replays: list[Replay], change: dict[int, np.ndarray]) -> list[Replay]:
    rows = [replace(row, logits=change.get(row.position, row.logits).astype(np.float32)) for row in replays[0].rows]
    return [replace(replays[0], rows=rows)]


@pytest.mark.parametrize("dtype", list(TABLE))
def test_the_naive_run_itself_passes(oracle: Oracle, honest: dict, dtype: str) -> None:
    verdict = judge(*honest[dtype], oracle, dtype)
    assert verdict.outcome is Outcome.PASS and verdict.message == ""
    assert verdict.error_ratio is not None and 0 < verdict.error_ratio <= 1 and verdict.bound == 3
    assert verdict.rows == LENGTH and sum(verdict.verdicts.values()) == LENGTH
    assert verdict.first_bad_position is None and verdict.margin is not None and verdict.margin >= 0


@given(dtype=DTYPES, position=positions, element=st.integers(0, VOCAB - 1), sign=st.sampled_from([-1, 1]))
def test_one_corrupt_element_is_seen_at_its_position(oracle, honest, dtype, position, element, sign) -> None:
    replays, plans = honest[dtype]
    logits = replays[0].rows[position].logits.copy()
    logits[element] += sign * 1.0
    verdict = judge(changed(replays, {position: logits}), plans, oracle, dtype)
    assert verdict.outcome is Outcome.FAIL and verdict.first_bad_position == position and verdict.first_bad_schedule == 0
    assert f"position {position} of schedule 0, operation 0 (feed a {LENGTH} all)" in verdict.message
    assert sum(count for word, count in verdict.verdicts.items() if word in ("DRIFT", "WRONG")) == 1


@given(position=positions, element=st.integers(0, VOCAB - 1))
def test_an_element_off_by_a_thousandth_is_seen_in_float32(oracle, honest, position, element) -> None:
    replays, plans = honest["float32"]
    logits = replays[0].rows[position].logits.copy()
    logits[element] += 1e-3
    verdict = judge(changed(replays, {position: logits}), plans, oracle, "float32")
    assert verdict.first_bad_position == position


@given(seed=st.integers(0, 2**32 - 1), dtype=DTYPES)
def test_an_ulp_of_noise_is_not_a_fault(oracle, honest, seed: int, dtype: str) -> None:
    replays, plans = honest[dtype]
    ulp = {"float32": 2.0**-23, "bfloat16": 2.0**-8}[dtype]
    noise = np.random.default_rng(seed).choice([-1, 0, 1], (LENGTH, VOCAB)) * ulp / 2
    change = {row.position: row.logits * (1 + noise[row.position]) for row in replays[0].rows}
    assert judge(changed(replays, change), plans, oracle, dtype).outcome is Outcome.PASS


def test_a_scale_of_one_percent_is_drift_in_float32(oracle: Oracle, honest: dict) -> None:
    replays, plans = honest["float32"]
    change = {row.position: row.logits * np.float32(1.01) for row in replays[0].rows}
    verdict = judge(changed(replays, change), plans, oracle, "float32")
    assert verdict.outcome is Outcome.FAIL and verdict.verdicts == {"DRIFT": LENGTH} and verdict.first_bad_position == 0
    assert verdict.message.startswith("DRIFT at position 0")


@given(st.permutations(range(LENGTH)), DTYPES)
def test_permuted_rows_are_wrong_where_they_moved(oracle, honest, order: list[int], dtype: str) -> None:
    replays, plans = honest[dtype]
    change = {position: replays[0].rows[source].logits for position, source in enumerate(order)}
    verdict = judge(changed(replays, change), plans, oracle, dtype)
    moved = [position for position, source in enumerate(order) if position != source]
    assert verdict.first_bad_position == (moved[0] if moved else None)
    assert [row.position for row in verdict.judged if row.bad] == moved


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_fails_its_row(oracle: Oracle, honest: dict, value: float) -> None:
    replays, plans = honest["float32"]
    logits = replays[0].rows[7].logits.copy()
    logits[3] = value
    verdict = judge(changed(replays, {7: logits}), plans, oracle, "float32")
    assert verdict.outcome is Outcome.FAIL and verdict.first_bad_position == 7 and "not finite" in verdict.message
    assert verdict.error_ratio is None  # records are JSON: no inf, no NaN in them
    assert all(np.isfinite(values).all() for values in verdict.series.values())


def test_the_first_bad_row_and_the_worst_one_have_a_ratio_each(oracle: Oracle, honest: dict) -> None:
    replays, plans = honest["float32"]
    change = {position: replays[0].rows[position].logits.copy() for position in (7, 11)}
    change[7][3] += 0.01
    change[11][3] += 1.0
    verdict = judge(changed(replays, change), plans, oracle, "float32")
    first, worst = verdict.judged[7], verdict.judged[11]
    assert (verdict.first_bad_position, verdict.first_bad_ratio) == (7, first.error_ratio)
    assert (verdict.worst_position, verdict.worst_schedule, verdict.error_ratio) == (11, 0, worst.error_ratio)
    assert verdict.bound < verdict.first_bad_ratio < verdict.error_ratio / 10
    assert f"error ratio {figure(first.error_ratio)} > 3" in verdict.message
    assert verdict.message.endswith(f"worst error ratio {figure(worst.error_ratio)} at position 11 of schedule 0")
    change[11][5] = np.nan
    verdict = judge(changed(replays, change), plans, oracle, "float32")
    assert (verdict.first_bad_ratio, verdict.error_ratio, verdict.worst_position) == (first.error_ratio, None, 11)
    assert verdict.message.endswith("worst error ratio ∞ at position 11 of schedule 0")


def test_a_first_bad_row_that_is_the_worst_is_named_once(oracle: Oracle, honest: dict) -> None:
    replays, plans = honest["float32"]
    verdict = judge(changed(replays, {7: replays[0].rows[7].logits + np.float32(1)}), plans, oracle, "float32")
    assert verdict.first_bad_position == verdict.worst_position == 7 and verdict.first_bad_ratio == verdict.error_ratio
    assert "worst" not in verdict.message and "as expected" in verdict.message


def test_a_missing_row_names_schedule_operation_and_position(oracle: Oracle) -> None:
    replays, plans = run(oracle, "feed 5; step 4")
    short = [replace(replays[0], rows=replays[0].rows[:-2])]
    verdict = judge(short, plans, oracle, "float32")
    assert verdict.outcome is Outcome.FAIL and "position 7 of schedule 0, operation 1 (step a 4)" in verdict.message
    assert "schedules" in judge([], plans, oracle, "float32").message
    double = [replace(replays[0], rows=[*replays[0].rows, replays[0].rows[-1]])]
    assert judge(double, plans, oracle, "float32").outcome is Outcome.FAIL


def test_a_row_that_is_too_short_is_a_failure(oracle: Oracle) -> None:
    replays, plans = run(oracle, "feed 5")
    rows = [replace(replays[0].rows[0], logits=np.zeros(3, np.float32))]
    assert "3 logits of 128" in judge([replace(replays[0], rows=rows)], plans, oracle, "float32").message


class Table:
    """An oracle with given rows and noise, for verdicts at the edge."""

    def __init__(self, truth: np.ndarray, noise: float) -> None:
        self.truth, self.vocab = truth, truth.shape[1]
        self.level = noise

    def rows(self, tokens: tuple[int, ...]) -> np.ndarray:
        return self.truth[: len(tokens)]

    def noise(self, tokens: tuple[int, ...], dtype: str) -> Noise:
        flat = np.full(len(tokens), self.level)
        return Noise(flat / 1.5, flat, self.level / 1.5, self.level)


def edge(
    margins: list[float], deltas: list[float], noise: float, chosen: list[int | None] | None = None, ids: bool = False
) -> Verdict:
    """Rows of three tokens, the second `margin` below the first; the target lifts the second by `delta`."""
    truth = np.array([[0.0, -margin, -50.0] for margin in margins])
    logits = truth.astype(np.float32)
    logits[:, 1] += np.array(deltas, np.float32)
    count = len(margins)
    plan = Plan(Schedule.parse(f"feed {count} all"), 0, 3)
    rows = [Row(0, 0, i, np.empty(0, np.float32) if ids else logits[i], chosen[i] if chosen else None) for i in range(count)]
    history = tuple(range(count))
    return judge([Replay([history], rows)], [plan], Table(truth, noise), "bfloat16")  # type: ignore[arg-type]


ALLOWED = 3 * 0.1 + 3 * 0.1  # K * noise + floor * level


@pytest.mark.parametrize("shift", [[0.4, 0.4, 0.4], [0.0, 0.4, 0.0]])  # with the RMSE worse than the largest error, and better
def test_the_ratio_is_the_worse_of_rmse_and_largest_error_as_a_multiple_of_a_third_of_its_bound(shift: list[float]) -> None:
    truth = np.array([[0.0, -9.0, -50.0]])
    replay = Replay([(0,)], [Row(0, 0, 0, (truth[0] + shift).astype(np.float32), None)])
    (row,) = judge([replay], [Plan(Schedule.parse("feed 1 all"), 0, 3)], Table(truth, 0.1), "bfloat16").judged  # type: ignore[arg-type]
    assert row.max_abs is not None and row.rmse is not None
    rmse, largest = row.rmse / (ALLOWED / 1.5 / 3), row.max_abs / (row.allowed / 3)
    assert row.error_ratio == pytest.approx(max(rmse, largest)) and (rmse > largest) == (shift[0] > 0)


def test_a_flip_within_the_noise_is_a_tie_and_passes() -> None:
    verdict = edge([0.05], [0.1], noise=0.1)
    assert verdict.outcome is Outcome.PASS and verdict.verdicts == {"TIE": 1} and verdict.margin == pytest.approx(0.05)


def test_a_flip_beyond_the_bound_is_wrong_and_says_both_tokens() -> None:
    verdict = edge([0.05], [ALLOWED * 1.1], noise=0.1)
    assert verdict.verdicts == {"WRONG": 1} and verdict.first_bad_token is not None
    assert (verdict.first_bad_token["expected"], verdict.first_bad_token["got"]) == (0, 1)
    assert "expected token 0, got 1 (margin 0.05)" in verdict.message


def test_an_error_beyond_the_bound_without_a_flip_is_drift() -> None:
    assert edge([9.0], [ALLOWED * 1.1], noise=0.1).verdicts == {"DRIFT": 1}
    assert edge([9.0], [ALLOWED * 0.5], noise=0.1).verdicts == {"MATCH": 1}


def test_ids_without_logits_follow_the_margin() -> None:
    assert edge([1.9 * ALLOWED], [0], 0.1, chosen=[1], ids=True).verdicts == {"TIE": 1}
    assert edge([2.1 * ALLOWED], [0], 0.1, chosen=[1], ids=True).verdicts == {"WRONG": 1}
    verdict = edge([2.1 * ALLOWED], [0], 0.1, chosen=[0], ids=True)
    assert verdict.verdicts == {"MATCH": 1} and verdict.error_ratio is None and verdict.outcome is Outcome.PASS


def test_a_target_that_chooses_another_token_than_its_logits_say_is_wrong() -> None:
    verdict = edge([9.0], [0], 0.1, chosen=[1])
    assert verdict.verdicts == {"WRONG": 1} and "is allowed" in verdict.message


def test_more_ties_than_the_noise_explains_are_a_drift() -> None:
    few = edge([0.3] * 3 + [9.0] * 97, [0.35] * 3 + [0.0] * 97, noise=0.1)
    assert few.outcome is Outcome.PASS and few.verdicts["TIE"] == 3
    many = edge([0.3] * 40 + [9.0] * 60, [0.35] * 40 + [0.0] * 60, noise=0.1)
    assert many.outcome is Outcome.FAIL and "40 of 100 rows tie" in many.message


def test_no_rows_are_vacuous(oracle: Oracle) -> None:
    replays, plans = run(oracle, "open a; close a")
    assert judge(replays, plans, oracle, "float32").outcome is Outcome.VACUOUS


def test_repeats_are_equal_bit_by_bit_or_fail(oracle: Oracle) -> None:
    text = "feed 6 all; step 3; close a; open a; feed 6 all; step 3"
    replays, plans = run(oracle, text)
    assert judge(replays, plans, oracle, "float32", repeats=True).outcome is Outcome.PASS
    rows = list(replays[0].rows)
    rows[-1] = replace(rows[-1], logits=np.nextafter(rows[-1].logits, np.float32(np.inf)))
    spoilt = [replace(replays[0], rows=rows)]
    assert judge(spoilt, plans, oracle, "float32").outcome is Outcome.PASS
    verdict = judge(spoilt, plans, oracle, "float32", repeats=True)
    assert (
        verdict.outcome is Outcome.FAIL and "not repeatable" in verdict.message and "operation 5 (step a 3)" in verdict.message
    )


def test_repeats_compare_the_same_operations_only(oracle: Oracle) -> None:
    replays, plans = run(oracle, "feed 9 all; close a; open a; feed 6 all; step 3")
    verdict = judge(replays, plans, oracle, "float32", repeats=True)
    assert verdict.outcome is Outcome.VACUOUS and "nothing was repeated" in verdict.message


def test_rows_after_rewinds_and_of_several_sequences_are_judged_by_their_own_tokens(oracle: Oracle) -> None:
    replays, plans = run(oracle, "feed 9 all; feed b 4; step a+b 3; rewind 5; feed 3 all; greedy 4; rewind b 2; step b 2")
    verdict = judge(replays, plans, oracle, "float32")
    assert verdict.outcome is Outcome.PASS and verdict.rows == len(plans[0].expected())


def test_a_verdict_fills_a_record(oracle: Oracle, honest: dict) -> None:
    fields = judge(*honest["float32"], oracle, "float32").fields()
    names = dict.fromkeys(("cell", "target", "build", "family", "case", "check", "dtype", "layout"), "")
    assert Record(**names, schedule=[], **fields).rows == LENGTH


def test_the_series_is_bounded_and_keeps_the_worst_row() -> None:
    count = 1000
    deltas = [0.0] * count
    deltas[777] = 5.0
    verdict = edge([9.0] * count, deltas, noise=0.1)
    assert len(verdict.series["position"]) <= SERIES_POINTS
    assert verdict.series["error"][verdict.series["position"].index(777.0)] == pytest.approx(5.0)


def test_noise_of_a_cell_depends_on_no_other_cell(oracle: Oracle, tmp_path: Path) -> None:
    tokens = list(range(3, 23))
    fresh = Oracle(oracle.checkpoint)
    oracle.noise([*tokens, 30, 31], "float32")
    ours, theirs = oracle.noise(tokens, "float32"), fresh.noise(tokens, "float32")
    assert np.array_equal(ours.rmse, theirs.rmse) and ours.level_max == pytest.approx(theirs.level_max, rel=1e-6)


def test_a_longer_recompute_serves_its_prefixes(oracle: Oracle) -> None:
    tokens = list(range(40, 70))
    full = oracle.rows(tokens)
    assert np.shares_memory(full, oracle.rows(tokens[:11])) and len(oracle.rows(tokens[:11])) == 11


def test_tokens_outside_the_vocabulary_are_refused(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="0 to 127"):
        oracle.rows([3, 128])


@pytest.mark.parametrize("dtype", list(TABLE))
def test_every_bound_stands_between_measured_good_and_measured_broken(dtype: str) -> None:
    bound = TABLE[dtype]
    assert 0 < 1.5 * bound.good < bound.k < bound.broken / 2 and bound.seeds >= 20 and bound.reason


def test_an_oracle_needs_every_tensor_in_the_shape_that_its_config_says(oracle, tmp_path):
    shutil.copytree(oracle.checkpoint, tmp_path / "wrong")
    config = json.loads((tmp_path / "wrong/config.json").read_text())
    for field, value in (("num_hidden_layers", config["num_hidden_layers"] + 1), ("intermediate_size", 8)):
        (tmp_path / "wrong/config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ReferenceError, match=r"tensor 'model\.layers"):
            Oracle(tmp_path / "wrong")
