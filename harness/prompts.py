"""Real prompts for real checkpoints: our English text and one question in the checkpoint's chat template, as token ids.

Tokenizer and template are the engine's; every target is fed the same ids, so that a target is judged by what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.replay import Plan
from harness.schedule import Schedule
from harness.text import ENGLISH, QUESTION
from harness.tokens import TokenStream, special_ids
from reference_models import model_type

if TYPE_CHECKING:
    from engine.prompt.tokenizer import Tokenizer

__all__ = ["CHAT", "TEXT", "Prompts", "Source"]

CHAT, TEXT = "chat", "text"  # names of the sequences


@dataclass(frozen=True)
class Prompts:
    """`chat`: the question, ready for an answer. `text`: our English. `notes`: what is not as one would expect."""

    chat: tuple[int, ...]
    text: tuple[int, ...]
    notes: tuple[str, ...]

    def plan(self, schedule: Schedule, vocab: int) -> Plan:
        """The plan that feeds these prompts."""
        return Plan(schedule, 0, vocab, fixed={CHAT: self.chat, TEXT: self.text})


class Source:
    """A checkpoint as far as prompts need it: no weights are read. Raises engine.errors.EngineError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_gguf = path.is_file()

    @cached_property
    def _metadata(self) -> Mapping[str, Any]:
        from engine.checkpoint.bounded import MAX_CONFIG_BYTES, read_json
        from engine.checkpoint.gguf_header import read_header

        return read_header(self.path).metadata if self.is_gguf else read_json(self.path / "config.json", MAX_CONFIG_BYTES)

    @property
    def family(self) -> str:
        """As its files name it; `unknown` where they do not."""
        if self.is_gguf:
            return str(self._metadata.get("general.architecture", "unknown")).replace("-", "_")
        try:
            return model_type(self._metadata).replace("-", "_")
        except ValueError:  # whoever loads it, or recomputes it, says what is missing
            return "unknown"

    @property
    def context(self) -> int | None:
        """Tokens that the model was made for, where the checkpoint says so."""
        return self._integer("context_length" if self.is_gguf else "max_position_embeddings", 1 << 30)

    @property
    def window(self) -> int | None:
        """Tokens of a sliding window, where some layer may have one."""
        return self._integer("attention.sliding_window" if self.is_gguf else "sliding_window", 1 << 30)

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        size = self._integer("vocab_size", 1 << 24)
        if size is not None:
            return size
        return self.tokenizer.size if self.tokenizer is not None else 0

    def _integer(self, name: str, most: int) -> int | None:
        """A field of config.json (of its text model), or of the metadata's architecture; None where it is not given.

        Raises ConfigError.
        """
        from engine.fields import Fields

        fields = Fields(self._metadata)
        if self.is_gguf:
            return fields.integer(f"{str(self._metadata.get('general.architecture'))[:80]}.{name}", 1, most, None)
        if fields.has("text_config"):
            fields = fields.section("text_config")
        return fields.integer(name, 1, most, None)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        from engine.prompt.gguf_vocabulary import from_gguf
        from engine.prompt.tokenizer import Tokenizer

        if self.is_gguf:
            return from_gguf(self._metadata)
        file = self.path / "tokenizer.json"
        return Tokenizer.from_file(file) if file.is_file() else None

    @cached_property
    def template(self) -> str | None:
        from engine.checkpoint.directory import chat_template

        if not self.is_gguf:
            return chat_template(self.path)
        value = self._metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def prompts(self, tokens: int, seed: int = 0) -> Prompts:
        """`text` has `tokens` tokens. Without a tokenizer both are random tokens, and a note says so."""
        from engine.errors import CheckpointError

        if self.tokenizer is None:
            try:
                stream = TokenStream(seed, self.vocab, special_ids(self._metadata))
            except ValueError as error:
                raise CheckpointError(f"{self.path.name} has no tokenizer, and {error}") from None
            note = "no tokenizer: prompts are random tokens"
            return Prompts(tuple(stream.tokens(CHAT, 0, range(32))), tuple(stream.tokens(TEXT, 0, range(tokens))), (note,))
        notes: list[str] = []
        text = self.tokenizer.encode(ENGLISH)
        chat = self._chat(notes)
        if not text or not chat:
            raise CheckpointError(f"the tokenizer of {self.path.name} makes no token of a text; is it the model's own?")
        if max(*text, *chat) >= self.vocab:
            raise CheckpointError(
                f"the tokenizer of {self.path.name} gives token {max(*text, *chat)}, the model has {self.vocab}; "
                "do they belong together?"
            )
        if len(text) < tokens:
            notes.append(f"the text has {len(text)} tokens in this vocabulary and is repeated")
        return Prompts(tuple(chat), tuple((text * (tokens // len(text) + 1))[:tokens]), tuple(notes))

    def _chat(self, notes: list[str]) -> list[int]:
        from engine.prompt.template import ChatTemplate

        assert self.tokenizer is not None
        if self.template is None:
            notes.append("no chat template: the question is put as plain text")
            return self.tokenizer.encode(QUESTION)
        rendered = ChatTemplate(self.template, self._special_texts()).render([{"role": "user", "content": QUESTION}])
        return self.tokenizer.encode(rendered, specials=False)

    def _special_texts(self) -> dict[str, str]:
        """bos_token and the like, which templates may write."""
        from engine.checkpoint.bounded import read_json

        assert self.tokenizer is not None
        if self.is_gguf:
            ids = {name: self._metadata.get(f"tokenizer.ggml.{name}_id") for name in ("bos_token", "eos_token")}
            return {name: self.tokenizer.decode([value]) for name, value in ids.items() if isinstance(value, int)}
        file = self.path / "tokenizer_config.json"
        config = read_json(file) if file.is_file() else {}
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = config.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[name] = value
        return found
