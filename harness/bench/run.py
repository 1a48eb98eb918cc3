"""The benchmark: every peer loads once, then rounds in which each is asked in turn, the order rotated, all raw samples kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.bench.process import Peer, PeerProcess, busy_fraction
from harness.outcomes import Infra

__all__ = ["SCHEMA", "measure"]

SCHEMA = 1
QUIET = 0.15  # share of the cores that others may use before a round; an idle desktop has 0.02 to 0.08
SETTLE_S = 0.3  # BLAS threads of the peer before spin for up to 0.2 s after their last work
WARM_UP = (32, 8)  # prompt and decode tokens of a request that is not kept
PEER_TIMEOUT_S = 600.0


def measure(
    peers: Sequence[Peer],
    checkpoints: dict[str, Path],
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
    warnings = []
    busy = busy_fraction()
    if busy > QUIET:
        text = f"other processes use {busy:.0%} of the machine; figures would not be comparable"
        if not allow_busy:
            raise Infra(f"{text}. Wait or end them, or measure all the same with --busy-ok")
        warnings.append(text)
    missing = []
    with ExitStack() as stack:
        running: list[PeerProcess] = []
        for peer in peers:
            say(f"loading {peer.name}")
            try:
                peer.require()
                process = stack.enter_context(PeerProcess(peer, checkpoints[peer.dtype], PEER_TIMEOUT_S))
                process.ask(prompt[: WARM_UP[0]], WARM_UP[1])
            except Infra as error:
                if peer == peers[0]:
                    raise
                missing.append({"name": peer.name, "reason": str(error)})
                continue
            running.append(process)
        samples: dict[str, list[dict[str, Any]]] = {process.peer.name: [] for process in running}
        for number in range(rounds):
            turn = number % len(running)
            for place, process in enumerate(running[turn:] + running[:turn]):
                say(f"round {number + 1} of {rounds}: {process.peer.name}")
                time.sleep(SETTLE_S)
                sample = process.ask(prompt, decode)
                samples[process.peer.name].append(
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
        found = [
            {
                "name": process.peer.name,
                "engine": process.peer.engine,
                "dtype": process.peer.dtype,
                "environment": process.environment,
                "samples": samples[process.peer.name],
            }
            for process in running
        ]
    disturbed = [s["foreign_cpu"] for peer_samples in samples.values() for s in peer_samples if s["foreign_cpu"] > QUIET]
    if disturbed:
        warnings.append(
            f"in {len(disturbed)} of {rounds * len(found)} samples others used up to {max(disturbed):.0%} of the machine"
        )
    return {
        "schema": SCHEMA,
        "prompt_tokens": len(prompt),
        "decode_tokens": decode,
        "rounds": rounds,
        "peers": found,
        "missing": missing,
        "warnings": warnings,
    }
