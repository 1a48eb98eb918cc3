"""Which format a converted checkpoint holds each weight in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import Refused
from engine.layers.quantised import MODES

__all__ = ["FORMATS", "POLICIES", "Format", "Policy", "nemotron", "quantisation_format", "uniform"]


@dataclass(frozen=True)
class Format:
    """What a matrix is packed into."""

    mode: str
    group_size: int
    bits: int

    @property
    def pack_factor(self) -> int:
        """Codes of a 32-bit word, where they do not cross words (bits 2, 4 and 8)."""
        return 32 // self.bits

    def fits(self, inputs: int) -> bool:
        """Whether a row of so many inputs is whole groups."""
        return inputs % self.group_size == 0


FORMATS = {mode: Format(mode, known.group_sizes[0], known.bits[0]) for mode, known in MODES.items() if mode != "affine"}
FORMATS |= {f"affine{bits}": Format("affine", 64, bits) for bits in MODES["affine"].bits}
_ALIASES = {"int4": "affine4", "int8": "affine8", "fp4": "affine4", "q4": "affine4", "fp8": "affine8", "q8": "affine8"}


def quantisation_format(name: str, group_size: int | None = None) -> Format:
    """A format by the name that commands take: nvfp4, mxfp4, mxfp8, affine2 to affine8, int4, int8, q4, q8, fp4, fp8.

    group_size: another than the usual 64, for affine. Raises Refused for what there is not.
    """
    known = FORMATS.get(_ALIASES.get(name, name))
    if known is None:
        raise Refused(f"mode {name!r:.80} is not supported (supported: {', '.join((*FORMATS, *_ALIASES))})")
    if group_size is None or group_size == known.group_size:
        return known
    if group_size not in MODES[known.mode].group_sizes:
        sizes = ", ".join(map(str, MODES[known.mode].group_sizes))
        raise Refused(f"mode {name} has no groups of {group_size} (supported: {sizes})")
    return Format(known.mode, group_size, known.bits)


# parameter's name, base format, number of layers -> its format; None leaves it as it is
Policy = Callable[[str, Format, int], "Format | None"]

# Parts of names of what is no linear map or decides discretely: convolutions, norms, routers, the recurrence's own parameters.
_STAYS = re.compile(r"(?:^|\.)(?:conv1d|gate|router|[^.]*norm[^.]*|A_log|D|dt_bias)(?:\.|\Z)|(?:bias|sinks)\Z")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embeddings|lm_head)\.weight\Z")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ATTENTION = re.compile(r"\.[qkvo]_proj\.weight\Z")
_DOWN = re.compile(r"\.(?:out_proj|down_proj)(?:\.weight)?\Z")


def uniform(name: str, base: Format, layers: int) -> Format | None:
    """Every linear map, expert and embedding in the base format."""
    return None if _STAYS.search(name) else base


def nemotron(name: str, base: Format, layers: int) -> Format | None:
    """As Nemotron 3's 4-bit releases are imported: more bits where errors cost most.

    Embeddings, head and attention have 8 bits of the same kind; so have the projections back into the residual stream in the
    first and the last eighth of the layers, and in every third between. A draft head stays as it is.
    """
    if _STAYS.search(name) or name.startswith("mtp."):
        return None
    if base.bits >= 8:
        return base
    fine = FORMATS["affine8"] if base.mode == "affine" else FORMATS["mxfp8"]
    layer = _LAYER.search(name)
    if _EMBEDDING.search(name) or (_ATTENTION.search(name) and layer):
        return fine
    if _DOWN.search(name) and layer and _takes_more_bits(int(layer[1]), layers):
        return fine
    return base


def _takes_more_bits(layer: int, layers: int) -> bool:
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2


POLICIES: dict[str, Policy] = {"uniform": uniform, "nemotron": nemotron}
