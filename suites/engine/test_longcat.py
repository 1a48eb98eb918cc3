"""engine/models/longcat_flash.py and longcat_flash_ngram.py: logits against numpy, chunks, batches, rewinds, layouts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.engine import Engine
from engine.errors import Refused
from engine.layers import activations
from engine.state import SequenceStateLayout, Span
from suites.engine.tiny_longcat import EOS, NGRAM, RAW, YARN, expected_logits, model, tokens

BASES = {"longcat_flash": RAW, "longcat_flash_ngram": NGRAM}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": RAW,
    "no_zero_experts": RAW | {"zero_expert_num": 0},
    "q_lora_null": RAW | {"q_lora_rank": None},
    "unscaled_queries": RAW | {"mla_scale_q_lora": False},
    "unscaled_latents": RAW | {"mla_scale_kv_lora": False},
    "yarn": RAW | {"rope_scaling": YARN},
    "norm_topk": RAW | {"norm_topk_prob": True},
    "router_bias": RAW | {"router_bias": True},
    "attention_bias": RAW | {"attention_bias": True},
    "tied": RAW | {"tie_word_embeddings": True},
    "only_one_expert_chosen": RAW | {"moe_topk": 1},
    "every_expert_chosen": RAW | {"moe_topk": 6},
    "ngram": NGRAM,
    "ngram_pairs": NGRAM | {"emb_neighbor_num": 2, "emb_split_num": 1},
    "ngram_triples": NGRAM | {"emb_neighbor_num": 3},
    "ngram_fractional_ratio": NGRAM | {"ngram_vocab_size_ratio": 2.37},
}
IDS = tokens(37, eos=(9, 10, 21, 23))
TOLERANCE = 5e-5  # good: 1.9e-5; an eps of 1e-5 in the latent norms 0.036, every other fault above 1


def rows(engine: Engine, ids: list[int], chunk: int) -> np.ndarray:
    return np.array(engine.prefill(engine.open(), ids, all_logits=True, chunk=chunk))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_equations(name: str):
    raw = VARIANTS[name]
    engine = Engine(model(raw))
    expected = expected_logits(IDS, raw)
    np.testing.assert_allclose(rows(engine, IDS, 100), expected, atol=TOLERANCE)
    np.testing.assert_allclose(rows(engine, IDS, 1), expected, atol=TOLERANCE)


@pytest.mark.parametrize("layout", SequenceStateLayout)
@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("chunk", [3, 7, 16])
def test_chunks_and_steps_give_the_rows_of_one_piece_in_both_layouts(family: str, layout: SequenceStateLayout, chunk: int):
    expected = expected_logits(IDS, BASES[family])
    engine = Engine(model(BASES[family]), layout=layout)
    sequence = engine.open()
    got = [np.array(engine.prefill(sequence, IDS[:23], all_logits=True, chunk=chunk))]
    got += [np.array(engine.step({sequence: token})) for token in IDS[23:]]
    np.testing.assert_allclose(np.concatenate(got), expected, atol=TOLERANCE)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_prompts_shorter_than_the_token_tail_go_on(n: int):
    engine = Engine(model(NGRAM))
    sequence = engine.open()
    got = [np.array(engine.prefill(sequence, IDS[:n], all_logits=True))]
    got += [np.array(engine.step({sequence: token})) for token in IDS[n:8]]
    np.testing.assert_allclose(np.concatenate(got), expected_logits(IDS[:8], NGRAM), atol=TOLERANCE)


@pytest.mark.parametrize("family", BASES)
def test_lanes_of_any_length_equal_each_lane_alone(family: str):
    raw = BASES[family]
    engine = Engine(model(raw))
    histories = [tokens(n, seed=n, eos=(n - 2,)) for n in (1, 2, 3, 17, 33)]
    lanes = [engine.open() for _ in histories]
    for lane, history in zip(lanes, histories, strict=True):
        engine.prefill(lane, history)
    for step in range(4):
        fed = {lane: (EOS if step == 1 and lane == lanes[2] else 7 * step + lane + 3) for lane in lanes}
        got = np.array(engine.step(fed))
        for lane, history, row in zip(lanes, histories, got, strict=True):
            history.append(fed[lane])
            np.testing.assert_allclose(row, expected_logits(history, raw)[-1], atol=TOLERANCE)
    assert engine.counters["decode_steps"] == 4 and engine.counters["batched_rows"] == 20


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("n", [1, 3, 4, 20])
def test_a_rewind_across_chunk_edges_forgets_and_remembers_exactly(family: str, n: int):
    raw = BASES[family]
    engine = Engine(model(raw))
    sequence = engine.open()
    engine.prefill(sequence, IDS[:24], chunk=5)
    engine.step({sequence: EOS})
    engine.rewind(sequence, n + 1)
    tail = [5, 40, 5]
    got = [np.array(engine.step({sequence: tail[0]})), np.array(engine.prefill(sequence, tail[1:], all_logits=True))]
    np.testing.assert_allclose(np.concatenate(got), expected_logits(IDS[: 24 - n] + tail, raw)[-3:], atol=TOLERANCE)


@pytest.mark.parametrize("family", BASES)
def test_padding_behind_a_span_leaves_no_trace(family: str):
    raw = BASES[family]
    served = model(raw)
    slots = served.make_slots()
    ids = IDS[:11]
    served.forward(mx.array([*ids[:8], EOS, 3]), [Span(0, 10, 0, slots, padding=2)], [])
    got = served.forward(mx.array(ids[8:]), [Span(0, 3, 8, slots)], None)
    np.testing.assert_allclose(np.array(got), expected_logits(ids, raw)[8:], atol=TOLERANCE)


@pytest.mark.parametrize("family", BASES)
def test_restored_slots_go_on_as_the_ones_they_were_taken_from(family: str):
    raw = BASES[family]
    served = model(raw)
    slots, others = served.make_slots(), served.make_slots()
    served.forward(mx.array(IDS[:24]), [Span(0, 24, 0, slots)], [])
    for slot, other in zip(slots, others, strict=True):
        snapshot = slot.snapshot()
        slot.rewind(9)  # a later change of the source does not show
        assert other.restore(snapshot, 24)
        assert other.length == 24
    served.forward(mx.array([4, 4, 4]), [Span(0, 3, 15, slots)], [])
    got = served.forward(mx.array(IDS[24:30]), [Span(0, 6, 24, others)], None)
    np.testing.assert_allclose(np.array(got), expected_logits(IDS[:30], raw)[24:], atol=TOLERANCE)
    for other in others:
        other.rewind(27)  # to before the place where the snapshot was taken
    got = served.forward(mx.array(IDS[3:6]), [Span(0, 3, 3, others)], None)
    np.testing.assert_allclose(np.array(got), expected_logits(IDS[:6], raw)[3:], atol=TOLERANCE)


@pytest.mark.parametrize("family", BASES)
def test_each_layer_has_two_kv_slots_of_latent_and_rope_width_and_the_ngrams_one_more(family: str):
    served = model(BASES[family])
    slots = served.make_slots()
    served.forward(mx.array(IDS), [Span(0, 37, 0, slots)], [])
    shapes = [[array.shape for array in slot.arrays()] for slot in slots]
    assert shapes[:4] == [[(1, 1, 256, 8), (1, 1, 256, 6)]] * 4
    assert shapes[4:] == ([[(256,)]] if family == "longcat_flash_ngram" else [])
    assert all(slot.length == 37 for slot in slots)
    latents = [np.array(slot.arrays()[0]) for slot in slots[:4]]
    assert all(np.abs(a - b).max() > 0.1 for i, a in enumerate(latents) for b in latents[:i])


@pytest.mark.parametrize("family", BASES)
def test_a_model_that_owns_its_state_ignores_what_spans_hand_it(family: str):
    raw = BASES[family]
    owned = model(raw).in_layout(SequenceStateLayout.MODEL_OWNED)
    assert not (owned.supports_batching or owned.supports_padded_prefill or owned.supports_snapshot_reuse)
    foreign = owned.make_slots()
    for handed in ([], foreign, [None]):
        owned.make_caches()
        owned.forward(mx.array(IDS[:9]), [Span(0, 9, 0, handed)], [])
        got = owned.forward(mx.array(IDS[9:12]), [Span(0, 3, 9, handed)], None)
        np.testing.assert_allclose(np.array(got), expected_logits(IDS[:12], raw)[9:], atol=TOLERANCE)
    assert all(slot.length == 0 for slot in foreign)
    owned.reset_runtime_state()
    assert owned.runtime_arrays() == []
    with pytest.raises(Refused, match="one sequence at a time"):
        owned.forward(mx.array([1, 2]), [Span(0, 1, 0, []), Span(1, 1, 0, [])], None)


@pytest.mark.parametrize("family", BASES)
def test_logits_in_bfloat16_are_close_with_a_float32_router(family: str):
    raw = BASES[family]
    served = model(raw, dtype=mx.bfloat16)
    got = served.forward(mx.array(IDS), [Span(0, 37, 0, served.make_slots())], None)
    assert got.dtype == mx.bfloat16
    assert served.layers[0].mlp.router.classifier.dtype == mx.float32
    expected = expected_logits(IDS, raw)
    near = np.abs(np.array(got.astype(mx.float32)) - expected).max(axis=1) < 0.15 * np.abs(expected).max()
    assert near.mean() > 0.8  # elsewhere a choice of experts hung by a thread


@pytest.mark.parametrize("family", BASES)
def test_large_forwards_take_the_host_paths_and_stay_exact(family: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activations, "HOST_ELEMENTS", 0)
    np.testing.assert_allclose(rows(Engine(model(BASES[family])), IDS, 16), expected_logits(IDS, BASES[family]), atol=TOLERANCE)
