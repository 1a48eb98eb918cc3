"""Choices of experts that hang by a thread: what a reader of a failing row has to know, and no verdict.

A discrete choice turns rounding into another computation: where the last expert that was chosen leads the first that was not by
less than rounding moves them, an honest engine may run the other one, and its row is then beyond any bound that follows from
rounding. Attention and recurrence carry that to every later row. So three things are looked at over the tokens up to a row: the
oracle's least router margin, how much rounding moves margins (the reference, run in the dtype: the naive run), and whether the
naive run itself chose other experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from reference_models.recompute import Recompute

__all__ = ["Choice", "Routing", "compare", "fields", "in_words"]


@dataclass(frozen=True)
class Choice:
    """How firmly the experts were chosen that a row depends on: those of its own token and of all before it."""

    margin: float  # of its own token: the least gap, over the layers, between the last chosen and the first that is not
    least: float  # of all these tokens
    least_position: int
    rounding: float  # as far as rounding may move a margin
    flips: int  # how many of these tokens have other experts in the naive run
    last_flip: int | None  # the position of the last that has


@dataclass(frozen=True)
class Routing:
    """The oracle's choices over a history beside those of the naive run, by token [T]."""

    margins: np.ndarray  # float64
    moved: np.ndarray  # float64: by how much the naive run's margin differs
    flipped: np.ndarray  # bool: the naive run chose other experts in some layer
    level: float  # root mean square of `moved`

    def choices(self, positions: np.ndarray, k: float) -> list[Choice]:
        """Of the rows at these positions. As with logits, an engine's rounding may be `k` times that of the naive run."""
        index = np.arange(len(self.margins))
        least = np.minimum.accumulate(self.margins)
        where = np.maximum.accumulate(np.where(self.margins == least, index, 0))
        flips = self.flipped.cumsum()
        last = np.maximum.accumulate(np.where(self.flipped, index, -1))
        return [
            Choice(
                margin=float(self.margins[p]),
                least=float(least[p]),
                least_position=int(where[p]),
                rounding=k * self.level,
                flips=int(flips[p]),
                last_flip=int(last[p]) if last[p] >= 0 else None,
            )
            for p in positions
        ]


def compare(exact: Recompute, naive: Recompute, calibration: Routing | None) -> Routing | None:
    """What rounding did to the choices of a history; None where a family has none to make.

    `calibration`: of the run that a short history takes part of its level from (harness.oracle).
    """
    if exact.margins is None or exact.choices is None or naive.margins is None or naive.choices is None:
        return None
    count = len(naive.margins)
    margins = exact.margins[:count].double().numpy()
    if not np.isfinite(margins).all():  # every expert is chosen for every token
        return None
    moved = np.abs(naive.margins.double().numpy() - margins)
    flipped = (naive.choices != exact.choices[:count]).any(-1).numpy()
    every = moved if calibration is None else np.concatenate([moved, calibration.moved])
    return Routing(margins, moved, flipped, math.sqrt(np.mean(every * every)))


def fields(choices: Sequence[Choice], bad: Choice | None) -> dict[str, float]:
    """`Record.routing`: the least margin of the rows that were judged and, where one is bad, what that one depends on."""
    if not choices:
        return {}
    shown = bad or min(choices, key=lambda choice: choice.margin)
    found: dict[str, float] = {"margin": min(choice.margin for choice in choices), "rounding": shown.rounding}
    if bad is not None:
        found |= {"row_margin": bad.margin, "least_margin": bad.least, "least_position": bad.least_position, "flips": bad.flips}
        if bad.last_flip is not None:
            found["last_flip"] = bad.last_flip
    return found


def in_words(routing: Mapping[str, float | None], dtype: str) -> str:
    """What `fields` say of a bad row where a choice that it depends on hangs by a thread; else nothing."""
    row, least, place, rounding = (routing.get(name) for name in ("row_margin", "least_margin", "least_position", "rounding"))
    flips, last_flip = routing.get("flips"), routing.get("last_flip")
    said = []
    if row is not None and least is not None and place is not None and rounding is not None and least <= rounding:
        before = f"{least:.2g} at position {place:.7g}"
        margin = before if row > rounding else f"{row:.2g} at this token" + (f", {before}" if least < row else "")
        said.append(f"router margin {margin}: rounding in {dtype} may move one by {rounding:.2g} and choose another expert")
    if flips and last_flip is not None:
        tokens = "1 token" if flips == 1 else f"{flips:.7g} tokens"
        said.append(
            f"the reference itself, in {dtype}, chooses others for {tokens} up to here, last at position {last_flip:.7g}"
        )
    return "; ".join(said)
