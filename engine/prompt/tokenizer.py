"""Text to token ids and back: tokenizer.json, or the vocabulary in a GGUF file's metadata (gguf_vocabulary.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers

from engine.errors import CheckpointError, EngineError, Refused
from engine.prompt.detokenizer import Detokenizer, byte_decoder

__all__ = ["Tokenizer"]

MAX_FILE_BYTES = 128 << 20  # vocabularies of 2^18 tokens have 33 MB
MAX_TEXT_BYTES = 64 << 20


@contextlib.contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """The library reports damage as a bare Exception, and some damage as a Rust panic, which is a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {' '.join(str(error).split())[:200]}") from None


class Tokenizer:
    """Wraps a tokenizers.Tokenizer. `prefix`: ids put before a text that is encoded with specials (GGUF's add_bos)."""

    def __init__(self, backend: tokenizers.Tokenizer, *, prefix: Sequence[int] = ()):
        self._backend = backend
        self._prefix = list(prefix)
        added = backend.get_added_tokens_decoder()
        self._literal = {token: entry.content.encode() for token, entry in added.items()}
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        decoder = backend.decoder
        self._to_bytes, self._drops_first_space = byte_decoder(decoder.__getstate__().decode() if decoder else None)
        self.size = 1 + max(max(backend.get_vocab(with_added_tokens=True).values(), default=-1), max(added, default=-1))

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json. Raises CheckpointError (damaged) or Refused (a decoder that cannot stream)."""
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        with _failing_as(f"{path} is no valid tokenizer"):
            backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_padding()
        backend.no_truncation()
        return cls(backend)

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Token ids of `text`. `specials`: add what the tokenizer puts around a text (BOS); a rendered chat brings its own.

        Spellings of special tokens within the text are always one id. Raises EngineError where the text cannot be encoded.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise EngineError(f"the text has a lone surrogate at character {error.start}; pass valid UTF-8") from None
        if size > MAX_TEXT_BYTES:
            raise EngineError(f"the text has {size} bytes, the limit is {MAX_TEXT_BYTES}")
        with _failing_as("the tokenizer cannot encode the text"):
            ids = self._backend.encode(text, add_special_tokens=specials).ids
        return self._prefix + ids if specials else ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        return self._stream(skip_special, self._drops_first_space).all(tokens)

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        """An incremental detokenizer for tokens that continue a text."""
        return self._stream(skip_special, drop_first_space=False)

    def _stream(self, skip_special: bool, drop_first_space: bool) -> Detokenizer:
        skipped = self.special_ids if skip_special else frozenset()
        return Detokenizer(
            lambda token: b"" if token in skipped else self.token_bytes(token), drop_first_space=drop_first_space
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for an id that the vocabulary lacks (padding rows of an embedding)."""
        if token in self._literal:
            return self._literal[token]
        text = self._backend.id_to_token(token)
        return b"" if text is None else self._to_bytes(text)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return self._backend.token_to_id(text)


def require(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or Refused with what to do where the checkpoint has none."""
    if tokenizer is None:
        raise Refused("the checkpoint has no tokenizer.json; put the one of its model beside config.json")
    return tokenizer
