"""The checks of general names under the names that each family's table has for them."""

from __future__ import annotations

from suites.decoding import test_chunked, test_engine_run, test_incremental
from suites.decoding.named import families, is_linear_first, named

nemotron_nas_direct_engine_run_completes = named(
    "nemotron_nas_direct_engine_run_completes",
    test_engine_run.engine_run_matches_recompute_greedy,
    families("nemotron_nas"),
)
nemotron_nas_consecutive_direct_engine_runs_match_recompute = named(
    "nemotron_nas_consecutive_direct_engine_runs_match_recompute",
    test_engine_run.consecutive_runs_match_recompute,
    families("nemotron_nas"),
)
nemotron_nas_incremental_logits_match_full_forward = named(
    "nemotron_nas_incremental_logits_match_full_forward",
    test_incremental.incremental_logits_match_full_forward,
    families("nemotron_nas"),
)
nemotron_nas_linear_first_chunked_prefill_matches_full_forward = named(
    "nemotron_nas_linear_first_chunked_prefill_matches_full_forward",
    test_chunked.chunked_prefill_matches_full_forward,
    is_linear_first,
)

longcat_flash_incremental_logits_match_full_forward = named(
    "longcat_flash_incremental_logits_match_full_forward",
    test_incremental.incremental_logits_match_full_forward,
    families("longcat_flash"),
)
longcat_flash_consecutive_direct_engine_runs_match_recompute = named(
    "longcat_flash_consecutive_direct_engine_runs_match_recompute",
    test_engine_run.consecutive_runs_match_recompute,
    families("longcat_flash"),
)

longcat_flash_ngram_incremental_logits_match_full_forward = named(
    "longcat_flash_ngram_incremental_logits_match_full_forward",
    test_incremental.incremental_logits_match_full_forward,
    families("longcat_flash_ngram"),
)
longcat_flash_ngram_consecutive_direct_engine_runs_match_recompute = named(
    "longcat_flash_ngram_consecutive_direct_engine_runs_match_recompute",
    test_engine_run.consecutive_runs_match_recompute,
    families("longcat_flash_ngram"),
)
longcat_flash_ngram_chunked_engine_prefill_matches_single_piece = named(
    "longcat_flash_ngram_chunked_engine_prefill_matches_single_piece",
    test_chunked.engine_cut_prefill_matches_full_forward,
    families("longcat_flash_ngram"),
)
nemotron_h_incremental_logits_match_full_forward = named(
    "nemotron_h_incremental_logits_match_full_forward",
    test_incremental.incremental_logits_match_full_forward,
    families("nemotron_h"),
)
gemma3_incremental_logits_match_full_forward = named(
    "gemma3_incremental_logits_match_full_forward",
    test_incremental.incremental_logits_match_full_forward,
    families("gemma3"),
)
gpt_oss_incremental_logits_match_full_forward = named(
    "gpt_oss_incremental_logits_match_full_forward",
    test_incremental.incremental_logits_match_full_forward,
    families("gpt_oss"),
)
