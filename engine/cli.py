"""What `decodegate generate` does: load, render, prefill, decode, and say how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from engine import blas
from engine.direct import DirectEngine
from engine.errors import EngineError
from engine.prompt.tokenizer import require
from engine.sampling import GREEDY, Sampling

__all__ = ["EmptyPrompt", "Reply", "Request", "generate"]


class EmptyPrompt(EngineError):
    """The prompt has no token, so that there is nothing to go on from."""


@dataclass(frozen=True)
class Request:
    """`chat`: render the prompt as a user's message with the checkpoint's chat template; None: where it has one. `dtype` and
    `quantised`: see engine.checkpoint.load.
    """

    source: str
    prompt: str
    chat: bool | None = None
    max_tokens: int = 256
    sampling: Sampling = GREEDY
    dtype: str | None = None
    quantised: str | None = None


@dataclass
class Reply:
    """`text` is what was streamed. Times in seconds; `decode_s` covers the tokens after prefill."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop" (an end-of-text token) or "length" (the budget)
    prompt_tokens: int
    chat: bool
    seed: int
    dtype: str
    load_s: float
    prefill_s: float
    decode_s: float
    blas: str
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For --json: the fields, and tokens per second."""
        return asdict(self) | {"prefill_tokens_per_s": self.prefill_speed, "decode_tokens_per_s": self.decode_speed}

    @property
    def prefill_speed(self) -> float:
        return self.prompt_tokens / max(self.prefill_s, 1e-9)

    @property
    def decode_speed(self) -> float:
        return len(self.tokens) / max(self.decode_s, 1e-9)

    def summary(self) -> str:
        """The lines for stderr."""
        lines = [f"load {self.load_s:.1f} s · {self.dtype} · BLAS {self.blas}", *self.notes]
        lines.append(
            f"prefill {self.prompt_tokens} tokens, {self.prefill_speed:.1f} tok/s · "
            f"decode {len(self.tokens)} tokens, {self.decode_speed:.1f} tok/s · {self.finish_reason}"
        )
        return "\n".join(lines)


def generate(request: Request, write: Callable[[str], None]) -> Reply:
    """Run one request; `write` gets the text in pieces of whole characters as it comes. Raises EngineError;
    EmptyPrompt where the prompt has no token.
    """
    started = time.perf_counter()
    engine = DirectEngine.load(request.source, dtype=request.dtype, quantised=request.quantised)
    checkpoint = engine.checkpoint
    tokenizer = require(checkpoint.tokenizer)
    chat = request.chat if request.chat is not None else checkpoint.chat_template is not None
    if chat:
        # The template writes BOS and the like itself.
        prompt = checkpoint.template().render([{"role": "user", "content": request.prompt}])
        tokens = tokenizer.encode(prompt, specials=False)
    else:
        tokens = tokenizer.encode(request.prompt)
    if not tokens:
        raise EmptyPrompt("the prompt is empty and the tokenizer puts nothing before a text; give it a word to go on from")
    loaded = time.perf_counter()
    generation = engine.generate(tokens, request.max_tokens, request.sampling)
    prefilled = time.perf_counter()
    pieces, ids = [], []
    for token in generation:
        ids.append(token.id)
        pieces.append(token.text)
        write(token.text)
    tail = generation.tail()
    write(tail)
    return Reply(
        text="".join(pieces) + tail,
        tokens=ids,
        finish_reason=generation.finish_reason or "length",
        prompt_tokens=len(tokens),
        chat=chat,
        seed=generation.sampler.seed,
        dtype=checkpoint.dtype,
        load_s=loaded - started,
        prefill_s=prefilled - loaded,
        decode_s=time.perf_counter() - prefilled,
        blas=blas.describe(),
        notes=checkpoint.notes,
    )
