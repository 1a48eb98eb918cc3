"""Padding fills a forward up to a fixed number of rows, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cases.case import Case
from harness.check import Check
from harness.schedule import Schedule
from suites.decoding.lengths import PAST, crosses_allocation, is_short, total


def _schedules(case: Case) -> Sequence[Schedule]:
    n = total(case)
    if crosses_allocation(case):  # the padding alone crosses a step of the allocation, then the tokens do
        return [Schedule.parse(f"feed a 250 pad=300; step a 12; feed a {n - 262} pad=256; step a {PAST}")]
    texts = [
        f"feed a {n} all pad={n + 16}; step a {PAST}",  # one forward with room
        f"feed a {n} all pad=17; step a {PAST}",  # several, the last with room
        f"feed a {n} pad={n - 1}; step a {PAST}",  # one token is left over
        f"feed a 1 pad=8; step a 3; feed a 11 all pad=16; step a 1; feed a {n - 16} chunk=5 pad=9; step a {PAST}",
    ]
    if is_short(case):
        texts.append(f"feed a {case.prompt} all pad=16; step a {n - case.prompt}")
    return [Schedule.parse(text) for text in texts]


padded_prefill_matches_full_forward = Check(
    name="padded_prefill_matches_full_forward",
    holds="a prompt whose forwards are padded to a fixed number of rows gives the logits of one full forward",
    schedules=_schedules,
    faults=(
        "padding_enters_the_state",
        "padding_enters_the_window",
        "padding_enters_the_recurrence",
        "recurrent_state_forgotten",
        "rope_offset_off_by_one",
        "first_key_forgotten",
    ),
    needs=frozenset({"pad", "all_rows"}),
    layout="dense",
    counters={"padded_rows": 4},
)
