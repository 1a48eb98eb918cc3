"""Reading a config's fields: each is checked for type and bounds before anything is built from it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from engine.errors import ConfigError, Refused

__all__ = ["Fields"]

_REQUIRED: Any = object()


class Fields:
    """The fields of one JSON object of a config. `null` counts as absent, as in published configs.

    Every reader raises ConfigError, which names the field and its value; `choice` raises Refused for an unknown name.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.raw = raw
        self.prefix = prefix

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def integer(self, name: str, least: int, most: int, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer from {least} to {most}")
        if not least <= value <= most:
            raise self.error(name, f"must be from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"must be a number from {least:g} to {most:g}")
        if not math.isfinite(value) or not least <= value <= most:
            raise self.error(name, f"must be from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def choice(self, name: str, known: Collection[str], default: Any = _REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a name")
        if value not in known:
            raise Refused(
                f"config field {self.prefix}{name} = {_shown(value)} is not supported (supported: {', '.join(known)})"
            )
        return value

    def section(self, name: str) -> Fields:
        value = self._get(name, _REQUIRED)
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return Fields(value, f"{self.prefix}{name}.")

    def layer_types(self, layers: int, known: Collection[str]) -> tuple[str, ...] | None:
        """`layer_types`: one of the known names for each of the layers; None where the config does not say."""
        kinds = self._get("layer_types", None)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != layers:
            got = f"{len(kinds)} entries" if isinstance(kinds, list) else type(kinds).__name__
            raise self.error("layer_types", f"must be a list of num_hidden_layers = {layers} names, here {got}")
        for i, kind in enumerate(kinds):
            if kind not in known:
                raise Refused(
                    f"config field {self.prefix}layer_types[{i}] = {_shown(kind)} is not supported "
                    f"(supported: {', '.join(known)})"
                )
        return tuple(kinds)

    def head_dim(self, hidden_size: int, heads: int) -> int:
        """`head_dim`, or hidden_size / heads where the config does not say; even, as rotary positions turn pairs."""
        derived = not self.has("head_dim")
        if derived and hidden_size % heads:
            raise self.error("num_attention_heads", f"must divide hidden_size {hidden_size}, or head_dim be given")
        head_dim = hidden_size // heads if derived else self.integer("head_dim", 2, 1 << 12)
        if head_dim % 2:
            source = f", and hidden_size {hidden_size} / num_attention_heads {heads} is {head_dim}" if derived else ""
            raise self.error("head_dim", f"must be even for rotary positions{source}")
        return head_dim

    def error(self, name: str, rule: str) -> ConfigError:
        return ConfigError(f"config field {self.prefix}{name} {rule} (got {_shown(self.raw.get(name))})")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"config field {self.prefix}{name} is missing")
            return default
        return value


def _shown(value: object, width: int = 80) -> str:
    if isinstance(value, (str, list, tuple)) and len(value) > width:
        value = value[:width]
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."
