"""A checkpoint (directory, GGUF file or hub id) to weights, config, tokenizer and template; strict, bounded, in this order:

small files -> family's config -> headers of all tensors -> accounting -> and only then weights, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import models
from engine.checkpoint import directory, gguf_convert, gguf_header, hub
from engine.checkpoint.bounded import MAX_CONFIG_BYTES, one_line, read_json, shown
from engine.checkpoint.plan import read_plan
from engine.checkpoint.read import COMPUTE_DTYPES, GGUF_DTYPES
from engine.checkpoint.weights import completed, read_weights
from engine.errors import CheckpointError, ConfigError, Refused
from engine.layers.quantised import Weight
from engine.prompt import gguf_vocabulary
from engine.prompt.template import ChatTemplate
from engine.prompt.tokenizer import Tokenizer

__all__ = ["Checkpoint", "load", "model_type_of"]


@dataclass
class Checkpoint:
    """A loaded checkpoint. `weights`: the family's parameter names -> arrays in `dtype` or quantised tensors, evaluated."""

    model_type: str
    config: Any  # the family's Config
    raw_config: dict[str, Any]  # config.json, or what a GGUF file's metadata says in its spelling
    weights: dict[str, Weight] = field(repr=False)
    dtype: str
    tokenizer: Tokenizer | None
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, ...: what templates know them as
    eos_token_ids: frozenset[int]
    source: str
    notes: list[str]  # what was chosen and why, one line each

    def template(self) -> ChatTemplate:
        """The compiled chat template. Raises Refused where the checkpoint has none, TemplateError where it does not compile."""
        if self.chat_template is None:
            raise Refused("the checkpoint has no chat template; pass a plain prompt (--no-chat)")
        return ChatTemplate(self.chat_template, self.special_tokens)


def load(source: str | Path, *, dtype: str | None = None, quantised: str | None = None) -> Checkpoint:
    """Load a directory with config.json and safetensors, a GGUF file (architectures llama and gemma3), or a hub id.

    dtype: "float32", "bfloat16" or "float16"; None chooses by device. quantised: "packed" or "unpacked" weights; None or
    "auto" keeps what is faster (engine.checkpoint.residency; GGUF blocks are always unpacked). Every tensor of the files is
    used exactly once and none is missing, with the shapes that the config says; this is checked on headers before weights are
    allocated.
    Raises CheckpointError, ConfigError, Refused, or HubUnavailable (no network, unknown id).
    """
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise Refused(f"dtype {shown(dtype)} is not supported (supported: {', '.join(COMPUTE_DTYPES)})")
    path = Path(source)
    try:
        exists = path.exists()
    except OSError as error:
        raise CheckpointError(f"cannot look at {shown(str(source), 200)}: {one_line(error.strerror)}") from None
    if not exists:
        if path.suffix in (".gguf", ".safetensors") or not hub.is_hub_id(str(source)):
            raise CheckpointError(f"{shown(str(source), 200)} is no file or directory, and no hub id (owner/name)")
        return _load_directory(hub.snapshot(str(source)), str(source), dtype, quantised)
    if path.is_dir():
        return _load_directory(path, str(source), dtype, quantised)
    if path.suffix == ".gguf" and path.is_file():
        return _load_gguf(path, str(source), dtype)
    raise CheckpointError(
        f"{shown(str(source), 200)} is neither a directory nor a *.gguf file; pass the directory of config.json"
    )


def _load_directory(path: Path, source: str, dtype: str | None, quantised: str | None) -> Checkpoint:
    """A family may define `text_fields(raw)`, the fields of the language model in a multimodal config (and what completed and
    read_weights ask for).
    """
    raw = read_json(path / "config.json", MAX_CONFIG_BYTES)
    model_type = model_type_of(raw)
    family = models.family(model_type)
    config = family.Config.from_dict(raw)
    text: Mapping[str, Any] = family.text_fields(raw)[0] if hasattr(family, "text_fields") else raw
    plan = read_plan(raw, directory.hf_quant_config(path)) or read_plan(text, None)
    headers = directory.tensor_headers(path)
    config = completed(family, config, headers, plan)
    tokenizer_file = path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(tokenizer_file) if tokenizer_file.is_file() else None
    template = directory.chat_template(path)
    eos = directory.eos_token_ids(path, text, config.vocab_size)
    weights, used, notes = read_weights(family, config, headers, plan=plan, dtype=dtype, quantised=quantised)
    if tokenizer is None:
        notes.append("no tokenizer: the directory has no tokenizer.json")
    specials = _specials(text, tokenizer) | directory.special_tokens(path)
    return Checkpoint(model_type, config, raw, weights, used, tokenizer, template, specials, eos, source, notes)


def _load_gguf(path: Path, source: str, dtype: str | None) -> Checkpoint:
    gguf = gguf_header.read_header(path)
    converted = gguf_convert.convert(gguf)
    raw, metadata = converted.config, gguf.metadata
    family = models.family(raw["model_type"])
    config = family.Config.from_dict(raw)
    has_vocabulary = metadata.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"
    tokenizer = gguf_vocabulary.from_gguf(metadata) if has_vocabulary else None
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"tokenizer.chat_template must be text (got {shown(template)})")
    eos = [metadata[key] for key in _GGUF_EOS if key in metadata]
    if not all(type(token) is int and 0 <= token < config.vocab_size for token in eos):
        raise ConfigError(f"the GGUF file's end-of-text ids {shown(eos)} must be from 0 to {config.vocab_size - 1}")
    weights, used, notes = read_weights(
        family, config, converted.headers, dtypes=GGUF_DTYPES, dtype=dtype, arrange=converted.arrange
    )
    if has_vocabulary and "tokenizer.ggml.pre" not in metadata:
        notes.append(
            "the GGUF file does not name its pre-tokenizer; 'default' is assumed, and some texts may be cut differently"
        )
    specials = _specials(raw, tokenizer)
    return Checkpoint(
        raw["model_type"], config, raw, weights, used, tokenizer, template, specials, frozenset(eos), source, notes
    )


_GGUF_EOS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def model_type_of(raw: Mapping[str, Any]) -> str:
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    if model_type is None and isinstance(architectures, list):
        known = [name for name in map(str, architectures) if name in models.ARCHITECTURES]
        model_type = models.ARCHITECTURES[known[0]] if known else None
    if isinstance(model_type, str):
        model_type = models.ALIASES.get(model_type, model_type)
    if not isinstance(model_type, str):
        raise ConfigError(
            f"config field model_type must name a family (got {shown(model_type)}; known: {', '.join(models.FAMILIES)})"
        )
    return model_type


def _specials(raw: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, str]:
    """Named special tokens by the ids that the config gives."""
    named = {}
    for name in ("bos", "eos"):
        token = raw.get(f"{name}_token_id")
        token = token[0] if isinstance(token, list) and token else token
        if tokenizer is not None and type(token) is int:
            named[f"{name}_token"] = tokenizer.token_bytes(token).decode(errors="replace") if token >= 0 else ""
    return named
