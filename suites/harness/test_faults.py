"""Runtime faults: every check has some, and a planted one leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from harness import cases
from harness.cases.build import build
from harness.cases.case import RECURRENT, RING
from harness.cells import checks_in
from harness.check import Check
from harness.faults import ENGINE
from harness.replay import Plan, Replay, replay
from harness.schedule import Schedule
from harness.target import Loaded
from harness.targets.engine import EngineTarget

CHECKS = checks_in("suites.decoding")
EVERYTHING = Schedule.parse(
    "open a; feed a 9; step a 2; rewind a 3; feed a 4; open b; feed b 5; step a+b 3; greedy b 3; close a; open a; feed a 3; "
    "feed a 4 pad=8; save a x; step a 2; restore b x; step b 2"
)
ONWARD = Schedule.parse("feed a 9; step a 2; feed a 4; feed a 9 pad=16; step a 2; feed a 3")
STATE_CASES = {RING: "gemma3/local_global", RECURRENT: "nemotron_h/mixed"}  # of faults that llama has nothing to break for


@pytest.fixture(scope="module")
def loaded_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    @cache
    def load(id: str) -> Loaded:
        checkpoint = build(cases.find(id), 0, tmp_path_factory.mktemp("cases"))
        return EngineTarget().load(checkpoint, dtype="float32", layout="dense")

    return load


@pytest.fixture(scope="module")
def loaded(loaded_case: Callable[[str], Loaded]) -> Loaded:
    return loaded_case("llama/gqa")


def rows(loaded: Loaded, schedule: Schedule) -> Replay:
    return replay(loaded.start(), Plan(schedule, 0, 128))


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_every_check_names_at_least_two_faults_that_there_are(check: Check) -> None:
    assert len(set(check.faults)) >= 2
    assert set(check.faults) <= ENGINE.keys()


def test_every_fault_is_named_by_a_check() -> None:
    assert ENGINE.keys() == {name for check in CHECKS.values() for name in check.faults}


@pytest.mark.parametrize("name", ENGINE)
def test_a_fault_says_that_it_took_effect_moves_rows_and_is_gone_afterwards(
    loaded_case: Callable[[str], Loaded], name: str
) -> None:
    own = [id for trait, id in STATE_CASES.items() if ENGINE[name].traits == {trait}]
    loaded, schedule = loaded_case(own[0] if own else "llama/gqa"), ONWARD if own else EVERYTHING
    before = rows(loaded, schedule)
    with ENGINE[name].planted() as planted:
        broken = rows(loaded, schedule)
    assert planted.called
    assert any(
        a.chosen != b.chosen or np.abs(a.logits - b.logits).max() > 1e-2 for a, b in zip(before.rows, broken.rows, strict=True)
    )
    after = rows(loaded, schedule)
    assert all(a.logits.tobytes() == b.logits.tobytes() for a, b in zip(before.rows, after.rows, strict=True))


def test_a_fault_whose_code_is_not_reached_says_so(loaded: Loaded) -> None:
    with ENGINE["rewind_drops_one_too_few"].planted() as planted:
        replay(loaded.start(), Plan(Schedule.parse("feed 4; step 2"), 0, 128))
    assert not planted.called
