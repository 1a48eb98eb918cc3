"""`decodegate bench`: decode and prefill speed of our engine and of its peers, in one run; `bench moe`: its expert products."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decodegate.help import JUDGE, examples
from decodegate.output import writable_file
from harness.outcomes import ExitCode

if TYPE_CHECKING:
    from harness.bench.process import Peer
    from harness.builds import Builds

__all__ = ["register"]

DEFAULT_PEERS = "mlx_lm:bfloat16,mlx_lm:float32,transformers:float32"
MOE = "moe"
MOE_FORMATS = "nvfp4,mxfp8"
ENGINES = ("engine", "mlx_lm", "transformers")
EPILOG = examples(
    'decodegate bench --base HEAD~1 --peers ""',
    "decodegate bench --peer-python ~/venvs/mlx-lm/bin/python --out bench.json",
    "decodegate bench ./my-model --peers transformers:float32 --rounds 8",
    "decodegate bench moe --formats nvfp4,mxfp8",
)


def register(app: typer.Typer) -> None:
    app.command("bench", epilog=EPILOG, rich_help_panel=JUDGE)(command)


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="A directory, a .gguf file, a hub id, or a name that doctor lists; or moe.")
    ] = "smollm2",
    base: Annotated[
        str | None, typer.Option(metavar="REV", help="Measure our engine of this git revision too, in the same rounds.")
    ] = None,
    repo: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Repository that holds our engine. Default: where it lies.")
    ] = None,
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
    paired by round, and `~` marks what shows no difference. A busy machine is refused. With --base the engine of the working
    tree is compared with its own at that revision; exits with 4 where that one could not be measured, and with 75 where none
    of the peers asked for could be, so that nothing was compared.

    `bench moe` times products with quantised experts instead, the engine's mapped gather against MLX's own; --formats,
    --rounds, --busy-ok, --timeout, --out and --json apply.
    """
    from harness.bench import moe
    from harness.bench.run import measure_checkpoint
    from harness.builds import BuildError, Builds, Source
    from harness.lock import hold
    from reports import bench, bench_moe
    from reports.progress import Progress
    from reports.terminal import make_console

    progress = Progress(0, make_console(sys.stderr))
    if checkpoint == MOE:
        if base is not None:
            raise typer.BadParameter("bench moe compares the products of one build with MLX's own", param_hint="--base")
        names = _formats(formats)
        with hold("decodegate bench moe", timeout=timeout) as waited, progress:
            progress.begin("bench moe")
            result = moe.measure(names, rounds=rounds, allow_busy=busy_ok, say=progress.say)
        _show(result | {"lock_wait_s": round(waited, 3)}, result["environment"], bench_moe.table, out, as_json)
        return
    if peer_python is not None and shutil.which(peer_python) is None:
        raise typer.BadParameter(f"{peer_python!r} is no program that can be run", param_hint="--peer-python")
    wanted = [("engine", _dtype(dtype)), *(_peer(word.strip()) for word in peers.split(",") if word.strip())]
    try:
        with Builds(Source.find("engine", repo)) as builds, progress:
            progress.begin(f"bench of {checkpoint}")
            progress.say("making builds")
            chosen = _peers(wanted, builds, base, peer_python or sys.executable)
            result = measure_checkpoint(
                chosen,
                checkpoint,
                prompt=prompt,
                decode=decode,
                rounds=rounds,
                allow_busy=busy_ok,
                lock_timeout_s=timeout,
                say=progress.say,
            )
    except BuildError as error:
        print(f"decodegate bench: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.USAGE) from None
    _show(result, result["peers"][0]["environment"], bench.table, out, as_json)
    for missing in result["missing"]:
        if base is not None and missing["name"] == chosen[1].name:
            print(f"decodegate bench: the base was not measured: {missing['reason']}", file=sys.stderr)
            raise typer.Exit(ExitCode.BASELINE_RED)
    if result["missing"] and len(result["peers"]) == 1:
        print(
            "decodegate bench: nothing was compared, for none of the peers can be run here; the table has the reasons, "
            '--peers "" measures our engine alone',
            file=sys.stderr,
        )
        raise typer.Exit(ExitCode.TEMPORARY)


def _peers(wanted: list[tuple[str, str]], builds: Builds, base: str | None, python: str) -> list[Peer]:
    """Our engine, then itself at the base, then the others in their Python."""
    from harness.bench.process import Peer

    tree = builds.working_tree()
    (engine, dtype), *others = wanted
    chosen = [Peer(engine, dtype, sys.executable, tree)]
    if base is not None:
        made = builds.revision(base)
        chosen.append(Peer(engine, dtype, sys.executable, made, f"{engine}@{made.name}[{dtype}]"))
    return chosen + [Peer(name, dtype, python, tree if name == engine else None) for name, dtype in others]


def _show(
    result: dict[str, Any],
    environment: dict[str, str],
    table: Callable[[dict[str, Any]], str],
    out: Path | None,
    as_json: bool,
) -> None:
    import json
    import shlex
    from dataclasses import asdict

    from harness.provenance import header

    head = header(shlex.join(["decodegate", *sys.argv[1:]]), 0, 0, {"engine": environment})
    head.lock_wait_s = result["lock_wait_s"]
    result["header"] = asdict(head)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result) if as_json else table(result), end="\n" if as_json else "")


def _formats(words: str) -> list[str]:
    from engine.checkpoint.policy import quantisation_format
    from engine.errors import Refused

    names = [name.strip() for name in words.split(",") if name.strip()]
    try:
        for name in names:
            quantisation_format(name)
    except Refused as error:
        raise typer.BadParameter(str(error), param_hint="--formats") from None
    if not names:
        raise typer.BadParameter("name at least one format", param_hint="--formats")
    return names


def _peer(word: str) -> tuple[str, str]:
    engine, _, dtype = word.partition(":")
    if engine not in ENGINES:
        raise typer.BadParameter(f"{word!r} is not ENGINE:DTYPE with engine {', '.join(ENGINES)}", param_hint="--peers")
    return engine, _dtype(dtype or "float32", "--peers")


def _dtype(name: str, option: str = "--dtype") -> str:
    from harness.export import DTYPES

    if name not in DTYPES:
        raise typer.BadParameter(f"dtype {name!r} is none of {', '.join(DTYPES)}", param_hint=option)
    return name
