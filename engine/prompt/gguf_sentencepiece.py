"""A tokenizer from GGUF metadata: SentencePiece's BPE (`tokenizer.ggml.model` llama), for Gemma and the first Llamas.

The metadata has pieces with scores: of all neighbours, the two are joined whose piece has the highest score. The tokenizers
library wants merges instead, pairs in order; those are all the ways to cut a piece in two, in the order of the pieces' scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from engine.errors import CheckpointError
from engine.prompt.gguf_metadata import CONTROL, UNKNOWN, USER_DEFINED, bos_prefix, flag, texts, token_types, vocabulary
from engine.prompt.tokenizer import Tokenizer

__all__ = ["from_gguf"]

MAX_PIECE = 256  # characters; Gemma's longest has 48. The ways to cut a piece grow with the square of it
_SPACE = "▁"
_BYTE = 6  # tokenizer.ggml.token_type
_JOINED = (1, USER_DEFINED, 5)  # normal, user-defined, unused: what neighbours may become


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises CheckpointError, which names the key and value."""
    tokens = texts(metadata, "tokens")
    types = token_types(metadata, tokens)
    ids = vocabulary(tokens)
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(type(score) is float for score in scores):
        raise CheckpointError(f"tokenizer.ggml.scores must have one number for each of the {len(tokens)} tokens")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    named = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None and type(named) is int and 0 <= named < len(tokens):
        unknown = tokens[named]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    begins_with_space = flag(metadata, "add_space_prefix", True)
    replaced = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced] if begins_with_space else [replaced])
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts + ([decoders.Strip(" ", 1, 0)] if begins_with_space else []))
    # Whole wherever they stand in a text; runs of spaces are among them, so they are looked for before spaces are replaced.
    whole = [
        (token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    backend.add_tokens([AddedToken(token, special=kind != USER_DEFINED, normalized=False) for token, kind in whole])
    return Tokenizer(backend, prefix=bos_prefix(metadata, len(tokens), True))


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    joined = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in _JOINED}
    merges = []
    for index in sorted(joined.values(), key=lambda index: -scores[index]):  # stable: equal scores in the order of ids
        piece = tokens[index]
        if len(piece) > MAX_PIECE:
            raise CheckpointError(
                f"tokenizer.ggml.tokens has a piece of {len(piece)} characters, the limit is {MAX_PIECE} ({piece[:40]!r})"
            )
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        cuts = [(left, right) for left, right in cuts if left in joined and right in joined]
        merges += sorted(cuts, key=lambda cut: (joined[cut[0]], joined[cut[1]])) if len(cuts) > 1 else cuts
    return merges
