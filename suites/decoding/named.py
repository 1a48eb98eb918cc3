"""Names by family. What was first shown of a family under a name of its own keeps that name: its cells carry it, and the check
of the general name leaves them to it, so that nothing runs twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.cases.case import Case
from harness.check import Check

__all__ = ["LONGCATS", "RECENT", "families", "for_others", "is_linear_first", "named"]

LONGCATS = ("longcat_flash", "longcat_flash_ngram")
RECENT = ("gemma3", "gpt_oss", "nemotron_h")


def families(*names: str) -> Callable[[Case], bool]:
    return lambda case: case.family in names


def is_linear_first(case: Case) -> bool:
    """Whether the first layer has a linear map in place of attention: a mask sized from its cache is that of an empty one."""
    blocks = case.config.get("block_configs") or ()
    return case.family == "nemotron_nas" and any(block["attention"].get("replace_with_linear") for block in blocks[:1])


_NAMED: dict[str, Callable[[Case], bool]] = {  # general name -> cases that have a name of their own for it
    "chunked_prefill_matches_full_forward": is_linear_first,
    "consecutive_runs_match_recompute": families("nemotron_nas", *LONGCATS),
    "engine_cut_prefill_matches_full_forward": families("longcat_flash_ngram"),
    "engine_run_matches_recompute_greedy": families("nemotron_nas"),
    "incremental_logits_match_full_forward": families("nemotron_nas", *LONGCATS, *RECENT),
}


def for_others(name: str) -> Callable[[Case], bool]:
    """All cases but those that have a name of their own for the check of this general name."""
    return lambda case: not _NAMED[name](case)


def named(name: str, check: Check, applies: Callable[[Case], bool]) -> Check:
    """The check under another name, on these cases alone, in all layouts."""
    return replace(check, name=name, applies=applies, layout=None)
