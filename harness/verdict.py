"""The verdict: every row that a target yielded against the oracle's row of the same tokens.

| word  | a row is that when                                                             | it is      |
|-------|--------------------------------------------------------------------------------|------------|
| MATCH | its error is within the bound and its arg max is the oracle's                  | good       |
| TIE   | another token, whose oracle logit is within twice the allowed error of the top | counted    |
| DRIFT | its error is beyond the bound, the arg max is the oracle's                     | a failure  |
| WRONG | its error is beyond the bound and so is the token, or it is not finite         | a failure  |

An error within the bound can flip the arg max only within twice the allowed error, so a TIE needs no tolerance of its own; but
more ties than the noise explains are a failure too. Rows without logits (the target chose ids only) have the flip rule alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.choice import Choice, fields, in_words
from harness.figures import figure
from harness.oracle import BLOCK_BYTES, Noise, Oracle, row_errors
from harness.outcomes import Outcome
from harness.repeats import prefix_ids, repeated
from harness.replay import Plan, Replay, where
from harness.target import Row
from harness.tolerance import Tolerance, tolerance

__all__ = ["JudgedRow", "Verdict", "judge"]

SERIES_POINTS = 256
TIE_CANDIDATES = 8  # tokens below the top that can take its place, for the expected number of ties


@dataclass(frozen=True)
class JudgedRow:
    """One row with its numbers; error, noise and bound are of the max norm unless said otherwise."""

    schedule: int
    operation: int
    position: int
    word: str  # MATCH, TIE, DRIFT, WRONG
    error_ratio: float | None  # None for a row without logits; inf for one that is not finite
    max_abs: float | None
    rmse: float | None
    noise_max: float
    noise_rmse: float
    allowed: float
    expected: int  # the oracle's token
    got: int
    margin: float  # the oracle's top logit minus its second
    deficit: float  # the oracle's top logit minus that of the token the target chose
    choice: Choice | None = None  # of experts, up to this row; None where the family makes none

    @property
    def bad(self) -> bool:
        return self.word in ("DRIFT", "WRONG")


@dataclass
class Verdict:
    """What a Record needs of a cell that ran to its end; `fields()` are those of the same names there."""

    outcome: Outcome
    message: str = ""
    error_ratio: float | None = None
    bound: float | None = None
    max_abs: float | None = None
    rmse: float | None = None
    noise_max: float | None = None
    noise_rmse: float | None = None
    rows: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    first_bad_position: int | None = None
    first_bad_schedule: int | None = None
    first_bad_ratio: float | None = None
    first_bad_token: dict[str, Any] | None = None
    worst_position: int | None = None
    worst_schedule: int | None = None
    margin: float | None = None
    routing: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    judged: list[JudgedRow] = field(default_factory=list, repr=False)  # every row, for `replay`

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "judged"}


def judge(replays: Sequence[Replay], plans: Sequence[Plan], oracle: Oracle, dtype: str, *, repeats: bool = False) -> Verdict:
    """The verdict over the replays of one cell, replay i being of plans[i]; `repeats` as Check.repeats says."""
    bounds = tolerance(dtype)
    missing = _missing_rows(replays, plans)
    if missing:
        return Verdict(Outcome.FAIL, missing, bound=bounds.k)
    judged = _judge_rows(replays, oracle, dtype, bounds)
    verdict = _summary(judged, plans, bounds, dtype)
    verdict.judged = judged
    if verdict.outcome is Outcome.PASS:
        tied = _too_many_ties(replays, judged, oracle, dtype)
        if tied:
            verdict.outcome, verdict.message = Outcome.FAIL, tied
    if verdict.outcome is Outcome.PASS and repeats:
        verdict.outcome, verdict.message = repeated(replays, plans)
    return verdict


def _missing_rows(replays: Sequence[Replay], plans: Sequence[Plan]) -> str:
    if len(replays) != len(plans):
        return f"{len(plans)} schedules were asked for, {len(replays)} came back"
    for schedule, (replay, plan) in enumerate(zip(replays, plans, strict=True)):
        wanted = plan.expected()
        got = [(row.operation, row.position) for row in replay.rows]
        for (operation, position), pair in zip(wanted, [*got, *[None] * len(wanted)], strict=False):
            if (operation, position) != pair:
                return f"no row for {where(plans, schedule, operation, position)}: {len(got)} rows of {len(wanted)} came back"
        if len(got) > len(wanted):
            return f"schedule {schedule} yielded {len(got)} rows, {len(wanted)} are in it"
        for row in replay.rows:
            if len(row.logits) not in (0, plan.vocab) or len(replay.histories[row.history]) <= row.position:
                place = where(plans, schedule, row.operation, row.position)
                return f"the row for {place} has {len(row.logits)} logits of {plan.vocab}, or no tokens that it follows"
    return ""


def _longest(histories: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Each history -> the longest of them that begins with it, so that a recompute serves all its prefixes."""
    distinct = sorted({history for history in histories if history}, key=lambda history: (-len(history), history))
    longest: dict[tuple[int, ...], tuple[int, ...]] = {}
    for history in distinct:
        longest[history] = next((other for other in longest.values() if other[: len(history)] == history), history)
    return longest


