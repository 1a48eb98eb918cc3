"""Nemotron-H's head for multi-token prediction: from a position's hidden state and the next token, the logits after that token.

Its layers are of the trunk's kinds. Published files have the steps of the head in one of two spellings: `mtp.fc` and its norms
beside the layers, or `eh_proj`, `enorm`, `hnorm` and `final_layernorm` inside the first and the last of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.errors import CheckpointError
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.weights import Weights
from engine.models.nemotron_h_config import ATTENTION, MLP, MOE
from engine.state import KVState, Span, State

__all__ = ["MTPHead", "MTPNames", "has_mtp_head", "layer_kind", "layer_prefixes"]

_LAYER = re.compile(r"mtp\.layers\.(\d{1,4})\.")
_KINDS = (  # the first whose parts a mixer has
    (ATTENTION, ("q_proj", "k_proj", "v_proj", "o_proj")),
    (MOE, ("gate", "experts")),
    (MLP, ("up_proj", "down_proj")),
)
_RECURRENT = ("in_proj", "conv1d")


@dataclass(frozen=True)
class MTPNames:
    """What a checkpoint's names say of its head: its layers in order with their kinds, and where the parts around them are."""

    layers: tuple[tuple[str, str], ...]  # ("mtp.layers.0", "*")
    enorm: str
    hnorm: str
    fc: str
    norm: str

    @classmethod
    def find(cls, names: Collection[str]) -> MTPNames | None:
        """None where the files have no head. Raises CheckpointError for one that is not whole, or has a recurrent layer."""
        if not has_mtp_head(names):
            return None
        prefixes = layer_prefixes(names)
        if not prefixes:
            raise CheckpointError("the MTP head has mtp.fc and no mtp.layers; is the checkpoint complete?")

        def first(candidates: Sequence[str]) -> str:
            found = [name for name in candidates if f"{name}.weight" in names]
            if not found:
                raise CheckpointError(f"the MTP head has none of {', '.join(candidates)[:200]}; is the checkpoint complete?")
            return found[0]

        return cls(
            layers=tuple((prefix, layer_kind(prefix, names)) for prefix in prefixes),
            enorm=first(["mtp.pre_fc_norm_embedding", *(f"{prefix}.enorm" for prefix in prefixes)]),
            hnorm=first(["mtp.pre_fc_norm_hidden", *(f"{prefix}.hnorm" for prefix in prefixes)]),
            fc=first(["mtp.fc", *(f"{prefix}.eh_proj" for prefix in prefixes)]),
            norm=first(["mtp.norm", "mtp.shared_head.norm", *(f"{prefix}.final_layernorm" for prefix in reversed(prefixes))]),
        )


def has_mtp_head(names: Collection[str]) -> bool:
    return "mtp.fc.weight" in names or any(_LAYER.match(name) and name.endswith(".eh_proj.weight") for name in names)


def layer_prefixes(names: Collection[str]) -> list[str]:
    """The distinct `mtp.layers.N` by N; the first N need not be 0."""
    indices = {int(match[1]) for match in map(_LAYER.match, names) if match}
    return [f"mtp.layers.{index}" for index in sorted(indices)]


def layer_kind(prefix: str, names: Collection[str]) -> str:
    """The kind of a layer by the parts of its mixer. Raises CheckpointError where there are none, or recurrent ones."""
    mixer = f"{prefix}.mixer."
    parts = {name.removeprefix(mixer).partition(".")[0] for name in names if name.startswith(mixer)}
    if parts.intersection(_RECURRENT):
        raise CheckpointError(f"{prefix} of the MTP head is recurrent ({mixer}{_RECURRENT[0]}), which is not supported")
    for kind, known in _KINDS:
        if parts.intersection(known):
            return kind
    raise CheckpointError(f"{prefix} of the MTP head has no mixer of a known kind; is the checkpoint complete?")


class MTPHead:
    """Slots: one KV state per attention layer of the head, apart from the trunk's. Embedding and output head are the trunk's.

    layers: (x [T, hidden], spans) -> [T, hidden], in order.
    """

    def __init__(
        self,
        names: MTPNames,
        weights: Weights,
        eps: float,
        *,
        embeddings: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        layers: Sequence[Callable[[mx.array, Sequence[Span]], mx.array]],
    ) -> None:
        self.embeddings = embeddings
        self.lm_head = lm_head
        self.layers = layers
        self.num_slots = sum(kind == ATTENTION for _, kind in names.layers)
        self.enorm = RMSNorm(weights.at(names.enorm), eps)
        self.hnorm = RMSNorm(weights.at(names.hnorm), eps)
        self.fc = Linear.of(weights.at(names.fc))  # [hidden, 2 hidden]
        self.norm = RMSNorm(weights.at(names.norm), eps)

    def make_slots(self) -> list[State]:
        """New states of one sequence; none for a head without attention, which looks at one position at a time."""
        return [KVState() for _ in range(self.num_slots)]

    def __call__(
        self, hidden: mx.array, tokens: mx.array, spans: Sequence[Span], rows: Sequence[int] | None = None
    ) -> tuple[mx.array, mx.array]:
        """hidden [T, hidden]: of the trunk (`Model.hidden`), or of the head's own last call, at each position.
        tokens int32 [T]: the token after each position. spans: of positions, with this head's slots.

        Returns the logits [len(rows), vocab] of the token after `tokens`, and the head's hidden states [len(rows), hidden].
        """
        x = self.fc(mx.concatenate([self.enorm(self.embeddings(tokens)), self.hnorm(hidden)], axis=-1))  # embedding first
        for layer in self.layers:
            x = layer(x, spans)
        if rows is not None:
            x = x[mx.array(list(rows), dtype=mx.int32)]
        x = self.norm(x)
        return self.lm_head(x), x
