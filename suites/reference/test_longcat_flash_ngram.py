"""N-gram embeddings: ids against Python's integers, the EOS rule, both spellings, refusals, and the trunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cases
from reference_models import longcat_flash, longcat_flash_ngram
from reference_models.recompute import ReferenceError

LITE = {"vocab_size": 131072, "emb_neighbor_num": 4, "emb_split_num": 4, "ngram_vocab_size_ratio": 78, "hidden_size": 3072}


def config(**fields):
    return dict(cases.find("longcat_flash_ngram/n4_k2").config) | fields


def ids_by_hand(config, tokens):
    """The formula in Python's integers, one token and one table at a time."""
    vocab, n, k = config["vocab_size"], config["emb_neighbor_num"], config["emb_split_num"]
    rows = []
    for g in range(2, n + 1):
        for j in range(k):
            modulus = config["ngram_vocab_size_ratio"] * vocab + 2 * ((g - 2) * k + j) + 1
            row = []
            for p, token in enumerate(tokens):
                total = token
                for s in range(1, g):
                    visible = p - s >= 0 and config["eos_token_id"] not in tokens[p - s : p]
                    total += (tokens[p - s] if visible else 0) * vocab**s
                row.append(total % modulus)
            rows.append(row)
    return rows


def test_ids_of_a_short_prompt_written_out():
    # V = 10, M = 31, 33: the pair (a, b) is b + 10 a mod 31, the triple (a, b, c) is c + 10 b + 100 a mod 33
    ids = longcat_flash_ngram.ngram_ids(
        config(vocab_size=10, ngram_vocab_size_ratio=3, emb_neighbor_num=3, emb_split_num=1, eos_token_id=2), [5, 9, 2, 7, 8]
    )
    assert ids.tolist() == [
        [5, 59 % 31, 92 % 31, 7, 78 % 31],  # the 7 does not see the EOS before it, the EOS sees the 9
        [5, 59 % 33, 592 % 33, 7, 78 % 33],  # the 8 sees the 7, not the EOS beyond it
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.integers(0, 131071), st.just(2), st.integers(131000, 131071)), min_size=1, max_size=24),
    st.integers(2, 5),
    st.integers(1, 4),
)
def test_ids_at_the_published_size_equal_unbounded_integers(tokens, n, k):
    lite = config(**LITE) | {"emb_neighbor_num": n, "emb_split_num": k, "hidden_size": 12 * k * (n - 1)}
    assert longcat_flash_ngram.ngram_ids(lite, tokens).tolist() == ids_by_hand(lite, tokens)


def test_sums_at_the_published_size_need_more_than_32_bits():
    ids = longcat_flash_ngram.ngram_ids(config(**LITE), [131071] * 8)
    modulus = 78 * 131072 + 2 * 11 + 1
    parts = [131071 * pow(131072, s, modulus) for s in (1, 2, 3)]
    assert sum(parts) > 2**40
    assert ids[11, 7] == (131071 + sum(parts)) % modulus


def test_the_wide_case_needs_more_than_32_bits_often(draw):
    _, _, tokens = draw("longcat_flash_ngram/wide_hash", length=36)
    modulus = 12 * 16104 + 2 * 2 + 1
    products = [[tokens[p - s] * pow(16104, s, modulus) for s in (1, 2, 3)] for p in range(3, 36)]
    assert sum(max(of_one) > 2**31 for of_one in products) >= 5
    assert sum(sum(of_one) > 2**31 for of_one in products) >= 15


def test_several_eos_ids_all_end_a_context():
    tokens = [5, 9, 7, 4, 8]
    both = longcat_flash_ngram.ngram_ids(config(eos_token_id=[2, 7]), tokens)
    assert torch.equal(both, longcat_flash_ngram.ngram_ids(config(eos_token_id=7), tokens))
    assert torch.equal(longcat_flash_ngram.ngram_ids(config(eos_token_id=None), [2, 2]), _no_eos([2, 2]))


def _no_eos(tokens):
    return longcat_flash_ngram.ngram_ids(config(eos_token_id=127), tokens)


