"""The checks that every case, dtype and target gets; a suite of another project may import them and run them as its own."""

from suites.decoding.test_chunked import chunked_prefill_matches_full_forward, engine_cut_prefill_matches_full_forward
from suites.decoding.test_engine_run import consecutive_runs_match_recompute, engine_run_matches_recompute_greedy
from suites.decoding.test_incremental import incremental_logits_match_full_forward
from suites.decoding.test_repeat import repeat_is_deterministic
from suites.decoding.test_rewind import rewind_and_go_on_matches_recompute
from suites.decoding.test_sequences import batched_steps_match_solo, interleaved_sequences_match_recompute

__all__ = [
    "batched_steps_match_solo",
    "chunked_prefill_matches_full_forward",
    "consecutive_runs_match_recompute",
    "engine_cut_prefill_matches_full_forward",
    "engine_run_matches_recompute_greedy",
    "incremental_logits_match_full_forward",
    "interleaved_sequences_match_recompute",
    "repeat_is_deterministic",
    "rewind_and_go_on_matches_recompute",
]