def _judge_rows(replays: Sequence[Replay], oracle: Oracle, dtype: str, bounds: Tolerance) -> list[JudgedRow]:
    """All rows in order of execution."""
    longest = _longest([history for replay in replays for history in replay.histories])
    groups: dict[tuple[int, ...], list[tuple[int, int, Row]]] = defaultdict(list)
    for schedule, replay in enumerate(replays):
        for order, row in enumerate(replay.rows):
            if row.logits.size or row.chosen is not None:
                groups[longest[replay.histories[row.history]]].append((schedule, order, row))
    judged: dict[tuple[int, int], JudgedRow] = {}
    for history, members in groups.items():
        truth, noise = oracle.rows(history), oracle.noise(history, dtype)
        block = max(1, BLOCK_BYTES // (8 * oracle.vocab))
        for start in range(0, len(members), block):
            part = members[start : start + block]
            for (schedule, order, _), verdict in zip(part, _judge_block(part, truth, noise, bounds), strict=True):
                judged[schedule, order] = verdict
    return [judged[key] for key in sorted(judged)]


def _judge_block(
    members: Sequence[tuple[int, int, Row]], truth: np.ndarray, noise: Noise, bounds: Tolerance
) -> list[JudgedRow]:
    positions = np.array([row.position for _, _, row in members])
    truth = truth[positions]
    rows = np.stack([row.logits if row.logits.size else np.zeros(truth.shape[1], np.float32) for _, _, row in members])
    empty = np.array([not row.logits.size for _, _, row in members])
    finite = np.isfinite(rows).all(axis=1)
    rmse, largest = row_errors(np.where(finite[:, None], rows, 0), truth)
    noise_rmse, noise_max = noise.rmse[positions], noise.max[positions]
    noise_part = noise_rmse + bounds.floor / bounds.k * noise.level_rmse, noise_max + bounds.floor / bounds.k * noise.level_max
    ratio = np.where(finite, np.maximum(_divided(rmse, noise_part[0]), _divided(largest, noise_part[1])), math.inf)
    allowed = bounds.k * noise_part[1]
    expected = truth.argmax(axis=1)
    chosen = [int(rows[i].argmax()) if row.chosen is None else row.chosen for i, (_, _, row) in enumerate(members)]
    top = np.partition(truth, -2, axis=1)[:, -2:]
    index = np.arange(len(members))
    choices = noise.routing.choices(positions, bounds.k) if noise.routing else [None] * len(members)
    deficit = top[:, 1] - truth[index, chosen]
    result = []
    for i, (schedule, _, answer) in enumerate(members):
        flipped = chosen[i] != expected[i]
        beyond = not empty[i] and not ratio[i] <= bounds.k
        if beyond or (flipped and deficit[i] > 2 * allowed[i]):
            word = "WRONG" if flipped or not finite[i] else "DRIFT"
        else:
            word = "TIE" if flipped else "MATCH"
        result.append(
            JudgedRow(
                schedule=schedule,
                operation=answer.operation,
                position=answer.position,
                word=word,
                error_ratio=None if empty[i] else float(ratio[i]),
                max_abs=float(largest[i]) if finite[i] and not empty[i] else None,
                rmse=float(rmse[i]) if finite[i] and not empty[i] else None,
                noise_max=float(noise_max[i]),
                noise_rmse=float(noise_rmse[i]),
                allowed=float(allowed[i]),
                expected=int(expected[i]),
                got=chosen[i],
                margin=float(top[i, 1] - top[i, 0]),
                deficit=float(deficit[i]),
                choice=choices[i],
            )
        )
    return result


def _divided(error: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """error / noise, where no noise at all allows no error at all."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error > 0, error / noise, 0.0)


def _summary(judged: Sequence[JudgedRow], plans: Sequence[Plan], bounds: Tolerance, dtype: str) -> Verdict:
    verdict = Verdict(Outcome.PASS, bound=bounds.k, rows=len(judged), judged=list(judged))
    if not judged:
        verdict.outcome, verdict.message = Outcome.VACUOUS, "no schedule of this cell yields a row"
        return verdict
    for row in judged:
        verdict.verdicts[row.word] = verdict.verdicts.get(row.word, 0) + 1
    measured = [row for row in judged if row.error_ratio is not None]
    worst = max(measured, key=lambda row: row.error_ratio or 0.0, default=None)
    if worst:
        verdict.error_ratio = _finite(worst.error_ratio)
        verdict.max_abs, verdict.rmse = worst.max_abs, worst.rmse
        verdict.noise_max, verdict.noise_rmse = worst.noise_max, worst.noise_rmse
        verdict.worst_position, verdict.worst_schedule = worst.position, worst.schedule
    verdict.series = _series(judged)
    verdict.margin = min(row.margin for row in judged)
    bad = next((row for row in judged if row.bad), None)
    verdict.routing = fields([row.choice for row in judged if row.choice], bad.choice if bad else None)
    if bad:
        finite = bad.max_abs is not None or bad.error_ratio is None
        hint = in_words(verdict.routing, dtype) if finite else ""  # no other expert makes a logit infinite
        said = _blame(bad, worst, plans, bounds)
        verdict.outcome, verdict.message = Outcome.FAIL, "; ".join(filter(None, [said, hint]))
        verdict.first_bad_position, verdict.first_bad_schedule, verdict.margin = bad.position, bad.schedule, bad.margin
        verdict.first_bad_ratio = _finite(bad.error_ratio)
        verdict.first_bad_token = {
            "expected": bad.expected,
            "got": bad.got,
            "deficit": bad.deficit,
            "operation": bad.operation,
            "word": bad.word,
        }
    return verdict


def _finite(ratio: float | None) -> float | None:
    return ratio if ratio is not None and math.isfinite(ratio) else None


def _blame(bad: JudgedRow, worst: JudgedRow | None, plans: Sequence[Plan], bounds: Tolerance) -> str:
    """The first bad row, and the worst one where that is another."""
    place = where(plans, bad.schedule, bad.operation, bad.position)
    margin = f"margin {figure(bad.margin)}"
    token = f"token {bad.expected} as expected" if bad.got == bad.expected else f"expected token {bad.expected}, got {bad.got}"
    if bad.error_ratio == math.inf and bad.max_abs is None:
        what = "the logits are not finite"
    elif bad.error_ratio is None or bad.error_ratio <= bounds.k:
        what = f"{token} ({margin}), {figure(bad.deficit)} below the top where {figure(2 * bad.allowed)} is allowed"
    else:
        ratio = f"error ratio {figure(bad.error_ratio)} > {bounds.k:g}"
        what = f"{ratio} (max |error| {figure(bad.max_abs)}, naive {figure(bad.noise_max)}); {token} ({margin})"
    said = f"{bad.word} at {place}: {what}"
    if worst is None or worst is bad:
        return said
    return f"{said}; worst error ratio {figure(worst.error_ratio)} at position {worst.position} of schedule {worst.schedule}"


def _series(judged: Sequence[JudgedRow]) -> dict[str, list[float]]:
    """The worst row of each position, thinned to the worst of each of at most SERIES_POINTS stretches."""
    worst: dict[int, JudgedRow] = {}
    for row in judged:
        if row.max_abs is not None and (
            row.position not in worst or (row.error_ratio or 0) > (worst[row.position].error_ratio or 0)
        ):
            worst[row.position] = row
    rows = [worst[position] for position in sorted(worst)]
    stretch = math.ceil(len(rows) / SERIES_POINTS) or 1
    kept = [max(rows[i : i + stretch], key=lambda row: row.error_ratio or 0) for i in range(0, len(rows), stretch)]
    return {
        "position": [float(row.position) for row in kept],
        "error": [row.max_abs or 0.0 for row in kept],
        "noise": [row.noise_max for row in kept],
        "bound": [row.allowed for row in kept],
    }


def _too_many_ties(replays: Sequence[Replay], judged: Sequence[JudgedRow], oracle: Oracle, dtype: str) -> str:
    """A message where more distinct prefixes tie than the noise explains.

    Expected: over the tokens close below the top, the chance that rounding with the naive run's deviation lifts them over it,
    bounded by exp(-z^2 / 2) / 2. Six deviations and three beyond that have a chance below one in a million.
    """
    if not any(row.word == "TIE" for row in judged):
        return ""
    rows = iter(judged)
    seen: dict[int, bool] = {}
    expected = 0.0
    longest = _longest([history for replay in replays for history in replay.histories])
    for replay in replays:
        prefixes = [prefix_ids(history) for history in replay.histories]
        for row in replay.rows:
            if not row.logits.size and row.chosen is None:
                continue
            verdict, prefix = next(rows), prefixes[row.history][row.position]
            if prefix not in seen:
                history = longest[replay.histories[row.history]]
                noise = oracle.noise(history, dtype)
                deviation = math.sqrt(2) * (noise.rmse[row.position] + noise.level_rmse)
                candidates = min(TIE_CANDIDATES, oracle.vocab)
                top = np.sort(np.partition(oracle.rows(history)[row.position], -candidates)[-candidates:])
                expected += float(np.sum(np.exp(-0.5 * ((top[-1] - top[:-1]) / deviation) ** 2)) / 2)
            seen[prefix] = seen.get(prefix, False) or verdict.word == "TIE"
    ties, limit = sum(seen.values()), expected + 6 * math.sqrt(expected) + 3
    if ties <= limit:
        return ""
    return (
        f"{ties} of {len(seen)} rows tie where the noise explains {expected:.1f} (at most {limit:.0f} are allowed): "
        "so many ties are a drift"
    )
