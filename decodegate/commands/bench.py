"""`decodegate bench`: decode and prefill speed of our engine and of its peers, in one run; `bench moe`: its expert products."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from decodegate.output import writable_file

__all__ = ["register"]

DEFAULT_PEERS = "mlx_lm:bfloat16,mlx_lm:float32,transformers:float32"
MOE = "moe"
MOE_FORMATS = "nvfp4,mxfp8"
ENGINES = ("engine", "mlx_lm", "transformers")


def register(app: typer.Typer) -> None:
    app.command("bench")(command)


def command(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or smollm2; or moe.")] = "smollm2",
    peers: Annotated[
        str, typer.Option(help="What to compare with: ENGINE:DTYPE, comma-separated; empty for none.")
    ] = DEFAULT_PEERS,
    peer_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Python of the environment that has mlx-lm and transformers. Default: this one."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of our engine.")] = "float32",
    prompt: Annotated[int, typer.Option(min=33, max=100_000, help="Prompt tokens.")] = 128,
    decode: Annotated[int, typer.Option(min=2, max=10_000, help="Tokens to decode.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, max=200, help="Interleaved rounds; 6 or more give a 95 % interval.")] = 6,
    busy_ok: Annotated[bool, typer.Option("--busy-ok", help="Measure although other processes use the machine.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the device lock.")] = 900.0,
    formats: Annotated[str, typer.Option(help="bench moe: formats of the experts, comma-separated.")] = MOE_FORMATS,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable_file, help="Write the raw samples as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the raw samples as JSON instead of the table.")] = False,
) -> None:
    """Measure decode and prefill speed against peers: same weights, same machine, interleaved rounds, under the device lock.

    Every peer runs in a process of its own, loads once, and is asked in turn. Medians come with exact intervals, ratios are
    paired by round, and `~` marks what shows no difference. A busy machine is refused.

    `bench moe` times products with quantised experts instead, the engine's mapped gather against MLX's own; --formats,
    --rounds, --busy-ok, --timeout, --out and --json apply.

    Examples:

        decodegate bench moe --formats nvfp4,mxfp8

        decodegate bench --peer-python ~/venvs/mlx-lm/bin/python --out bench.json

        decodegate bench ./my-model --peers transformers:float32 --prompt 512 --rounds 8
    """
    import tempfile
    from dataclasses import asdict

    from rich.console import Console

    from harness.bench import moe
    from harness.bench.process import Peer
    from harness.bench.run import measure
    from harness.checkpoints import resolve
    from harness.export import export
    from harness.lock import hold
    from harness.prompts import Source
    from harness.provenance import header
    from reports import bench_moe
    from reports.bench import table

    if checkpoint == MOE:
        names = [name.strip() for name in formats.split(",") if name.strip()]
        with hold("decodegate bench moe", timeout=timeout) as waited, Console(stderr=True).status("measuring") as status:
            found = moe.measure(_checked(names), rounds=rounds, allow_busy=busy_ok, say=lambda text: status.update(text))
        _show(
            found | {"lock_wait_s": round(waited, 3), "header": asdict(header("bench", 0, 0, {}))},
            bench_moe.table,
            out,
            as_json,
        )
        return
    chosen = [Peer("engine", dtype, sys.executable, Path(__file__).parents[2])]
    chosen += [_peer(word, peer_python or sys.executable) for word in peers.split(",") if word.strip()]
    source = resolve(checkpoint)
    tokens = Source(source).prompts(prompt).text
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="decodegate-bench-") as directory,
        console.status("exporting the weights") as status,
    ):
        directories = export(source, Path(directory), dict.fromkeys(peer.dtype for peer in chosen))
        with hold("decodegate bench", timeout=timeout) as waited:
            result = measure(
                chosen,
                directories,
                tokens,
                decode=decode,
                rounds=rounds,
                allow_busy=busy_ok,
                say=lambda text: status.update(text),
            )
    result |= {"checkpoint": checkpoint, "lock_wait_s": round(waited, 3), "header": asdict(header("bench", 0, 0, {}))}
    _show(result, table, out, as_json)


def _show(result: dict[str, Any], table: Callable[[dict[str, Any]], str], out: Path | None, as_json: bool) -> None:
    import json

    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result) if as_json else table(result), end="\n" if as_json else "")


def _checked(formats: list[str]) -> list[str]:
    from engine.checkpoint.policy import quantisation_format
    from engine.errors import Refused

    try:
        for name in formats:
            quantisation_format(name)
    except Refused as error:
        raise typer.BadParameter(str(error), param_hint="--formats") from None
    if not formats:
        raise typer.BadParameter("name at least one format", param_hint="--formats")
    return formats


def _peer(word: str, python: str):
    from harness.bench.process import Peer
    from harness.export import DTYPES

    engine, _, dtype = word.strip().partition(":")
    if engine not in ENGINES or (dtype or "float32") not in DTYPES:
        raise typer.BadParameter(
            f"{word.strip()!r} is not ENGINE:DTYPE with engine {', '.join(ENGINES)} and dtype {', '.join(DTYPES)}",
            param_hint="--peers",
        )
    return Peer(engine, dtype or "float32", python, Path(__file__).parents[2] if engine == "engine" else None)
