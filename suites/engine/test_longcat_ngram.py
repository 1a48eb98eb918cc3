"""engine/models/longcat_flash_ngram.py and engine/state/token_tail.py: rows of n-grams, and the ids that a sequence keeps."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.errors import Refused
from engine.layers.embedding import Embedding
from engine.layers.weights import Weights
from engine.models import longcat_flash_ngram
from engine.models.longcat_flash_ngram import NgramEmbedding
from engine.state import TokenTail
from suites.engine.tiny_longcat import EOS, NGRAM, expected_embedding, expected_row_ids, tokens, weights


def embedding(**changes: Any) -> NgramEmbedding:
    config = longcat_flash_ngram.Config.from_dict(NGRAM | changes)
    arrays = {name: mx.array(w) for name, w in weights(config, longcat_flash_ngram).items()}
    return NgramEmbedding(
        config, Weights(arrays).at("model.ngram_embeddings"), Embedding(Weights(arrays).at("model.embed_tokens"))
    )


def hashes(**changes: Any) -> NgramEmbedding:
    """Only what makes row ids, without tables: for sizes whose tables would take gigabytes."""
    raw = NGRAM | changes
    config = longcat_flash_ngram.Config.from_dict(raw)
    count = len(config.table_rows)
    names = (f"{kind}.{t}.weight" for kind in ("embedders", "post_projs") for t in range(count))
    return NgramEmbedding(
        config, Weights({name: mx.zeros((1, 1)) for name in names}), Embedding(Weights({"weight": mx.zeros((1, 1))}))
    )


def row_ids(made: NgramEmbedding, pieces: list[list[int]]) -> list[list[int]]:
    tail = TokenTail(made.width)
    return [row for piece in pieces for row in np.array(made.row_ids([tail.append(mx.array(piece))])).tolist()]


SEQUENCE = [5, 9, EOS, 7, 8, 3, EOS, EOS, 4, 6, EOS, 11]


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("k", [1, 2])
def test_row_ids_equal_those_in_unbounded_integers_in_any_pieces(n: int, k: int):
    changes = {"emb_neighbor_num": n, "emb_split_num": k}
    expected = [expected_row_ids(SEQUENCE, position, NGRAM | changes) for position in range(len(SEQUENCE))]
    made = hashes(**changes)
    assert row_ids(made, [SEQUENCE]) == expected
    assert row_ids(made, [[token] for token in SEQUENCE]) == expected
    for cut in range(1, len(SEQUENCE)):
        assert row_ids(made, [SEQUENCE[:cut], SEQUENCE[cut:]]) == expected


def test_row_ids_of_published_sizes_do_not_overflow():
    changes = {"vocab_size": 131072, "ngram_vocab_size_ratio": 78, "emb_split_num": 4, "hidden_size": 3072}
    ids = [131071, 131070, 131071, 3, 131069, EOS, 131071, 131071, 131071]
    made = hashes(**changes)
    assert made.moduli.tolist() == [10223616 + 2 * t + 1 for t in range(12)]
    assert row_ids(made, [ids]) == [expected_row_ids(ids, position, NGRAM | changes) for position in range(len(ids))]


def test_the_end_of_a_text_sees_its_own_past_and_nothing_sees_over_it():
    made = hashes(emb_split_num=1)
    ids = np.array(row_ids(made, [[7, 8, EOS, 9]]))
    same_end = np.array(row_ids(made, [[6, 6, EOS, 9]]))
    assert (ids[2] != same_end[2]).any() and (ids[3] == same_end[3]).all()
    assert (ids[3] == np.array(row_ids(made, [[9]]))[0]).all()  # as if the sequence began after it


def test_token_zero_is_no_different_from_no_token_and_eos_zero_works():
    made = hashes(eos_token_id=0)
    raw = NGRAM | {"eos_token_id": 0}
    ids = [4, 0, 5, 6, 0, 0, 7]
    assert row_ids(made, [ids[:3], ids[3:]]) == [expected_row_ids(ids, position, raw) for position in range(7)]


def test_the_embedding_equals_the_equations_for_several_spans_at_once():
    made = embedding()
    config = longcat_flash_ngram.Config.from_dict(NGRAM)
    w = {name: array.astype(np.float64) for name, array in weights(config, longcat_flash_ngram).items()}
    lanes = [tokens(n, seed=n, eos=(n // 2,)) for n in (1, 2, 9)]
    tails = [TokenTail(made.width) for _ in lanes]
    for start, stop in ((0, 1), (1, 2), (2, 9)):
        contexts = [t.append(mx.array(lane[start:stop])) for t, lane in zip(tails, lanes, strict=True) if lane[start:stop]]
        expected = [expected_embedding(lane, NGRAM, w)[start:stop] for lane in lanes if lane[start:stop]]
        np.testing.assert_allclose(np.array(made(contexts)), np.concatenate(expected), atol=1e-5)


def test_a_tail_gives_the_ids_before_the_new_ones_whatever_the_pieces():
    tail, ids = TokenTail(3), list(range(100, 900))
    start = 0
    for n in (1, 1, 1, 2, 300, 1, 256, 5):
        context = np.array(tail.append(mx.array(ids[start : start + n]))).tolist()
        assert context == ([-1] * 3 + ids)[start : start + 3 + n]
        start += n
    assert tail.length == start == 567 and tail.growths == 4 and tail.nbytes == 4 * 818


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 270, 275])
def test_a_rewound_tail_gives_what_stood_before(n: int):
    tail, ids = TokenTail(3), list(range(1, 276))
    for start in range(0, 275, 25):
        tail.append(mx.array(ids[start : start + 25]))
    assert tail.can_rewind(n)
    tail.rewind(n)
    kept = [-1, -1, -1, *ids[: 275 - n]]
    assert np.array(tail.append(mx.array([77, 78]))).tolist() == [*kept[-3:], 77, 78]
    assert np.array(tail.append(mx.array([79]))).tolist() == [*[*kept, 77, 78][-3:], 79]


@pytest.mark.parametrize("n", [-1, 6])
def test_a_tail_is_not_rewound_beyond_its_start(n: int):
    tail = TokenTail(3)
    tail.append(mx.array([1, 2, 3, 4, 5]))
    assert not tail.can_rewind(n)
    with pytest.raises(Refused, match=f"cannot rewind {n} tokens of a state that holds 5"):
        tail.rewind(n)
    assert tail.length == 5


def test_padding_does_not_enter_a_tail():
    tail = TokenTail(2)
    assert np.array(tail.append(mx.array([5, 6, 0, 0]), padding=2)).tolist() == [-1, -1, 5, 6, 0, 0]
    assert np.array(tail.append(mx.array([7]))).tolist() == [5, 6, 7]


def test_a_snapshot_of_a_tail_outlives_its_source_and_can_be_rewound():
    tail, other = TokenTail(2), TokenTail(2)
    assert tail.snapshot() is None
    tail.append(mx.array([5, 6, 7]))
    snapshot = tail.snapshot()
    tail.rewind(2)
    tail.append(mx.array([9]))
    assert other.restore(snapshot, 3)
    other.rewind(1)
    assert np.array(other.append(mx.array([8]))).tolist() == [5, 6, 8]
    other.free()
    assert other.length == 0 and other.arrays() == [] and other.nbytes == 0
