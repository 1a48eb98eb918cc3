"""Token streams: a schedule's text and a seed say every token that is fed.

A token is a pure function of (seed, sequence name, branch, position). A sequence starts at branch 0 each time it is opened, so
that a reopened sequence sees the same tokens again; each rewind moves it to the next branch, so that what follows differs
from what was dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TokenStream", "special_ids"]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def special_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that a random prompt must not hold: bos, eos and pad of a config.json (a single id, a list, or null each).

    The config is untrusted: what is no id is left out, and is the loader's to report.
    """
    found: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        found.update(token for token in (value if isinstance(value, list) else [value]) if type(token) is int)
    return frozenset(found)


def _mixed(x: int) -> int:  # the finaliser of splitmix64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class TokenStream:
    """Uniform tokens of `vocab` without those to `avoid`.

    `planted` (position -> token) overrides them in all sequences; sequences in `fixed` read out the tokens given there instead.
    """

    seed: int
    vocab: int
    avoid: frozenset[int] = frozenset()
    fixed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    planted: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.vocab - len([i for i in self.avoid if 0 <= i < self.vocab]) < 2:
            raise ValueError(f"a vocabulary of {self.vocab} without {len(self.avoid)} special ids leaves no choice of tokens")

    def tokens(self, sequence: str, branch: int, positions: Iterable[int]) -> list[int]:
        """The tokens of a sequence's branch at these positions. IndexError beyond the end of a fixed sequence."""
        if sequence in self.fixed:
            if branch:
                raise ValueError(f"sequence {sequence} has fixed tokens and none that follow a rewind")
            return [self.fixed[sequence][position] for position in positions]
        digest = hashlib.blake2b(f"{self.seed}/{sequence}/{branch}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        avoid = sorted(token for token in self.avoid if 0 <= token < self.vocab)
        found = []
        for position in positions:
            pick = _mixed((key + _GOLDEN * (position + 1)) & _MASK) % (self.vocab - len(avoid))
            for token in avoid:  # ascending: the pick-th of the ids that are left
                pick += pick >= token
            found.append(self.planted.get(position, pick))
        return found
