"""The keys `tokenizer.ggml.*` of a GGUF file's metadata, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import CheckpointError

__all__ = ["CONTROL", "UNKNOWN", "USER_DEFINED", "bos_prefix", "flag", "texts", "token_types", "vocabulary"]

MAX_TOKENS = 1 << 20
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


def texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    """A list of texts. Raises CheckpointError, as all here do."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if (
        not isinstance(values, list)
        or not 1 <= len(values) <= MAX_TOKENS
        or not all(isinstance(value, str) for value in values)
    ):
        raise CheckpointError(f"tokenizer.ggml.{name} must be a list of 1 to {MAX_TOKENS} texts")
    return values


def token_types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """One for each token; all normal where the file does not say."""
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type must have one entry for each of the {len(tokens)} tokens")
    return types


def vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """token -> id; each is there once."""
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise CheckpointError(f"tokenizer.ggml.tokens has {twice[:40]!r} twice")
    return ids


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise CheckpointError(f"tokenizer.ggml.{name} must be true or false (got {value!r:.80})")
    return value


def bos_prefix(metadata: Mapping[str, Any], tokens: int, default: bool) -> list[int]:
    """What a text starts with: BOS, where `add_bos_token` says so or, where the file does not say, `default`."""
    if not flag(metadata, "add_bos_token", default):
        return []
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if type(bos) is not int or not 0 <= bos < tokens:
        raise CheckpointError(f"tokenizer.ggml.bos_token_id {bos!r} must be 0 to {tokens - 1}, because texts start with it")
    return [bos]
