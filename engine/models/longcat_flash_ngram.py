"""LongCat-Flash with n-gram embeddings (LongCat-Flash-Lite): hashed pairs, triples, .. add to each token's embedding.

https://arxiv.org/abs/2601.21204; fields and weight names as in Hugging Face checkpoints of model_type `longcat_flash_ngram`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.errors import ConfigError
from engine.fields import Fields
from engine.layers.embedding import Embedding
from engine.layers.quantised import Weight, dense
from engine.layers.weights import Weights
from engine.models import longcat_flash
from engine.models.longcat_flash import SUB_LAYERS, ignored, keep_float32, refuse_variants, trunk_fields
from engine.state import Span, State, TokenTail
from engine.state.token_tail import BEFORE_START

__all__ = ["Config", "Model", "NgramEmbedding", "canonical", "duplicates", "ignored", "keep_float32", "parameters"]

_FIELDS = {  # field -> its older spelling
    "emb_neighbor_num": "oe_neighbor_num",
    "emb_split_num": "oe_split_num",
    "ngram_vocab_size_ratio": "oe_vocab_size_ratio",
}
_MAX_ROWS = (1 << 31) - 1  # of a table: MLX's array dimensions


@dataclass(frozen=True)
class Config(longcat_flash.Config):
    emb_neighbor_num: int  # n: the longest n-gram
    emb_split_num: int  # tables for each length of n-gram
    ngram_vocab_size_ratio: float  # rows of a table, in vocabularies
    eos_token_id: int  # an n-gram never reaches back over it

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        """Read config.json. Raises ConfigError, which names field and value, or Refused for what is not supported."""
        refuse_variants(raw, known=(*_FIELDS, *_FIELDS.values()))
        fields = Fields(_modern(raw))
        trunk = trunk_fields(fields)
        n = fields.integer("emb_neighbor_num", 2, 16)
        k = fields.integer("emb_split_num", 1, 64)
        if trunk["hidden_size"] % (k * (n - 1)):
            raise fields.error("emb_split_num", f"times emb_neighbor_num - 1 must divide hidden_size {trunk['hidden_size']}")
        config = cls(
            **trunk,
            emb_neighbor_num=n,
            emb_split_num=k,
            ngram_vocab_size_ratio=fields.number("ngram_vocab_size_ratio", 1e-3, 1e6),
            eos_token_id=fields.integer("eos_token_id", 0, trunk["vocab_size"] - 1, 2),
        )
        if config.table_rows[-1] > _MAX_ROWS:  # and so a hash, below 16 * 2^24 * 2^31, fits 64 bits
            raise fields.error("ngram_vocab_size_ratio", f"times vocab_size {config.vocab_size} must stay below 2^31")
        return config

    @property
    def table_rows(self) -> list[int]:
        """Rows of each table, which are the moduli of the hashes and all different."""
        base = int(self.ngram_vocab_size_ratio * self.vocab_size)
        return [base + 2 * t + 1 for t in range(self.emb_split_num * (self.emb_neighbor_num - 1))]


def _modern(raw: Mapping[str, Any]) -> dict[str, Any]:
    """raw with the n-gram fields in their newer spelling. Raises ConfigError where the two spellings contradict each other."""
    modern = dict(raw)
    for name, older in _FIELDS.items():
        if raw.get(older) is None:
            continue
        if raw.get(name) is not None and raw[name] != raw[older]:
            raise ConfigError(f"config fields {name} and {older} are the same and contradict each other; remove one of the two")
        modern[name] = raw[older]
    return modern


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint with its shape; a checkpoint has exactly these."""
    shapes = longcat_flash.parameters(config)
    rows = config.table_rows
    for t, count in enumerate(rows):
        shapes[f"model.ngram_embeddings.embedders.{t}.weight"] = (count, config.hidden_size // len(rows))
        shapes[f"model.ngram_embeddings.post_projs.{t}.weight"] = (config.hidden_size, config.hidden_size // len(rows))
    return shapes


def duplicates(config: Config) -> dict[str, str]:
    """Names under which a file may hold a copy of a parameter."""
    words = {"model.ngram_embeddings.word_embeddings.weight": "model.embed_tokens.weight"}
    return longcat_flash.duplicates(config) | words


_OLDER = re.compile(r"model\.oe_embed_(tokens|proj)(\d+)\.weight\Z")


def canonical(name: str) -> str:
    """The parameter that a tensor of this name is: older files spell the n-gram tables and projections differently."""
    older = _OLDER.match(name)
    if older is None:
        return name
    return f"model.ngram_embeddings.{'embedders' if older[1] == 'tokens' else 'post_projs'}.{older[2]}.weight"


class NgramEmbedding:
    """(word + sum of projected n-gram rows) / (1 + tables).

    Table t of the g-grams has M rows and holds n-gram (a, p1, ..) of token a and its predecessors p1, p2, .. in row
    (a + p1 V + p2 V^2 + ..) mod M, V the vocabulary's size. A predecessor counts as 0 before the start of the sequence, and
    where it or a token between it and a is the end of a text.
    """

    def __init__(self, config: Config, weights: Weights, words: Embedding) -> None:
        self.words = words
        self.eos_token_id = config.eos_token_id
        self.width = config.emb_neighbor_num - 1  # predecessors that it looks at
        self.tables = [Embedding(weights.at(f"embedders.{t}")) for t in range(len(config.table_rows))]  # [M, hidden / tables]
        projections = [dense(weights.matrix(f"post_projs.{t}.weight")) for t in range(len(self.tables))]
        self.projection = mx.concatenate(projections, axis=1)  # [hidden, hidden]
        powers = np.zeros((1 + self.width, len(self.tables)), np.int64)
        for t, modulus in enumerate(config.table_rows):
            for s in range(1, 2 + t // config.emb_split_num):  # predecessors in its g-grams
                powers[s, t] = pow(config.vocab_size, s, modulus)
        self.powers = mx.array(powers)  # int64 [1 + width, tables]: V^s mod M, 0 beyond the table's g-grams
        self.moduli = mx.array(np.array(config.table_rows, np.int64))

    def __call__(self, contexts: Sequence[mx.array]) -> mx.array:
        """contexts: of each span, int32 [width + n], the tokens before its n tokens and these. Returns [sum of n, hidden]."""
        tokens = _joined([context[self.width :] for context in contexts])
        ids = self.row_ids(contexts)
        rows = mx.concatenate([table(ids[:, t]) for t, table in enumerate(self.tables)], axis=-1)  # [T, hidden]
        return (self.words(tokens) + rows @ self.projection.T) / (1 + len(self.tables))

    def row_ids(self, contexts: Sequence[mx.array]) -> mx.array:
        """Rows in the tables: int64 [T, tables]. Sums reach width * vocab * M, which 32 bits do not hold."""
        tokens = _joined([context[self.width :] for context in contexts])
        hashes = tokens.astype(mx.int64)[:, None]
        within = mx.ones(tokens.shape, mx.bool_)  # from predecessor s on the sequence has begun and no text has ended
        for s in range(1, 1 + self.width):
            previous = _joined([context[self.width - s : context.shape[0] - s] for context in contexts])
            within = within & (previous != self.eos_token_id) & (previous != BEFORE_START)
            hashes = hashes + mx.where(within, previous, 0).astype(mx.int64)[:, None] * self.powers[s]
        return hashes % self.moduli


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))


class Model(longcat_flash.Model):
    """Slots: those of LongCat-Flash, and last the token tail of the n-gram embedding."""

    config: Config

    def __init__(self, config: Config, weights: Mapping[str, Weight]) -> None:
        super().__init__(config, weights)
        self.ngram_embeddings = NgramEmbedding(config, Weights(weights).at("model.ngram_embeddings"), self.embed_tokens)

    def make_slots(self) -> list[State]:
        return [*super().make_slots(), TokenTail(self.config.emb_neighbor_num - 1)]

    def embed(self, tokens: mx.array, spans: Sequence[Span]) -> mx.array:
        tail = SUB_LAYERS * len(self.layers)
        contexts = [span.slots[tail].append(tokens[span.start : span.stop], span.padding) for span in spans]
        return self.ngram_embeddings(contexts)
