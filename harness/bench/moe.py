"""Products with experts: the engine's mapped gather against MLX's own, in one process, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from harness.bench.quiet import require_quiet

__all__ = ["BASELINE", "SCHEMA", "measure"]

SCHEMA = 1
BASELINE = "mx.gather_qmm"
PACKED, UNPACKED = "mapped, packed weights", "mapped, unpacked weights"


def measure(
    formats: Sequence[str],
    *,
    rows: int = 512,
    experts: int = 16,
    top_k: int = 4,
    hidden: int = 512,
    rounds: int = 6,
    allow_busy: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time one product of `rows` tokens with `top_k` of `experts` matrices [hidden, hidden] each, in each format.

    A contender gets tokens and choices; sorting and grouping count. Returns the raw result (JSON types; reports.bench_moe
    renders it): samples in seconds, and each contender's largest difference from the product of unpacked float64 values.
    A busy machine is Infra unless `allow_busy`.
    """
    from engine import blas

    blas.bind()
    import mlx.core as mx

    warnings = require_quiet(allow_busy)
    found = [_format(name, rows=rows, experts=experts, top_k=top_k, hidden=hidden, rounds=rounds, say=say) for name in formats]
    environment = {"mlx": metadata.version("mlx"), "device": str(mx.default_device()), "blas": blas.describe()}
    shape = {"rows": rows, "experts": experts, "top_k": top_k, "hidden": hidden, "rounds": rounds}
    return {"schema": SCHEMA, **shape, "environment": environment, "formats": found, "warnings": warnings}


def _format(
    name: str, *, rows: int, experts: int, top_k: int, hidden: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    import mlx.core as mx
    import numpy as np

    from engine.checkpoint.pack import quantised
    from engine.checkpoint.policy import quantisation_format
    from engine.layers.moe import BlockMap, moe_gather_qmm_mapped

    random = np.random.default_rng(0)
    weight = quantised(mx.array(random.normal(size=(experts, hidden, hidden)).astype(np.float32)), quantisation_format(name))
    values = weight.unpack()
    x = mx.array(random.normal(size=(rows, hidden)).astype(np.float32))
    ids = mx.array(random.random((rows, experts)).argsort(axis=1)[:, :top_k].astype(np.int32))
    mx.eval(x, ids, values, weight.arrays())
    path = BlockMap(ids, experts, hidden * hidden).path

    def mapped(held: Any) -> mx.array:
        blocks = BlockMap(ids, experts, hidden * hidden)
        return blocks.scatter(moe_gather_qmm_mapped(blocks.gather(x), held, blocks))

    def gather_qmm() -> mx.array:
        order = mx.argsort(ids.reshape(-1))
        out = mx.gather_qmm(
            x[order // top_k][:, None],
            weight.weight,
            weight.scales,
            weight.biases,
            rhs_indices=ids.reshape(-1)[order],
            transpose=True,
            group_size=weight.group_size,
            bits=weight.bits,
            mode=weight.mode,
            sorted_indices=True,
        )
        return out.squeeze(1)[mx.argsort(order)].reshape(rows, top_k, -1)

    contenders = {BASELINE: gather_qmm, PACKED: lambda: mapped(weight), UNPACKED: lambda: mapped(values)}
    wide, chosen = np.array(values, np.float64), np.array(ids)
    expected = np.stack([np.array(x, np.float64)[row] @ wide[chosen[row]].swapaxes(-1, -2) for row in range(rows)])
    errors = {}
    for contender, run in contenders.items():
        say(f"{name}: warming {contender}")
        errors[contender] = float(np.abs(np.array(run()) - expected).max())
    samples: dict[str, list[float]] = {contender: [] for contender in contenders}
    names = list(contenders)
    for number in range(rounds):
        say(f"{name}: round {number + 1} of {rounds}")
        turn = number % len(names)
        for contender in names[turn:] + names[:turn]:
            start = time.perf_counter()
            mx.eval(contenders[contender]())
            samples[contender].append(time.perf_counter() - start)
    return {"format": name, "path": path, "samples": samples, "largest_error": errors, "largest": float(np.abs(expected).max())}
