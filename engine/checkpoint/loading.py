"""A checkpoint (directory, GGUF file or hub id) to weights, config, tokenizer and template; strict, bounded, in this order:

small files -> family's config -> headers of all tensors -> accounting -> and only then weights, one tensor at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine import models
from engine.checkpoint import directory, gguf_header, gguf_llama, hub
from engine.checkpoint.bounded import MAX_CONFIG_BYTES, one_line, read_json, shown
from engine.checkpoint.read import COMPUTE_DTYPES, read_tensor
from engine.checkpoint.tensors import TensorHeader, account
from engine.errors import CheckpointError, ConfigError, Refused
from engine.prompt import gguf_vocabulary
from engine.prompt.template import ChatTemplate
from engine.prompt.tokenizer import Tokenizer

__all__ = ["Checkpoint", "load"]

_FLOATS = frozenset({"F32", "F16", "BF16"})
_GGUF_DTYPES = _FLOATS | {"Q4_0", "Q4_1", "Q8_0"}
_PARTS_SHOWN = 16
_FILE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass
class Checkpoint:
    """A loaded checkpoint. `weights`: the family's parameter names -> arrays in `dtype`, evaluated."""

    model_type: str
    config: Any  # the family's Config
    raw_config: dict[str, Any]  # config.json, or what a GGUF file's metadata says in its spelling
    weights: dict[str, mx.array] = field(repr=False)
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


