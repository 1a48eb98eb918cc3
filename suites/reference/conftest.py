"""Fixtures of the reference suites: a case's config, parameters and tokens, drawn as the gate draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from harness import cases
from harness.cases import build
from harness.tokens import TokenStream, special_ids


class Drawn(NamedTuple):
    config: dict[str, Any]
    weights: dict[str, Tensor]
    tokens: list[int]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def draw() -> Callable[..., Drawn]:
    """`draw("longcat_flash/plain", seed=0, length=48)`."""
    kept: dict[tuple[str, int], dict[str, Tensor]] = {}

    def drawn(id: str, seed: int = 0, length: int = 48) -> Drawn:
        case = cases.find(id)
        if (id, seed) not in kept:
            kept[id, seed] = build.drawn(case, seed)
        stream = TokenStream(seed, case.text["vocab_size"], special_ids(case.text), planted=case.planted)
        return Drawn(dict(case.config), kept[id, seed], stream.tokens("a", 0, range(length)))

    return drawn
