"""Reading untrusted files within bounds: size, JSON depth, JSON numbers; and showing untrusted values in one short line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

__all__ = ["one_line", "parse_json", "read_bounded", "read_json", "shown"]

MAX_JSON_BYTES = 16 << 20  # an index of 91,000 tensors has 8 MiB
MAX_CONFIG_BYTES = 4 << 20  # published configs have up to 100 KiB
MAX_JSON_DEPTH = 32  # published configs nest 5 deep
MAX_INTEGER_DIGITS = 40  # transformers writes int(1e30), 31 digits, as model_max_length where there is no limit


def shown(value: object, width: int = 80) -> str:
    """`repr` of an untrusted value, cut to `width` characters; never more than one line."""
    # Long strings and containers are cut before repr, so that showing a value costs nothing beyond what is shown.
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > width:
        value = value[:width]
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def one_line(error: object, width: int = 300) -> str:
    """The text of a foreign exception on one line, cut to `width` characters."""
    text = " ".join(str(error)[: 4 * width].split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. Raises CheckpointError."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file; is the checkpoint complete?")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
    if len(data) > limit:
        raise CheckpointError(f"{path} is larger than {limit} bytes, the limit for such a file")
    return data


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a file; see parse_json. Raises CheckpointError, which names the file."""
    return parse_json(read_bounded(path, limit), str(path))


def parse_json(data: bytes, where: str, max_depth: int = MAX_JSON_DEPTH) -> dict[str, Any]:
    """A JSON object within bounds: UTF-8, no duplicate keys, integers of at most 40 digits, no NaN, at most max_depth levels.

    `Infinity` is accepted in both published spellings (the bare word, and transformers 5's {"__float__": "Infinity"}),
    because published configs use it (`time_step_limit`); a family's Config bounds the field. Raises CheckpointError.
    """
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 (byte {error.start}); is the file damaged?") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where} is not JSON ({one_line(error)}); is the file cut off?") from None
    except RecursionError:
        raise CheckpointError(f"{where} nests deeper than {max_depth} levels") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object (got {type(value).__name__})")
    level: list[Any] = [value]
    for _ in range(max_depth):
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
        level = [child for child in level if isinstance(child, (dict, list))]
        if not level:
            return value
    raise CheckpointError(f"{where} nests deeper than {max_depth} levels")


def _object(pairs: list[tuple[str, Any]]) -> Any:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} appears twice in one object")
    if "__float__" in result:
        spelled = result["__float__"]
        if len(result) != 1 or not isinstance(spelled, str):
            raise ValueError(f"__float__ must stand alone and hold text (got {shown(result)})")
        return _constant(spelled)
    return result


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError(f"integer {shown(text)} has more than {MAX_INTEGER_DIGITS} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {shown(text)} does not fit a double")
    return value


def _constant(text: str) -> float:
    if text in ("Infinity", "-Infinity"):
        return float(text)
    raise ValueError(f"{shown(text)} is not a number that a checkpoint may hold")
