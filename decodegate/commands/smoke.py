"""`decodegate smoke CHECKPOINT`: a real checkpoint answers a question and is compared with the reference."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decodegate.help import JUDGE, examples
from decodegate.output import writable_file

if TYPE_CHECKING:
    from harness.records import Record
    from harness.smoke import Result

__all__ = ["register"]
EPILOG = examples(
    "decodegate smoke",
    "decodegate smoke ./SmolLM2-360M-Instruct --dtype bfloat16",
    "decodegate smoke ./my-model --target mlx_lm --out smoke.jsonl",
)


def register(app: typer.Typer) -> None:
    app.command("smoke", epilog=EPILOG, rich_help_panel=JUDGE)(command)


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="A directory, a .gguf file, a hub id, or a name that doctor lists: smollm2.")
    ] = "smollm2",
    target: Annotated[str, typer.Option(help="Target to judge: a known name or module:Class.")] = "engine",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that a cell may take.")] = 300.0,
    lock_timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the device lock.")] = 900.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable_file, help="Write a record file, as gate.jsonl is.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON lines instead.")] = False,
) -> None:
    """Load a real checkpoint, let it answer a question, and compare its logits with the reference on real text.

    Greedy answer of 96 tokens with text, speed and memory; incremental and chunked logits over 257 tokens of English
    (error ratio, KL, top-1); two runs that must be identical. Runs in a worker process under the device lock, and needs no
    network for a checkpoint that is there.
    """
    from harness.cells import DTYPES
    from harness.outcomes import exit_code
    from harness.provenance import header
    from harness.records import Writer, encode
    from harness.smoke import CHECKS, Smoke, run
    from harness.targets import TargetError, resolve
    from reports.progress import Progress
    from reports.terminal import make_console

    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")
    try:
        name = resolve(target).name
    except TargetError as error:
        raise typer.BadParameter(str(error), param_hint="--target") from None

    with Progress(len(CHECKS), make_console(sys.stderr), headlines=False) as progress:
        progress.begin(f"smoke of {checkpoint} in {dtype}")
        result = run(
            Smoke(checkpoint, target, dtype, timeout_s=timeout, lock_timeout_s=lock_timeout), progress.finish, say=progress.say
        )
    if result.stopped:
        print(f"decodegate smoke: {result.records[0].outcome}: {result.stopped}", file=sys.stderr)
    for record in result.records if as_json or not result.stopped else []:
        print(encode(record) if as_json else _text(record))
    if not as_json and not result.stopped:
        print(_footer(result))
    if out is not None:
        head = header(f"smoke {checkpoint}", 0, len(CHECKS), {name: result.environment})
        head.lock_wait_s = result.lock_wait_s or 0.0
        writer = Writer(out, head)
        for record in result.records:
            writer.write(record)
        writer.close()
    raise typer.Exit(int(exit_code(record.outcome for record in result.records)))


def _text(record: Record) -> str:
    from reports.ratios import facts

    lines = [f"{record.outcome.upper():<7} {record.cell}  ({record.duration_s:.1f} s)"]
    words = [f"{count} {word}" for word, count in record.verdicts.items()]
    if numbers := [*map(str, facts(record)), *words]:
        lines.append(f"        {' · '.join(numbers)}")
    lines += textwrap.wrap(record.message, 120, initial_indent=" " * 8, subsequent_indent=" " * 8)
    if record.extra.get("answer"):
        lines += ["", *textwrap.wrap(record.extra["answer"], 112, initial_indent="    | ", subsequent_indent="    | "), ""]
    return "\n".join(lines)


def _footer(result: Result) -> str:
    wait = "not reached" if result.lock_wait_s is None else f"waited {result.lock_wait_s:.1f} s for it"
    facts = [f"{key} {value}" for key, value in result.environment.items()]
    return ", ".join([*facts, f"device lock: {wait}"])
