"""Lengths that schedules straddle."""

from __future__ import annotations

from harness.cases.case import Case

ALLOCATION_STEP = 256  # tokens by which a KV cache grows, in this engine and in mlx-lm; schedules of long cases straddle it
PAST = 4  # decode steps past a prefill: the first token is often right where the rest is wrong


def crosses_allocation(case: Case) -> bool:
    return case.prompt > 2 * ALLOCATION_STEP


def allocation_boundaries(case: Case) -> list[int]:
    """Lengths up to the prompt's at which the cache has just, or has nearly, filled a step of its allocation."""
    return [
        b
        for step in range(ALLOCATION_STEP, case.prompt, ALLOCATION_STEP)
        for b in (step - 1, step, step + 1)
        if b < case.prompt
    ]
