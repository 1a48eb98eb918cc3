"""`decodegate bench`: decode and prefill speed of our engine and of its peers, in one run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from decodegate.output import writable_file

__all__ = ["register"]

DEFAULT_PEERS = "mlx_lm:bfloat16,mlx_lm:float32,transformers:float32"
ENGINES = ("engine", "mlx_lm", "transformers")


def register(app: typer.Typer) -> None:
    app.command("bench")(command)


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="A directory, a .gguf file, a hub id, smollm2, or gemma3-270m.")
    ] = "smollm2",
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
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable_file, help="Write the raw samples as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the raw samples as JSON instead of the table.")] = False,
) -> None:
    """Measure decode and prefill speed against peers: same weights, same machine, interleaved rounds, under the device lock.

    Every peer runs in a process of its own, loads once, and is asked in turn. Medians come with exact intervals, ratios are
    paired by round, and `~` marks what shows no difference. A busy machine is refused.

    Examples:

        decodegate bench --peer-python ~/venvs/mlx-lm/bin/python --out bench.json

        decodegate bench ./my-model --peers transformers:float32 --prompt 512 --rounds 8
    """
    import json
    import tempfile
    from dataclasses import asdict

    from rich.console import Console

    from harness.bench.process import Peer
    from harness.bench.run import measure
    from harness.checkpoints import resolve
    from harness.export import export
    from harness.lock import hold
    from harness.prompts import Source
    from harness.provenance import header
    from reports.bench import table

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
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result) if as_json else table(result), end="\n" if as_json else "")


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
