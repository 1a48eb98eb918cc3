"""Cases are as sharp as they claim: no parameter is idle, and a fault moves the logits far beyond the bound."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.cases import Case, all_cases, find
from harness.cases.build import build, fingerprint
from harness.cells import Matrix, Subject, checks_in
from harness.check import POWER
from harness.faults import ENGINE
from harness.oracle import Oracle
from harness.outcomes import Outcome
from harness.targets.engine import EngineTarget
from harness.tokens import TokenStream, special_ids
from reference_models.loading import load
from suites.harness.measure import verdict
from suites.harness.second_llama import FAULTS

CASES = all_cases()
LLAMA = [case for case in CASES if case.family == "llama" and not case.stored]
SEED = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="module")
def oracle(directory: Path, request: pytest.FixtureRequest) -> Iterator[Oracle]:
    yield Oracle(build(request.param, SEED, directory))


def test_cases_have_names_of_their_own_and_prompts_that_show_a_mask() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert all(case.stresses for case in CASES)
    assert all(case.prompt >= 36 or case.name.endswith("_prompt") for case in CASES)  # unless it is about short prompts
    assert find("llama/gqa").id == "llama/gqa"
    with pytest.raises(KeyError, match="there is no case 'llama/nothing'"):
        find("llama/nothing")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_no_parameter_is_trivially_zero_or_one(case: Case, directory: Path) -> None:
    _, weights = load(build(case, SEED, directory))
    for name, value in weights.items():
        if case.stored and value.dtype is torch.float64:
            continue  # decoded from what the value was quantised to
        assert value.dtype == getattr(torch, case.file_dtype), name
        assert torch.equal(value, value.to(torch.bfloat16).to(value.dtype)), name
        assert value.std() > 0.05 * value.abs().mean() > 0, f"{name} is nearly constant"
        assert (value == 0).float().mean() < 0.01 and (value == 1).float().mean() < 0.1, name


def test_cases_for_few_checks_name_checks_that_there_are() -> None:
    known = checks_in("suites.decoding")
    for case in CASES:
        assert set(case.checks) <= known.keys(), case.id
        assert all(known[name].applies(case) for name in case.checks), case.id


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_check_of_a_case_has_two_faults_that_may_break_it(case: Case) -> None:
    matrix = Matrix("engine", EngineTarget(), [Subject(case)])
    for check in checks_in("suites.decoding").values():
        if any(matrix.cells(check)):
            assert sum(ENGINE[name].touches(case) for name in set(check.faults)) >= 2, check.name


def test_equal_seeds_build_equal_files_and_others_do_not(tmp_path: Path) -> None:
    case = find("llama/gqa")
    marks = [fingerprint(build(case, seed, tmp_path / place)) for seed, place in ((0, "a"), (0, "b"), (1, "a"))]
    assert marks[0] == marks[1] != marks[2] and len(marks[0]) == 16


def test_a_checkpoint_is_built_once_also_when_many_build_it_at_a_time(tmp_path: Path) -> None:
    case = find("llama/gqa")
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: build(case, 0, tmp_path), range(16)))
    (path,) = paths
    assert [child.name for child in tmp_path.iterdir()] == [path.name]
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert build(case, 0, tmp_path) == path and (path / "model.safetensors").stat().st_mtime_ns == written


def test_both_spellings_are_built_from_the_same_parameters(directory: Path) -> None:
    (_, old), (_, new) = (load(build(find(f"llama/{name}_spelling"), SEED, directory)) for name in ("old", "new"))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize(("oracle", "case"), [(case, case) for case in LLAMA], indirect=["oracle"], ids=lambda case: case.name)
def test_logits_have_spread_and_margins(oracle: Oracle, case: Case) -> None:
    tokens = TokenStream(SEED, oracle.vocab, special_ids(oracle.config)).tokens("a", 0, range(case.prompt))
    rows = oracle.rows(tokens)
    top = np.sort(rows, axis=1)[:, -2:]
    assert 1 < rows.std() < 3.5 and np.median(top[:, 1] - top[:, 0]) > 0.2


@pytest.mark.parametrize(("oracle", "case"), [(case, case) for case in LLAMA], indirect=["oracle"], ids=lambda case: case.name)
def test_an_honest_second_implementation_passes(oracle: Oracle, case: Case) -> None:
    for dtype in ("float32", "bfloat16"):
        found = verdict(case, SEED, oracle, dtype, None)
        assert found.outcome is Outcome.PASS, found.message
        assert found.error_ratio is not None and found.error_ratio < 0.75 * 3


@pytest.mark.parametrize(("oracle", "case"), [(case, case) for case in LLAMA], indirect=["oracle"], ids=lambda case: case.name)
def test_every_fault_moves_float32_far_beyond_the_bound(oracle: Oracle, case: Case) -> None:
    for fault in FAULTS:
        found = verdict(case, SEED, oracle, "float32", fault)
        assert found.error_ratio is not None and found.bound is not None
        assert found.error_ratio / found.bound > 10 * POWER, f"{fault}: {found.error_ratio / found.bound:.3g}"


@pytest.mark.parametrize(("oracle", "case"), [(find("llama/gqa"), find("llama/gqa"))], indirect=["oracle"], ids=["gqa"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "scale"])  # one percent is within bfloat16's noise
def test_bfloat16_sees_faults_too(oracle: Oracle, case: Case, fault: str) -> None:
    found = verdict(case, SEED, oracle, "bfloat16", fault)
    assert found.outcome is Outcome.FAIL and found.error_ratio is not None and found.error_ratio > 3 * 2
