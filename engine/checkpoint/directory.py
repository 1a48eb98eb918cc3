"""A checkpoint directory: which safetensors files belong to it, and its small JSON and text files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint import safetensors
from engine.checkpoint.bounded import read_bounded, read_json, shown
from engine.checkpoint.tensors import TensorHeader
from engine.errors import CheckpointError, ConfigError

__all__ = ["chat_template", "eos_token_ids", "hf_quant_config", "special_tokens", "tensor_headers"]

INDEX = "model.safetensors.index.json"
MAX_SHARDS = 4096
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TEMPLATES = 64
MAX_EOS = 64
MAX_TOKEN = 512


def tensor_headers(directory: Path) -> dict[str, TensorHeader]:
    """Headers of all tensors by name: of model.safetensors, of the shards of its index, or of the only *.safetensors file.

    Raises CheckpointError: no or several unindexed files, a missing or stray shard, a name in two shards, an index that lies.
    """
    single = directory / "model.safetensors"
    if single.is_file():
        return safetensors.read_header(single)
    if (directory / INDEX).is_file():
        return _sharded(directory)
    files = sorted(directory.glob("*.safetensors"))[:MAX_SHARDS]
    if len(files) == 1:
        return safetensors.read_header(files[0])
    if files:
        raise CheckpointError(f"{directory} has {len(files)} safetensors files and no {INDEX}; download the index too")
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    hint = f" ({pickles[0]} is a pickle, which is never read: convert it to safetensors)" if pickles else ""
    raise CheckpointError(f"{directory} has no safetensors file{hint}")


def _sharded(directory: Path) -> dict[str, TensorHeader]:
    index = read_json(directory / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: weight_map must map tensor names to files (got {shown(weight_map)})")
    for name, shard in weight_map.items():
        if not _plain_file_name(shard):
            raise CheckpointError(
                f"{INDEX}: weight_map puts {shown(name)} into {shown(shard)}, which is no plain *.safetensors name"
            )
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"{INDEX}: {len(shards)} shards are more than {MAX_SHARDS}")
    headers: dict[str, TensorHeader] = {}
    for shard in shards:
        if not (directory / shard).is_file():
            raise CheckpointError(f"shard {shown(shard)} that {INDEX} names is missing from {directory}; finish the download")
        for name, header in safetensors.read_header(directory / shard).items():
            if name in headers:
                raise CheckpointError(f"tensor {shown(name)} is in {headers[name].file.name} and again in {shard}")
            if weight_map.get(name) != shard:
                raise CheckpointError(f"tensor {shown(name)} is in {shard}, {INDEX} says {shown(weight_map.get(name))}")
            headers[name] = header
    for name, shard in weight_map.items():
        if name not in headers:
            raise CheckpointError(f"tensor {shown(name)} is missing from {shard}, where {INDEX} says it is")
    return headers


def _plain_file_name(name: Any) -> bool:
    """No path: a shard lies beside its index, whatever the index says. Hub snapshots link files, so links are fine."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or len(name) > 255 or name.startswith("."):
        return False
    return name.isprintable() and not any(character in name for character in "/\\:")


def chat_template(directory: Path) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json's `chat_template` (text, or named templates)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_bounded(path, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 (byte {error.start})") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = directory / name
        if path.is_file():
            template = _template_field(read_json(path).get("chat_template"), name)
            if template is not None:
                return template
    return None


def _template_field(value: Any, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, list):  # [{"name": "default", "template": "..."}, ...]
        named = {}
        for entry in value[:MAX_TEMPLATES]:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise CheckpointError(f"{where}: chat_template entry {shown(entry)} must have a name and a template")
            named[entry["name"]] = entry.get("template")
        if "default" not in named and len(named) != 1:
            raise CheckpointError(f"{where}: chat_template has no template named 'default' (it has {shown(sorted(named))})")
        value = named.get("default", next(iter(named.values())))
    if not isinstance(value, str) or len(value) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"{where}: chat_template must be text of at most {MAX_TEMPLATE_BYTES} characters (got {shown(value)})"
        )
    return value


def special_tokens(directory: Path) -> dict[str, str]:
    """The named special tokens of tokenizer_config.json (bos_token, eos_token, ...), each text or an object with `content`."""
    path = directory / "tokenizer_config.json"
    named = {}
    for name, value in (read_json(path) if path.is_file() else {}).items():
        value = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(value, str):
            if len(value) > MAX_TOKEN:
                raise CheckpointError(f"{path.name}: {shown(name)} has {len(value)} characters, the limit is {MAX_TOKEN}")
            named[name] = value
    return named


def hf_quant_config(directory: Path) -> dict[str, Any] | None:
    """ModelOpt's description of a quantised checkpoint, where there is one."""
    path = directory / "hf_quant_config.json"
    return read_json(path) if path.is_file() else None


def eos_token_ids(directory: Path, config: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Token ids that end a text: of generation_config.json where it names any, else of config.json. Raises ConfigError."""
    path = directory / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    where = path.name if value is not None else "config.json"
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_EOS or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ConfigError(
            f"{where}: eos_token_id {shown(value)} must be token ids from 0 to {vocab_size - 1}, at most {MAX_EOS}"
        )
    return frozenset(ids)
