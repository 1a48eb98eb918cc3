"""Token ids to text, one at a time: text is emitted as soon as its bytes are whole UTF-8, and never before."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from engine.errors import Refused

__all__ = ["Detokenizer", "byte_decoder"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE = "▁"  # SentencePiece's mark of a space


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2): itself, or the next one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    # A character outside the alphabet is literal text: an entry that was put into the vocabulary by hand.
    return b"".join(bytes([_BYTE_LEVEL[c]]) if c in _BYTE_LEVEL else c.encode() for c in token)


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.match(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def byte_decoder(decoder: str | None) -> tuple[Callable[[str], bytes], bool]:
    """From a tokenizer.json `decoder` (JSON text): token -> bytes, and whether a text's first space is dropped.

    Byte-level BPE and SentencePiece-like decoders are supported. Raises Refused, which names the other.
    """
    parsed: Any = json.loads(decoder) if decoder else None
    parts = [] if parsed is None else parsed.get("decoders", []) if parsed["type"] == "Sequence" else [parsed]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level, False
    replaced = [(part["pattern"].get("String"), part["content"]) for part in parts if part["type"] == "Replace"]
    known = kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not kinds or not known or any(pair != (_SPACE, " ") for pair in replaced):
        raise Refused(
            f"tokenizer decoder {'+'.join(sorted(kinds)) or 'null'} is not supported (ByteLevel, Metaspace and "
            "Replace+ByteFallback+Fuse+Strip are); use a checkpoint with a byte-level or SentencePiece tokenizer.json"
        )
    strips = any(part["type"] == "Strip" and part.get("start") for part in parts)
    strips |= any(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in parts)
    return _sentencepiece, strips


class Detokenizer:
    """Incremental: `feed(id)` returns the text that became whole, `flush()` what is left at the end.

    Incomplete trailing bytes are held; bytes that cannot become UTF-8 are U+FFFD as soon as that is certain.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, drop_first_space: bool = False):
        self._token_bytes = token_bytes
        self._drop_first_space = drop_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        data = self._token_bytes(token)
        if data and self._drop_first_space:
            self._drop_first_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def all(self, tokens: Iterable[int]) -> str:
        return "".join(map(self.feed, tokens)) + self.flush()
