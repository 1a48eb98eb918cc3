"""`decodegate generate`: text from a checkpoint, streamed."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from decodegate.help import USE, examples
from decodegate.output import reader_is_gone
from harness.outcomes import ExitCode

EPILOG = examples(
    'decodegate generate smollm2 "Why is the sky blue?"',
    'decodegate generate ./checkpoint "Once upon a time" --no-chat --max-tokens 64',
    'decodegate generate owner/name "A haiku, please." --temperature 0.8 --seed 7',
    'echo "Translate: good morning" | decodegate generate ./checkpoint - --json',
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG, rich_help_panel=USE)(generate)


def generate(
    checkpoint: Annotated[
        str,
        typer.Argument(help="Directory with config.json and safetensors, a GGUF file, a hub id, or a name that doctor lists."),
    ],
    prompt: Annotated[
        str, typer.Argument(help="The user's message, or the text to go on from with --no-chat; - reads it from stdin.")
    ],
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template (default: where the checkpoint has one).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=0, max=1_000_000, help="Stop after so many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the most likely tokens that together have this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: by device).")] = None,
    quantised: Annotated[
        str | None, typer.Option(help="Hold quantised weights packed or unpacked (default: what is faster, measured at load).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of streamed text.")] = False,
) -> None:
    """Generate text with the engine. The text goes to stdout, speeds and notes to stderr."""
    from engine.checkpoint.read import COMPUTE_DTYPES
    from engine.cli import EmptyPrompt, Request
    from engine.cli import generate as run
    from engine.errors import EngineError
    from engine.sampling import Sampling
    from harness.checkpoints import resolve

    try:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if dtype not in (None, *COMPUTE_DTYPES):
        raise typer.BadParameter(f"dtype must be one of {', '.join(COMPUTE_DTYPES)} (got {dtype!r})")
    text = sys.stdin.read() if prompt == "-" else prompt
    request = Request(str(resolve(checkpoint)), text, chat, max_tokens, sampling, dtype, quantised)
    try:
        reply = run(request, (lambda _: None) if as_json else _write)
    except EngineError as error:
        print(f"decodegate generate: {error}", file=sys.stderr)
        raise typer.Exit(int(ExitCode.USAGE if isinstance(error, EmptyPrompt) else ExitCode.WRONG)) from None
    if as_json:
        print(json.dumps(reply.as_dict()))
    else:
        print(flush=True)
        print(reply.summary(), file=sys.stderr)


def _write(text: str) -> None:
    # A terminal of another encoding gets replacement characters, not an exception in the middle of a reply.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()
    if reader_is_gone(sys.stdout):
        raise typer.Exit(int(ExitCode.OK))  # nobody reads the rest
