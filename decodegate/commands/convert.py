"""`decodegate convert`: a checkpoint into a quantised one."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from decodegate.help import USE, examples
from decodegate.output import writable_directory
from harness.outcomes import ExitCode

EPILOG = examples(
    "decodegate convert ./nemotron ./packed --mode nvfp4 --layout modelopt",
    "decodegate convert owner/name ./name-mxfp8 --mode mxfp8",
    "decodegate convert ./llama ./llama-4bit --mode affine4 --group-size 32",
)


def register(app: typer.Typer) -> None:
    app.command("convert", epilog=EPILOG, rich_help_panel=USE)(command)


def command(
    source: Annotated[str, typer.Argument(help="Directory with config.json and plain safetensors, or a hub id.")],
    out: Annotated[Path, typer.Argument(callback=writable_directory, help="Directory to write; new or empty.")],
    mode: Annotated[str, typer.Option(help="nvfp4, mxfp4, mxfp8, or affine with 2, 3, 4, 5, 6 or 8 bits: affine4.")] = "nvfp4",
    layout: Annotated[
        str, typer.Option(help="Names in the files: mlx, modelopt (nvfp4, mxfp8), or gpt-oss (its experts in mxfp4).")
    ] = "mlx",
    policy: Annotated[
        str | None,
        typer.Option(
            help="uniform: every linear map, expert and embedding; nemotron: 8 bits for attention, embeddings, head and some "
            "projections. Default: by family."
        ),
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Values that share a scale, for affine: 32, 64 or 128.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the summary.")] = False,
) -> None:
    """Write a quantised copy of a checkpoint: routers, convolutions, norms and what does not fit groups stay as they are."""
    from engine.checkpoint.convert import convert
    from engine.checkpoint.pack import LAYOUTS, require_mode
    from engine.checkpoint.policy import POLICIES, quantisation_format
    from engine.errors import EngineError, Refused
    from harness.checkpoints import resolve

    if layout not in LAYOUTS:
        raise typer.BadParameter(f"{layout!r} is none of {', '.join(LAYOUTS)}", param_hint="--layout")
    if policy not in (None, *POLICIES):
        raise typer.BadParameter(f"{policy!r} is none of {', '.join(POLICIES)}", param_hint="--policy")
    try:
        form = quantisation_format(mode, group_size)
        require_mode(layout, form)
    except Refused as error:
        raise typer.BadParameter(str(error), param_hint="--mode, --group-size, --layout") from None
    if any(out.iterdir()):
        raise typer.BadParameter(f"{str(out)!r} is no empty directory; name another, or remove it", param_hint="OUT")
    checkpoint = resolve(source)
    if not checkpoint.is_dir():
        kind = "GGUF file" if checkpoint.suffix == ".gguf" else "file"
        said = f"{source!r} is a {kind}; convert reads a directory of plain safetensors or a hub id"
        raise typer.BadParameter(said, param_hint="SOURCE")
    try:
        done = convert(checkpoint, out, mode=mode, layout=layout, policy=policy, group_size=group_size)
    except EngineError as error:
        print(f"decodegate convert: {error}", file=sys.stderr)
        raise typer.Exit(int(ExitCode.WRONG)) from None
    formats = Counter(f"{form.mode} {form.bits} bit, groups of {form.group_size}" for form in done.formats.values())
    if as_json:
        found = {"formats": formats, "plain": done.plain, "unaligned": done.unaligned}
        print(json.dumps(found | {"bytes_before": done.bytes_before, "bytes_after": done.bytes_after}))
        return
    for name, count in formats.most_common():
        print(f"{count} matrices in {name}")
    print(f"{len(done.plain)} matrices as they were, and {len(done.unaligned)} whose rows are no whole groups")
    print(f"{done.bytes_before:,} bytes of tensors became {done.bytes_after:,} in {out}")
