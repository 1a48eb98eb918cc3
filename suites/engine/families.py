"""Every registered family with a few of its tiny cases, loaded: for suites that hold of all families without naming one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from engine.checkpoint import load
from engine.engine import Engine
from engine.models import FAMILIES, family
from engine.models.model import Model
from engine.state import SequenceStateLayout, Span, State
from harness.cases import all_cases, find
from harness.cases.build import build
from harness.cases.case import Case
from harness.tokens import TokenStream, special_ids

__all__ = ["ATOL", "CASES", "LAYOUTS", "full", "loaded", "ragged", "tokens"]

CASES_PER_FAMILY = 3
LAYOUTS = tuple(SequenceStateLayout)
ATOL = 2e-4  # of logits with a deviation of 1 to 3; measured 1e-5 between ways of decoding, and 1e-1 where one is wrong

CASES: list[Case] = [
    case
    for module in sorted(set(FAMILIES.values()))
    for case in [case for case in all_cases() if FAMILIES.get(case.config["model_type"]) == module][:CASES_PER_FAMILY]
]


@cache
def loaded(case_id: str, directory: Path) -> Model:
    checkpoint = load(build(find(case_id), 0, directory), dtype="float32")
    return family(checkpoint.model_type).Model(checkpoint.config, checkpoint.weights)


def tokens(case: Case, count: int, name: str = "a") -> list[int]:
    vocab, avoid = case.text["vocab_size"], special_ids(case.text)
    return TokenStream(0, vocab, avoid, planted=case.planted).tokens(name, 0, range(count))


def full(model: Model, ids: list[int]) -> np.ndarray:
    """Logits float32 [len(ids), vocab] of one forward over all tokens, on new states."""
    served = model.in_layout(SequenceStateLayout.DENSE)
    return np.array(served.forward(mx.array(ids), [Span(0, len(ids), 0, served.make_slots())], None))


def ragged(engine: Engine, lanes: list[list[int]], states: list[list[State]]) -> np.ndarray:
    """One forward over the tokens of all lanes, each on its own states, which are new."""
    spans, start = [], 0
    for lane, slots in zip(lanes, states, strict=True):
        spans.append(Span(start, len(lane), 0, slots))
        start += len(lane)
    return np.array(engine.model.forward(mx.array([token for lane in lanes for token in lane]), spans, None))
