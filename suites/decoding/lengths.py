"""Lengths that schedules straddle."""

from __future__ import annotations

from harness.cases.case import RECURRENT, RING, Case

ALLOCATION_STEP = 256  # tokens by which a KV cache grows, in this engine and in mlx-lm; schedules of long cases straddle it
LEAST = 36  # tokens that a schedule feeds in all, whatever the prompt: masks that differ give other rows only on longer ones
PAST = 4  # decode steps past a prefill: the first token is often right where the rest is wrong


def total(case: Case) -> int:
    """Tokens that a schedule feeds in all. A case about short prompts feeds its prompt first, and then the rest."""
    return max(case.prompt, LEAST)


def is_short(case: Case) -> bool:
    return case.prompt < LEAST


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


def goes_back(case: Case) -> bool:
    """Whether tokens can always be dropped again."""
    return not case.traits & {RING, RECURRENT}


def window(case: Case) -> int:
    """Tokens that a sliding layer sees, the query's own among them."""
    return int(case.text["sliding_window"])


def taps(case: Case) -> int:
    """Tokens that the convolution before a recurrence sees, the last among them."""
    return int(case.text["conv_kernel"])
