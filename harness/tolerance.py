"""The one table of bounds.

Let r be the oracle's row, e the target's, n the naive row (the reference, run in the target's dtype). With RMSE and with max,
on every row:

    err(e, r) <= K * err(n, r) + floor        floor = FLOOR * level

`level` is the root mean square of err(n, r) over the rows of the sequence. The floor is needed because err(n, r) of one row is
one draw: a row whose naive error is small by luck would otherwise bound an honest target too tightly (K alone is broken by one
honest row in a thousand). It scales with the level since a rounding error does: an absolute floor would be too wide for a small
model or too narrow for a large one. An error ratio is err / (err(n, r) + floor / K), so that good is at most K.

`good` is the largest error ratio of honest implementations that are none of the reference's (cached, chunked, fused attention,
other order of rounding) over all tiny cases and `seeds` seeds; `broken` is the least over cases and seeds of the largest error
ratio in a cell with a real fault (rope offset by one from the second chunk, no mask in a chunk, one key dropped). Measured by
suites/harness/test_cases.py on few seeds, by its `measure` on many.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TABLE", "Tolerance", "tolerance"]


@dataclass(frozen=True)
class Tolerance:
    k: float
    floor: float  # times the level of the sequence
    reason: str
    good: float  # measured, at most k
    broken: float  # measured, at least k
    seeds: int


TABLE = {
    "float32": Tolerance(
        k=3.0,
        floor=6.0,
        reason="faults lie four orders of magnitude beyond, so the floor is wide",
        good=0.0,
        broken=0.0,
        seeds=0,
    ),
    "bfloat16": Tolerance(
        k=3.0,
        floor=3.0,
        reason="as wide as the level asks for: a fault moves logits by 10 to 50 times the rounding",
        good=0.0,
        broken=0.0,
        seeds=0,
    ),
    "float16": Tolerance(k=3.0, floor=3.0, reason="rounds like bfloat16 with three more bits", good=0.0, broken=0.0, seeds=0),
}


def tolerance(dtype: str) -> Tolerance:
    """The bounds of a dtype by its name; ValueError where the table has none."""
    if dtype not in TABLE:
        raise ValueError(f"there is no tolerance for dtype {dtype!r}; there are {', '.join(TABLE)}")
    return TABLE[dtype]