def load(source: str | Path, *, dtype: str | None = None) -> Checkpoint:
    """Load a directory with config.json and safetensors, a GGUF file (architecture llama), or a hub id.

    dtype: "float32", "bfloat16" or "float16"; None chooses by device. Every tensor of the files is used exactly once and none
    is missing, with the shapes that the config says; this is checked on headers before weights are allocated.
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
        return _load_directory(hub.snapshot(str(source)), str(source), dtype)
    if path.is_dir():
        return _load_directory(path, str(source), dtype)
    if path.suffix == ".gguf" and path.is_file():
        return _load_gguf(path, str(source), dtype)
    raise CheckpointError(
        f"{shown(str(source), 200)} is neither a directory nor a *.gguf file; pass the directory of config.json"
    )


def _load_directory(path: Path, source: str, dtype: str | None) -> Checkpoint:
    """A family may define `text_fields(raw)`, the fields of the language model in a multimodal config; `canonical(name)`, the
    parameter that a tensor of another spelling is; and `complete(config, shapes)`, the config with what only the files say.
    """
    raw = read_json(path / "config.json", MAX_CONFIG_BYTES)
    model_type = _model_type(raw)
    for name in ("quantization", "quantization_config", "compression_config"):  # MLX's and transformers' spellings
        if raw.get(name) is not None:
            raise _refused_quantization(name, raw[name])
    family = models.family(model_type)
    config = family.Config.from_dict(raw)
    text: Mapping[str, Any] = family.text_fields(raw)[0] if hasattr(family, "text_fields") else raw
    headers = directory.tensor_headers(path)
    if hasattr(family, "canonical"):
        headers = _renamed(headers, family.canonical)
    if hasattr(family, "complete"):
        config = family.complete(config, {name: header.shape for name, header in headers.items()})
    tokenizer_file = path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(tokenizer_file) if tokenizer_file.is_file() else None
    template = directory.chat_template(path)
    eos = directory.eos_token_ids(path, text, config.vocab_size)
    weights, used, notes = _weights(family, config, headers, _FLOATS, dtype, lambda name: None)
    if tokenizer is None:
        notes.append("no tokenizer: the directory has no tokenizer.json")
    specials = _specials(text, tokenizer) | directory.special_tokens(path)
    return Checkpoint(model_type, config, raw, weights, used, tokenizer, template, specials, eos, source, notes)


def _load_gguf(path: Path, source: str, dtype: str | None) -> Checkpoint:
    gguf = gguf_header.read_header(path)
    converted = gguf_llama.convert(gguf)
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
    weights, used, notes = _weights(family, config, converted.headers, _GGUF_DTYPES, dtype, converted.arrange)
    if has_vocabulary and "tokenizer.ggml.pre" not in metadata:
        notes.append(
            "the GGUF file does not name its pre-tokenizer; 'default' is assumed, and some texts may be cut differently"
        )
    specials = _specials(raw, tokenizer)
    return Checkpoint(
        raw["model_type"], config, raw, weights, used, tokenizer, template, specials, frozenset(eos), source, notes
    )


_GGUF_EOS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def _model_type(raw: Mapping[str, Any]) -> str:
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


def _refused_quantization(name: str, block: Any) -> Exception:
    """Quantised safetensors are not supported; a block that could not be right is an error of its own."""
    if not isinstance(block, dict):
        return ConfigError(f"config field {name} must be an object (got {shown(block)})")
    for key, least, most in (("bits", 1, 32), ("group_size", 1, 1 << 20)):
        value = block.get(key)
        if value is not None and (type(value) is not int or not least <= value <= most):
            return ConfigError(f"config field {name}.{key} must be an integer from {least} to {most} (got {shown(value)})")
    return Refused(
        f"config field {name} = {shown(block)}: quantised safetensors are not supported; use the unquantised checkpoint or a "
        "GGUF file (Q4_0, Q4_1, Q8_0)"
    )


def _weights(
    family: Any,
    config: Any,
    headers: dict[str, TensorHeader],
    dtypes: frozenset[str],
    dtype: str | None,
    arrange: Callable[[str], Callable[[mx.array], mx.array] | None],
) -> tuple[dict[str, mx.array], str, list[str]]:
    """Accounting, then the weights one by one.

    A family may define `ignored(config, name)` and `duplicates(config)` (see account), and `keep_float32(name)`, whether a
    parameter is float32 in every compute dtype.
    """
    parameters = family.parameters(config)
    duplicates = family.duplicates(config) if hasattr(family, "duplicates") else {}
    keep_float32 = getattr(family, "keep_float32", lambda name: False)

    def ignored(name: str) -> bool:
        return hasattr(family, "ignored") and family.ignored(config, name)

    account(parameters, headers, ignored=ignored, duplicates=duplicates, dtypes=dtypes)
    used, notes = _choose_dtype(dtype, [headers[name] for name in parameters])
    weights = {
        name: read_tensor(headers[name], "float32" if keep_float32(name) else used, arrange(name)) for name in parameters
    }
    for copy, name in duplicates.items():
        if copy in headers and not mx.array_equal(read_tensor(headers[copy], used, arrange(copy)), weights[name]).item():
            raise CheckpointError(
                f"tensor {shown(copy)} differs from {shown(name)}, of which the config says that it is a copy; "
                "is tie_word_embeddings right?"
            )
    left = [name for name in headers if name not in parameters]
    if left:
        parts = Counter(name.partition(".")[0] for name in left)
        notes.append(
            f"{len(left)} tensors of the files are not used (copies, rotary tables, draft layers, towers of other media): "
            + ", ".join(f"{shown(part)} {count}" for part, count in sorted(parts.items())[:_PARTS_SHOWN])
        )
    return weights, used, notes


def _renamed(headers: dict[str, TensorHeader], canonical: Callable[[str], str]) -> dict[str, TensorHeader]:
    renamed: dict[str, TensorHeader] = {}
    for header in headers.values():
        name = canonical(header.name)
        if name in renamed:
            raise CheckpointError(f"tensors {shown(renamed[name].name)} and {shown(header.name)} are two spellings of one")
        renamed[name] = header
    return renamed


def _choose_dtype(dtype: str | None, headers: list[TensorHeader]) -> tuple[str, list[str]]:
    sizes: dict[str, int] = {}
    for header in headers:
        sizes[header.dtype] = sizes.get(header.dtype, 0) + header.nbytes
    stored = max(sizes, key=lambda name: sizes[name])
    if dtype is not None:
        return dtype, [f"weights held in {dtype} as asked (stored: {stored})"]
    if mx.default_device().type == mx.DeviceType.cpu:
        return "float32", [f"weights held in float32: MLX's CPU kernels for narrower types are slow (stored: {stored})"]
    used = _FILE_DTYPES.get(stored, "bfloat16")
    why = "as stored" if stored in _FILE_DTYPES else "dequantised"
    return used, [f"weights held in {used}: {why} (stored: {stored})"]
