"""The checks that every case, dtype and target gets; a suite of another project may import them and run them as its own."""

from suites.decoding.test_boundaries import conv_tail_boundaries_match_full_forward, window_boundaries_match_full_forward
from suites.decoding.test_chunked import chunked_prefill_matches_full_forward, engine_cut_prefill_matches_full_forward
from suites.decoding.test_engine_run import consecutive_runs_match_recompute, engine_run_matches_recompute_greedy
from suites.decoding.test_families import (
    gemma3_incremental_logits_match_full_forward,
    gpt_oss_incremental_logits_match_full_forward,
    longcat_flash_consecutive_direct_engine_runs_match_recompute,
    longcat_flash_incremental_logits_match_full_forward,
    longcat_flash_ngram_chunked_engine_prefill_matches_single_piece,
    longcat_flash_ngram_consecutive_direct_engine_runs_match_recompute,
    longcat_flash_ngram_incremental_logits_match_full_forward,
    nemotron_h_incremental_logits_match_full_forward,
    nemotron_nas_consecutive_direct_engine_runs_match_recompute,
    nemotron_nas_direct_engine_run_completes,
    nemotron_nas_incremental_logits_match_full_forward,
    nemotron_nas_linear_first_chunked_prefill_matches_full_forward,
)
from suites.decoding.test_incremental import incremental_logits_match_full_forward
from suites.decoding.test_padded import padded_prefill_matches_full_forward
from suites.decoding.test_repeat import repeat_is_deterministic
from suites.decoding.test_rewind import rewind_and_go_on_matches_recompute, states_that_cannot_go_back_refuse_it
from suites.decoding.test_sequences import batched_steps_match_solo, interleaved_sequences_match_recompute
from suites.decoding.test_snapshots import restored_snapshot_matches_recompute

__all__ = [
    "batched_steps_match_solo",
    "chunked_prefill_matches_full_forward",
    "consecutive_runs_match_recompute",
    "conv_tail_boundaries_match_full_forward",
    "engine_cut_prefill_matches_full_forward",
    "engine_run_matches_recompute_greedy",
    "gemma3_incremental_logits_match_full_forward",
    "gpt_oss_incremental_logits_match_full_forward",
    "incremental_logits_match_full_forward",
    "interleaved_sequences_match_recompute",
    "longcat_flash_consecutive_direct_engine_runs_match_recompute",
    "longcat_flash_incremental_logits_match_full_forward",
    "longcat_flash_ngram_chunked_engine_prefill_matches_single_piece",
    "longcat_flash_ngram_consecutive_direct_engine_runs_match_recompute",
    "longcat_flash_ngram_incremental_logits_match_full_forward",
    "nemotron_h_incremental_logits_match_full_forward",
    "nemotron_nas_consecutive_direct_engine_runs_match_recompute",
    "nemotron_nas_direct_engine_run_completes",
    "nemotron_nas_incremental_logits_match_full_forward",
    "nemotron_nas_linear_first_chunked_prefill_matches_full_forward",
    "padded_prefill_matches_full_forward",
    "repeat_is_deterministic",
    "restored_snapshot_matches_recompute",
    "rewind_and_go_on_matches_recompute",
    "states_that_cannot_go_back_refuse_it",
    "window_boundaries_match_full_forward",
]
