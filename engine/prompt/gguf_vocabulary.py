"""A tokenizer from GGUF metadata: byte-level BPE (`tokenizer.ggml.model` gpt2).

The metadata names its pre-tokenizer only (`tokenizer.ggml.pre`); the expressions that a name stands for are llama.cpp's
(src/llama-vocab.cpp) and the published tokenizer.json files'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from engine.errors import CheckpointError, Refused
from engine.prompt.tokenizer import Tokenizer

__all__ = ["from_gguf"]

MAX_TOKENS = 1 << 20
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    "default": _DEFAULT,
}
# A piece that is a token as it stands is not built up by merges, and a text starts with BOS unless the file says otherwise.
_WHOLE_PIECES_AND_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3"})

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises CheckpointError (damaged metadata) or Refused (another model or pre-tokenizer), which names the key and value."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise Refused(
            f"tokenizer.ggml.model {str(model)[:40]!r} is not supported in GGUF files (gpt2, byte-level BPE, is); "
            "use the safetensors checkpoint with its tokenizer.json"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise Refused(
            f"tokenizer.ggml.pre {str(pre)[:40]!r} is not known (known: {', '.join(PRE_TOKENIZERS)}); "
            "use the safetensors checkpoint with its tokenizer.json"
        )
    tokens, merges = _texts(metadata, "tokens"), _texts(metadata, "merges")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type must have one entry for each of the {len(tokens)} tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise CheckpointError(f"tokenizer.ggml.tokens has {twice[:40]!r} twice")
    backend = tokenizers.Tokenizer(_bpe(vocabulary, merges, pre in _WHOLE_PIECES_AND_BOS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    for index, kind in enumerate(types):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and tokens[index]:
            backend.add_tokens([AddedToken(tokens[index], special=kind != _USER_DEFINED, normalized=False)])
    prefix = []
    if metadata.get("tokenizer.ggml.add_bos_token", pre in _WHOLE_PIECES_AND_BOS):
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        if type(bos) is not int or not 0 <= bos < len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.bos_token_id {bos!r} must be 0 to {len(tokens) - 1}, because texts start with it"
            )
        prefix = [bos]
    return Tokenizer(backend, prefix=prefix)


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if (
        not isinstance(values, list)
        or not 1 <= len(values) <= MAX_TOKENS
        or not all(isinstance(value, str) for value in values)
    ):
        raise CheckpointError(f"tokenizer.ggml.{name} must be a list of 1 to {MAX_TOKENS} texts")
    return values


def _bpe(vocabulary: dict[str, int], merges: list[str], whole_pieces: bool) -> models.BPE:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not all(part in vocabulary for part in (*pair, "".join(pair))):
            raise CheckpointError(f"tokenizer.ggml.merges has {merge[:40]!r}, which does not join two tokens to a third")
    return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_pieces)  # type: ignore[arg-type]
