"""Record files that no run made: every outcome, for the tests of the reports."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.outcomes import Outcome
from harness.records import Header, Record
from reports import terminal
from reports.summary import Run, Summary

CASES = ("gqa", "mha", "mqa", "biased", "tied", "llama3_rope", "yarn", "long")
CHECKS = (
    "incremental_logits_match_full_forward",
    "chunked_prefill_matches_full_forward",
    "greedy_matches_recompute",
    "consecutive_runs_match_full_forward",
    "interleaved_sequences_match_full_forward",
    "rewind_then_new_suffix_matches_full_forward",
    "repeated_run_is_identical",
)
NOISE = {"float32": 1.1e-6, "bfloat16": 1.6e-2}


def header(**changes: Any) -> Header:
    values: dict[str, Any] = {
        "command": "decodegate gate --out gate-out",
        "started": "2026-01-02T03:04:05Z",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
        "seed": 20260102,
        "versions": {"decodegate": "0.1.0", "mlx": "0.32.4", "torch": "2.13.0", "python": "3.11.7", "platform": "Linux x86_64"},
        "device": "cpu (2 cores)",
        "blas": "mkl via libtorch_cpu.so",
        "flags": {"MLX_ENABLE_TF32": "0"},
    }
    return Header(**(values | changes))


def record(
    outcome: Outcome = Outcome.PASS,
    *,
    family: str = "llama",
    case: str = "gqa",
    check: str = CHECKS[0],
    dtype: str = "float32",
    build: str = "worktree",
    target: str = "engine",
    **changes: Any,
) -> Record:
    """A plausible record of one cell; the same arguments give the same record."""
    cell = f"{target}::{family}/{case}::{check}[{dtype},dense]"
    rng = random.Random(f"{cell} {build}")
    noise = NOISE[dtype]
    positions = list(range(48))
    errors = [noise * rng.uniform(0.5, 1.2) for _ in positions]
    values: dict[str, Any] = {
        "schedule": ["feed a 12; feed a 1; feed a 35", "feed a 1; step a 47"],
        "rows": 96,
        "verdicts": {"MATCH": 95, "TIE": 1},
        "bound": 3.0,
        "noise_max": noise,
        "noise_rmse": noise / 4,
        "power": {"rope_offset_by_one": rng.uniform(2e3, 5e4), "mask_missing_on_second_chunk": rng.uniform(60, 900)},
        "counters": {"prefill_chunks": 3, "decode_steps": 47, "cache_growths": 1},
        "duration_s": rng.uniform(0.1, 0.6),
        "margin": rng.uniform(1e-3, 1e-1),
        "replay": f"decodegate replay '{cell}' --seed 20260102",
        "seed": 20260102,
    }
    if outcome in (Outcome.FAIL, Outcome.FLAKE):
        bad = rng.randrange(5, 44)
        errors[bad:] = [min(noise * 800 * 1.1 ** (p - bad), 3.0) * rng.uniform(0.6, 1.4) for p in positions[bad:]]
        ratio = max(errors) / noise
        values |= {
            "first_bad_position": bad,
            "first_bad_schedule": 0,
            "first_bad_token": {"expected": 17, "got": 93},
            "verdicts": {"MATCH": bad, "WRONG": 48 - bad},
            "message": f"WRONG at position {bad}: error ratio {ratio:.3g} beyond {3.0:g}, token 93 where the recompute has 17",
        }
    elif outcome is Outcome.CRASH:
        values |= {"message": "worker died with SIGSEGV", "detail": "loading\nmlx: Segmentation fault (core dumped)"}
    elif outcome is Outcome.ERROR:
        values |= {
            "message": "ValueError: [broadcast_shapes] Shapes (1,4,12,12) and (1,4,12,16) cannot be broadcast.",
            "detail": 'Traceback (most recent call last):\n  File "engine/engine.py", line 88\nValueError: bad shapes',
        }
    elif outcome is Outcome.TIMEOUT:
        values |= {"message": "no result after 60 s; the worker was replaced"}
    elif outcome is Outcome.VACUOUS:
        values |= {"message": "cache_growths is 0, at least 1 is needed: the cache never grew"}
    elif outcome is Outcome.INFRA:
        values |= {"message": "mlx_lm is not installed; pip install 'decodegate[mlx-lm]'"}
    elif outcome is Outcome.UNSUPPORTED:
        values |= {"message": "rewind: the layout holds its state in the model"}
    if outcome in (Outcome.PASS, Outcome.FAIL, Outcome.FLAKE):
        values |= {
            "max_abs": max(errors),
            "rmse": math.sqrt(sum(e * e for e in errors) / len(errors)) / 4,
            "error_ratio": max(errors) / noise,
            "series": {"position": positions, "error": errors, "noise": [noise] * 48, "bound": [3 * noise] * 48},
        }
    else:
        values |= {"power": {}, "verdicts": {}, "rows": 0, "bound": None, "noise_max": None, "noise_rmse": None, "margin": None}
    values |= changes
    schedule = values.pop("schedule")
    return Record(cell, target, build, family, case, check, dtype, "dense", schedule, outcome, **values)


def smoke(outcome: Outcome = Outcome.PASS) -> Record:
    extra = {
        "text": "The sky appears blue because of a phenomenon called Rayleigh scattering.\nShorter wavelengths scatter more.",
        "prefill_tokens_per_s": 1240.5,
        "decode_tokens_per_s": 61.25,
        "resident_bytes": 734003200,
        "kl": {"mean": 1.2e-9, "p99": 8e-9, "max": 3.1e-8},
        "top1_agreement": 1.0,
    }
    return record(
        outcome,
        case="SmolLM2-135M-Instruct",
        check="smoke",
        extra=extra,
        power={},
        message="61.2 tok/s decode, 1240 tok/s prefill",
    )


def green(families: tuple[str, ...] = ("llama",), **changes: Any) -> list[Record]:
    return [
        record(family=family, case=case, check=check, dtype=dtype, **changes)
        for family in families
        for case in CASES
        for check in CHECKS
        for dtype in NOISE
    ]


def red() -> list[Record]:
    """A run in which every outcome occurs."""
    records = green()
    bad = [
        Outcome.FAIL,
        Outcome.CRASH,
        Outcome.ERROR,
        Outcome.TIMEOUT,
        Outcome.VACUOUS,
        Outcome.FLAKE,
        Outcome.INFRA,
        Outcome.UNSUPPORTED,
    ]
    for index, old in enumerate(records):
        if old.check.startswith("rewind") or index % 13 == 5:
            outcome = Outcome.FAIL if old.check.startswith("rewind") else bad[(index // 13) % len(bad)]
            records[index] = record(outcome, case=old.case, check=old.check, dtype=old.dtype)
    return [*records, smoke()]


def write(path: Path, records: list[Record], head: Header | None = None) -> Path:
    head = head or header(selected=len(records))
    text = "\n".join(json.dumps(asdict(item), ensure_ascii=False) for item in (head, *records))
    path.write_text(text + "\n", encoding="utf-8", errors="surrogatepass")
    return path


def summary_of(records: list[Record], **head: object) -> Summary:
    return Summary([Run(header(**{"selected": len(records), **head}), tuple(records))])


def printed(report: Summary, **options: object) -> str:
    """What the summary prints where stdout is not a terminal."""
    stream = io.StringIO()
    terminal.summary(report, terminal.make_console(stream), **options)  # type: ignore[arg-type]
    return stream.getvalue()
