"""A tokenizer from GGUF metadata: byte-level BPE (`tokenizer.ggml.model` gpt2), or SentencePiece (gguf_sentencepiece.py).

The metadata names its pre-tokenizer only (`tokenizer.ggml.pre`); the expressions that a name stands for are llama.cpp's
(src/llama-vocab.cpp) and the published tokenizer.json files'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from engine.errors import CheckpointError, Refused
from engine.prompt import gguf_sentencepiece
from engine.prompt.gguf_metadata import CONTROL, UNKNOWN, USER_DEFINED, bos_prefix, texts, token_types, vocabulary
from engine.prompt.tokenizer import Tokenizer

__all__ = ["from_gguf"]

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


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises CheckpointError (damaged metadata) or Refused (another model or pre-tokenizer), which names the key and value."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "llama":
        return gguf_sentencepiece.from_gguf(metadata)
    if model != "gpt2":
        raise Refused(
            f"tokenizer.ggml.model {str(model)[:40]!r} is not supported in GGUF files (gpt2 and llama are); "
            "use the safetensors checkpoint with its tokenizer.json"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise Refused(
            f"tokenizer.ggml.pre {str(pre)[:40]!r} is not known (known: {', '.join(PRE_TOKENIZERS)}); "
            "use the safetensors checkpoint with its tokenizer.json"
        )
    tokens, merges = texts(metadata, "tokens"), texts(metadata, "merges")
    types = token_types(metadata, tokens)
    backend = tokenizers.Tokenizer(_bpe(vocabulary(tokens), merges, pre in _WHOLE_PIECES_AND_BOS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    for index, kind in enumerate(types):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and tokens[index]:
            backend.add_tokens([AddedToken(tokens[index], special=kind != USER_DEFINED, normalized=False)])
    return Tokenizer(backend, prefix=bos_prefix(metadata, len(tokens), pre in _WHOLE_PIECES_AND_BOS))


def _bpe(ids: dict[str, int], merges: list[str], whole_pieces: bool) -> models.BPE:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not all(part in ids for part in (*pair, "".join(pair))):
            raise CheckpointError(f"tokenizer.ggml.merges has {merge[:40]!r}, which does not join two tokens to a third")
    return models.BPE(vocab=ids, merges=pairs, ignore_merges=whole_pieces)  # type: ignore[arg-type]
