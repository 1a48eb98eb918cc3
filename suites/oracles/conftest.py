"""Checkpoints of the cases, and a summary of how far apart the implementations are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness import cases
from harness.cases import build
from harness.tokens import TokenStream, special_ids
from suites.oracles.comparison import FIGURES

LENGTH = 48


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def written(tmp_path) -> Callable[..., tuple[Path, list[int]]]:
    """`written("longcat_flash/plain")`: the case's checkpoint directory and tokens."""

    def write(id: str, seed: int = 0) -> tuple[Path, list[int]]:
        case = cases.find(id)
        stream = TokenStream(seed, case.text["vocab_size"], special_ids(case.text), planted=case.planted)
        return build.build(case, seed, tmp_path), stream.tokens("a", 0, range(LENGTH))

    return write


def pytest_terminal_summary(terminalreporter) -> None:
    if FIGURES:
        terminalreporter.section("largest difference of logits, and the float32 noise of the reference")
        for what, name, difference, noise in FIGURES:
            terminalreporter.line(
                f"{difference:9.2e} {noise:9.2e} {difference / noise:8.1f}x  {name.rsplit('-', 2)[0]}: {what}"
            )
