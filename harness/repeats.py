"""Check.repeats: rows after the same tokens by the same operations must be equal bit by bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from harness.outcomes import Outcome
from harness.replay import Plan, Replay, where
from harness.schedule import Close, Open, Refuse, Step
from harness.target import Row

__all__ = ["prefix_ids", "repeated"]


def prefix_ids(history: tuple[int, ...]) -> list[int]:
    """One number for each prefix of a history: equal for equal prefixes."""
    value, found = 0, []
    for token in history:
        value = hash((value, token))
        found.append(value)
    return found


def repeated(replays: Sequence[Replay], plans: Sequence[Plan]) -> tuple[Outcome, str]:
    """Rows after the same tokens by the same operations since the sequence was opened must be equal bit by bit."""
    first: dict[tuple[Any, ...], tuple[int, Row]] = {}
    twice = 0
    for schedule, (replay, plan) in enumerate(zip(replays, plans, strict=True)):
        paths = _paths(plan)
        order = 0
        prefixes = [prefix_ids(history) for history in replay.histories]
        for row in replay.rows:
            key = (paths[order], prefixes[row.history][row.position])
            order += 1
            if key not in first:
                first[key] = schedule, row
                continue
            twice += 1
            before, other = first[key]
            if row.chosen != other.chosen or row.logits.tobytes() != other.logits.tobytes():
                here, there = (where(plans, s, r.operation, r.position) for s, r in ((schedule, row), (before, other)))
                return Outcome.FAIL, f"not repeatable: {here} differs from {there} after the same tokens and operations"
    if not twice:
        return Outcome.VACUOUS, "no row came twice by the same operations, so nothing was repeated"
    return Outcome.PASS, ""


def _paths(plan: Plan) -> list[tuple[Any, ...]]:
    """For each expected row: what was done to its sequence since it was opened, up to this row."""
    done: dict[str, list[Any]] = defaultdict(list)
    paths: list[tuple[Any, ...]] = []
    rows = iter(plan.expected())
    pending = next(rows, None)
    for index, operation in enumerate(plan.schedule.operations):
        if isinstance(operation, Refuse):  # changes nothing and yields no row
            continue
        names = operation.sequences if isinstance(operation, Step) else (operation.sequence,)
        for name in names:
            if isinstance(operation, Open | Close):
                done[name].clear()
            else:
                done[name].append(str(operation))
        turn = 0
        while pending is not None and pending[0] == index:
            name = names[turn % len(names)]
            paths.append((name, *done[name], turn))
            turn += 1
            pending = next(rows, None)
    return paths
