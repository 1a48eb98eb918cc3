"""The benchmark: every peer loads once, then rounds in which each is asked in turn, the order rotated, all raw samples kept."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from harness.bench.process import Peer, PeerProcess
from harness.bench.quiet import QUIET, require_quiet
from harness.checkpoints import resolve
from harness.export import export
from harness.lock import DEFAULT_TIMEOUT_S, hold
from harness.outcomes import Infra, Rejected
from harness.prompts import Source
from reference_models.recompute import ReferenceError

__all__ = ["SCHEMA", "measure", "measure_checkpoint"]

SCHEMA = 1
SETTLE_S = 0.3  # BLAS threads of the peer before spin for up to 0.2 s after their last work
WARM_UP = (32, 8)  # prompt and decode tokens of a request that is not kept
PEER_TIMEOUT_S = 600.0


def measure_checkpoint(
    peers: Sequence[Peer],
    checkpoint: str,
    *,
    prompt: int = 128,
    decode: int = 48,
    rounds: int = 6,
    allow_busy: bool = False,
    lock_timeout_s: float = DEFAULT_TIMEOUT_S,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """`measure` on a checkpoint (harness.checkpoints.resolve), with `prompt` tokens of English, under the device lock.

    Every peer reads the same weights, rounded to its dtype. The result also has `checkpoint` and `lock_wait_s`. Raises Infra,
    and Rejected where the checkpoint is damaged.
    """
    source = resolve(checkpoint)
    with tempfile.TemporaryDirectory(prefix="decodegate-bench-") as directory:
        say("exporting the weights")
        try:
            tokens = Source(source).prompts(prompt).text
            exported = export(source, Path(directory), dict.fromkeys(peer.dtype for peer in peers))
        except (EngineError, ReferenceError) as error:
            raise Rejected(f"checkpoint {checkpoint!r} cannot be measured: {error}") from error
        with hold("decodegate bench", timeout=lock_timeout_s) as waited:
            result = measure(peers, exported, tokens, decode=decode, rounds=rounds, allow_busy=allow_busy, say=say)
    return result | {"checkpoint": checkpoint, "lock_wait_s": round(waited, 3)}


def measure(
    peers: Sequence[Peer],
    checkpoints: Mapping[str, Path],
    prompt: Sequence[int],
    *,
    decode: int,
    rounds: int,
    allow_busy: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Ask each peer `rounds` times for `decode` tokens after `prompt`; the first peer is ours, with which the rest is compared.

    `checkpoints`: dtype -> directory. Returns the raw result (JSON types only; reports.bench renders it). A peer that cannot
    run is in `missing` with the reason; ours missing is Infra, and so is a busy machine unless `allow_busy`.
    """
    warnings = require_quiet(allow_busy)
    missing = []
    with ExitStack() as stack:
        running: list[PeerProcess] = []
        for index, peer in enumerate(peers):
            say(f"loading {peer.name}")
            try:
                peer.require()
                process = stack.enter_context(PeerProcess(peer, checkpoints[peer.dtype], PEER_TIMEOUT_S))
                process.ask(prompt[: WARM_UP[0]], WARM_UP[1])
            except Infra as error:
                if index == 0:
                    raise
                missing.append({"name": peer.name, "reason": str(error)})
                continue
            running.append(process)
        samples: list[list[dict[str, Any]]] = [[] for _ in running]
        for number in range(rounds):
            turn = number % len(running)
            for place, index in enumerate([*range(turn, len(running)), *range(turn)]):
                process = running[index]
                say(f"round {number + 1} of {rounds}: {process.peer.name}")
                time.sleep(SETTLE_S)
                sample = process.ask(prompt, decode)
                samples[index].append(
                    {
                        "round": number,
                        "place": place,
                        "prefill_s": sample.prefill_s,
                        "decode_s": sample.decode_s,
                        "prefill_tok_s": len(prompt) / sample.prefill_s,
                        "decode_tok_s": (decode - 1) / sample.decode_s,
                        "foreign_cpu": sample.foreign_cpu,
                        "tokens": sample.tokens,
                    }
                )
    disturbed = [s["foreign_cpu"] for taken in samples for s in taken if s["foreign_cpu"] > QUIET]
    if disturbed:
        warnings.append(
            f"in {len(disturbed)} of {rounds * len(running)} samples others used up to {max(disturbed):.0%} of the machine"
        )
    return {
        "schema": SCHEMA,
        "prompt_tokens": len(prompt),
        "decode_tokens": decode,
        "rounds": rounds,
        "peers": [
            {
                "name": process.peer.name,
                "engine": process.peer.engine,
                "dtype": process.peer.dtype,
                "build": process.peer.build.described() if process.peer.build else None,
                "environment": process.environment,
                "samples": taken,
            }
            for process, taken in zip(running, samples, strict=True)
        ],
        "missing": missing,
        "warnings": warnings,
    }