@pytest.mark.parametrize(
    "extra",
    [
        {"oe_ignored_token_ids": [1]},
        {"ngram_exclude_sp_token": True},
        {"ngram_exclude_sp_token": False},
        {"special_token_scope": "all"},
        {"ngram_fix_normalize_factor": 2},
        {"emb_pooling": "sum"},
    ],
)
def test_an_unknown_ngram_key_is_refused_by_name(extra):
    with pytest.raises(ReferenceError, match=next(iter(extra))):
        longcat_flash_ngram.parameters(config(**extra))


def test_an_unset_unknown_key_is_no_reason_to_refuse():
    assert longcat_flash_ngram.parameters(config(oe_ignored_token_ids=None)) == longcat_flash_ngram.parameters(config())


@pytest.mark.parametrize(
    ("field", "value"),
    [("emb_neighbor_num", 1), ("emb_split_num", 0), ("ngram_vocab_size_ratio", None), ("hidden_size", 50)],
)
def test_a_bad_embedding_field_is_refused_by_name(field, value):
    with pytest.raises(ReferenceError, match=field):
        longcat_flash_ngram.parameters(config(**{field: value}))


def test_names_and_shapes_of_the_embedding():
    shapes = longcat_flash_ngram.parameters(config())
    extra = {name: shape for name, shape in shapes.items() if "ngram" in name}
    assert extra == {f"model.ngram_embeddings.embedders.{t}.weight": (3 * 128 + 2 * t + 1, 8) for t in range(6)} | {
        f"model.ngram_embeddings.post_projs.{t}.weight": (48, 8) for t in range(6)
    }
    assert set(shapes) - set(extra) == set(longcat_flash.parameters(config()))


def test_the_older_spelling_gives_the_same_logits(draw):
    own, weights, tokens = draw("longcat_flash_ngram/n4_k2")
    older = {}
    for name, tensor in weights.items():
        _, _, rest = name.partition("model.ngram_embeddings.")
        kind, _, tail = rest.partition(".")
        part = {"embedders": "tokens", "post_projs": "proj"}.get(kind)
        older[f"model.oe_embed_{part}{tail}" if part else name] = tensor
    assert "model.oe_embed_tokens5.weight" in older and "model.oe_embed_proj0.weight" in older
    assert {longcat_flash_ngram.canonical(name) for name in older} == set(weights)
    ours = longcat_flash_ngram.logits(own, weights, tokens)
    assert torch.equal(longcat_flash_ngram.logits(own, older, tokens), ours)
    with pytest.raises(ReferenceError, match="both spellings"):
        longcat_flash_ngram.logits(own, weights | older, tokens)


def test_an_eos_cuts_the_context_and_not_the_attention(draw):
    own, weights, tokens = draw("longcat_flash_ngram/eos_in_prompt")
    ids = longcat_flash_ngram.ngram_ids(own, tokens)
    other = list(tokens)
    other[8] = 5 if tokens[8] != 5 else 6  # before the EOS at 9
    changed = longcat_flash_ngram.ngram_ids(own, other)
    assert (ids != changed).any(0).nonzero().flatten().tolist() == [8, 9]
    moved = (longcat_flash_ngram.logits(own, weights, tokens) - longcat_flash_ngram.logits(own, weights, other)).abs().amax(-1)
    assert bool((moved[8:] > 1e-4).all())


@pytest.mark.parametrize("name", ["plain", "router_bias", "yarn", "q_lora_null", "norm_topk", "no_zero_experts", "q_unscaled"])
def test_the_trunk_is_that_of_longcat_flash(draw, name):
    """With n-gram tables of zero the embedding is that of the words over 1 + tables; both files then compute the same."""
    trunk, weights, tokens = draw(f"longcat_flash/{name}")
    embedded = trunk | {"emb_neighbor_num": 3, "emb_split_num": 2, "ngram_vocab_size_ratio": 3}
    shapes = longcat_flash_ngram.parameters(embedded)
    own = {n: weights[n].double() if n in weights else torch.zeros(shape) for n, shape in shapes.items()}
    own["model.embed_tokens.weight"] = own["model.embed_tokens.weight"] * 5
    ours, theirs = longcat_flash_ngram.recompute(embedded, own, tokens), longcat_flash.recompute(trunk, weights, tokens)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours.margins, theirs.margins, rtol=0, atol=1e-12)
    assert ours.choices is not None and theirs.choices is not None and torch.equal(ours.choices, theirs.choices)
