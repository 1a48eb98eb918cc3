"""Choices of experts that hang by a thread: what a reader of a failing row has to know, and no verdict.

A discrete choice turns rounding into another computation: where the last expert that was chosen leads the first that was not by
less than rounding moves them, an honest engine may run the other one, and its row is then beyond any bound that follows from
rounding. Attention and recurrence carry that to every later row. So three things are looked at over the tokens up to a row: the
oracle's least router margin, how much rounding moves margins (the reference, run in the dtype: the naive run), and whether the
naive run itself chose other experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Choice", "fields", "in_words"]


@dataclass(frozen=True)
class Choice:
    """How firmly the experts were chosen that a row depends on: those of its own token and of all before it."""

    margin: float  # of its own token: the least gap, over the layers, between the last chosen and the first that is not
    least: float  # of all these tokens
    least_position: int
    rounding: float  # as far as rounding may move a margin
    flips: int  # how many of these tokens have other experts in the naive run
    last_flip: int | None  # the position of the last that has


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
            f"the reference itself, in {dtype}, chooses other experts for {tokens} up to here, last at position {last_flip:.7g}"
        )
    return "; ".join(said)
