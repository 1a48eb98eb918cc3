"""The head for multi-token prediction: what names say of it, its logits, its own states, and checkpoints with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from engine.checkpoint import load
from engine.errors import CheckpointError, ConfigError
from engine.models import nemotron_h
from engine.models.nemotron_h_mtp import MTPHead, MTPNames, has_mtp_head, layer_kind, layer_prefixes
from engine.state import KVState, Span
from reference_models import nemotron_h as reference
from suites.engine.tiny_checkpoints import write_directory
from suites.engine.tiny_nemotron_h import (
    MTP_ATTENTION_MOE,
    RAW,
    config,
    expected_hidden,
    expected_mtp,
    model,
    tokens,
    weights,
)

IDS = tokens(20)
BESIDE = ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")


def test_has_mtp_head_tensors():
    assert has_mtp_head({"mtp.fc.weight"})
    assert has_mtp_head({"mtp.layers.3.eh_proj.weight"})
    assert not has_mtp_head({"mtp.layers.0.mixer.q_proj.weight", "backbone.layers.0.eh_proj.weight", "mtp.norm.weight"})
    assert not has_mtp_head(set())


def test_mtp_layer_prefixes():
    names = {f"mtp.layers.{i}.norm.weight" for i in (10, 2, 1)} | {"mtp.layers.2.mixer.up_proj.weight", "mtp.fc.weight"}
    assert layer_prefixes(names) == ["mtp.layers.1", "mtp.layers.2", "mtp.layers.10"]
    assert layer_prefixes({"mtp.layers.x.norm.weight", "backbone.layers.0.norm.weight"}) == []


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        (["q_proj.weight"], "*"),
        (["o_proj.weight", "k_proj.weight"], "*"),
        (["gate.weight"], "E"),
        (["experts.0.up_proj.weight", "shared_experts.up_proj.weight"], "E"),
        (["up_proj.weight", "down_proj.weight"], "-"),
    ],
)
def test_detect_mtp_layer_type(parts: list[str], kind: str):
    names = {f"mtp.layers.1.mixer.{part}" for part in parts} | {"mtp.layers.10.mixer.q_proj.weight"}
    assert layer_kind("mtp.layers.1", names) == kind


@pytest.mark.parametrize("part", ["in_proj.weight", "conv1d.bias"])
def test_detect_mtp_layer_type_refuses_recurrent_layers(part: str):
    names = {f"mtp.layers.1.mixer.{part}", "mtp.layers.1.mixer.q_proj.weight"}
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.1 .* is recurrent"):
        layer_kind("mtp.layers.1", names)


def test_detect_mtp_layer_type_needs_a_mixer():
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.1 .* has no mixer"):
        layer_kind("mtp.layers.1", {"mtp.layers.1.norm.weight", "mtp.layers.10.mixer.q_proj.weight"})


def test_both_spellings_of_a_head_are_found():
    inside = MTPNames.find(MTP_ATTENTION_MOE)
    assert inside is not None and inside.layers == (("mtp.layers.0", "*"), ("mtp.layers.1", "E"))
    assert (inside.fc, inside.enorm) == ("mtp.layers.0.eh_proj", "mtp.layers.0.enorm")
    assert (inside.hnorm, inside.norm) == ("mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm")
    beside = MTPNames.find({*BESIDE, "mtp.layers.1.mixer.up_proj.weight"})
    assert beside == MTPNames(
        (("mtp.layers.1", "-"),), *(name.removesuffix(".weight") for name in (BESIDE[1], BESIDE[2], BESIDE[0], BESIDE[3]))
    )
    shared = MTPNames.find({*BESIDE[:3], "mtp.shared_head.norm.weight", "mtp.layers.1.mixer.up_proj.weight"})
    assert shared is not None and shared.norm == "mtp.shared_head.norm"


@pytest.mark.parametrize("missing", ["enorm", "hnorm", "final_layernorm"])
def test_a_head_that_is_not_whole_is_an_error(missing: str):
    with pytest.raises(CheckpointError, match=rf"MTP head has none of .*{missing}"):
        MTPNames.find([name for name in MTP_ATTENTION_MOE if missing not in name])
    with pytest.raises(CheckpointError, match=r"mtp\.fc and no mtp\.layers"):
        MTPNames.find(BESIDE)


def test_new_caches_layout_with_attention_mtp_is_one_of_its_own_and_the_model_none_more():
    served = model(RAW, optional=MTP_ATTENTION_MOE)
    assert served.mtp is not None and [type(slot) for slot in served.mtp.make_slots()] == [KVState]
    assert [type(slot) for slot in served.make_slots()] == [type(slot) for slot in model(RAW).make_slots()]


def test_new_caches_layout_of_a_cacheless_mtp_is_none():
    served = model(RAW, optional=(*BESIDE, "mtp.layers.1.mixer.up_proj.weight", "mtp.layers.4.mixer.gate.weight"))
    assert served.mtp is not None and served.mtp.make_slots() == []
    hidden = mx.zeros((3, RAW["hidden_size"]))
    logits, after = served.mtp(hidden, mx.array([3, 4, 5]), [Span(0, 3, 0, [])])
    assert logits.shape == (3, RAW["vocab_size"]) and after.shape == hidden.shape


def trunk(served: nemotron_h.Model, ids: list[int]) -> mx.array:
    return served.hidden(mx.array(ids), [Span(0, len(ids), 0, served.make_slots())])


@pytest.fixture(scope="module")
def served() -> nemotron_h.Model:
    return model(RAW, optional=MTP_ATTENTION_MOE)


@pytest.fixture(scope="module")
def head(served: nemotron_h.Model) -> MTPHead:
    assert served.mtp is not None
    return served.mtp


@pytest.fixture(scope="module")
def expected() -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of the head at each position but the last."""
    c = config(RAW, MTP_ATTENTION_MOE)
    w = {name: array.astype(np.float64) for name, array in weights(c).items()}
    hidden = expected_mtp(expected_hidden(IDS, c, w)[:-1], IDS[1:], c, w)
    return hidden @ w["lm_head.weight"].T, hidden


def test_the_head_computes_its_equations(served: nemotron_h.Model, head: MTPHead, expected: Any):
    logits, hidden = head(trunk(served, IDS)[:-1], mx.array(IDS[1:]), [Span(0, 19, 0, head.make_slots())])
    np.testing.assert_allclose(np.array(logits), expected[0], atol=1e-4)
    np.testing.assert_allclose(np.array(hidden), expected[1], atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_the_head_in_chunks_on_its_own_cache_is_the_head_at_once(
    served: nemotron_h.Model, head: MTPHead, expected: Any, chunk: int
):
    hidden, slots, rows = trunk(served, IDS)[:-1], head.make_slots(), []
    for start in range(0, 19, chunk):
        n = min(chunk, 19 - start)
        part = slice(start, start + n)
        logits, after = head(hidden[part], mx.array(IDS[1:])[part], [Span(0, n, start, slots)], rows=[n - 1])
        rows.append((start + n - 1, np.array(logits)[0], np.array(after)[0]))
    for position, logits, after in rows:
        np.testing.assert_allclose(logits, expected[0][position], atol=1e-4)
        np.testing.assert_allclose(after, expected[1][position], atol=1e-4)


def test_the_head_takes_its_own_hidden_state_for_the_step_after(served: nemotron_h.Model, head: MTPHead):
    slots = head.make_slots()
    _, hidden = head(trunk(served, IDS)[:-1], mx.array(IDS[1:]), [Span(0, 19, 0, slots)], rows=[18])
    logits, _ = head(hidden, mx.array([7]), [Span(0, 1, 19, slots)])
    assert slots[0].length == 20 and np.isfinite(np.array(logits)).all()
    slots[0].rewind(1)
    again, _ = head(hidden, mx.array([7]), [Span(0, 1, 19, slots)])
    np.testing.assert_array_equal(np.array(again), np.array(logits))


def test_several_sequences_in_one_call_are_each_alone(served: nemotron_h.Model, head: MTPHead):
    lanes = [tokens(n + 1, seed=n) for n in (1, 9, 4)]
    hidden, spans, start = [], [], 0
    for lane in lanes:
        hidden.append(trunk(served, lane)[:-1])
        spans.append(Span(start, len(lane) - 1, 0, head.make_slots()))
        start += len(lane) - 1
    logits, _ = head(mx.concatenate(hidden), mx.array([token for lane in lanes for token in lane[1:]]), spans)
    alone = [
        head(h, mx.array(lane[1:]), [Span(0, len(lane) - 1, 0, head.make_slots())])[0]
        for h, lane in zip(hidden, lanes, strict=True)
    ]
    np.testing.assert_allclose(np.array(logits), np.array(mx.concatenate(alone)), atol=1e-4)


DRAFTS = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}


def arrays(optional: tuple[str, ...] = MTP_ATTENTION_MOE) -> dict[str, np.ndarray]:
    return weights(config(RAW, optional))


@pytest.mark.parametrize("pattern", ["*E", "E*-", "-", "**"])
def test_the_head_agrees_with_the_reference(pattern: str):
    raw = RAW | DRAFTS | {"mtp_hybrid_override_pattern": pattern}
    optional = tuple(reference.mtp_parameters(raw))
    served, torch_weights = model(raw, optional=optional), weights(config(raw, optional))
    tensors = {name: torch.from_numpy(w) for name, w in torch_weights.items()}
    hidden = reference.hidden_states(raw, tensors, IDS)
    expected = reference.mtp(raw, tensors, hidden[:-1], IDS[1:])
    assert served.mtp is not None
    logits, after = served.mtp(trunk(served, IDS)[:-1], mx.array(IDS[1:]), [Span(0, 19, 0, served.mtp.make_slots())])
    np.testing.assert_allclose(np.array(logits), expected.logits.numpy(), atol=1e-4)
    np.testing.assert_allclose(np.array(after), expected.hidden.numpy(), atol=1e-4)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_checkpoint_with_a_head_loads_it(tmp_path: Path, prefix: str, expected: Any):
    path = write_directory(tmp_path, RAW | DRAFTS, {prefix + name: w for name, w in arrays().items()})
    loaded = load(path, dtype="float32")
    served = nemotron_h.Model(loaded.config, loaded.weights)
    assert served.mtp is not None
    logits, _ = served.mtp(trunk(served, IDS)[:-1], mx.array(IDS[1:]), [Span(0, 19, 0, served.mtp.make_slots())])
    np.testing.assert_allclose(np.array(logits), expected[0], atol=1e-4)


def test_a_head_is_loaded_whatever_the_config_counts(tmp_path: Path):
    """transformers writes a pattern and a count of 0 for models without a head."""
    raw = RAW | {"num_nextn_predict_layers": 0, "mtp_layers_block_type": ["full_attention", "mlp"]}
    loaded = load(write_directory(tmp_path, raw, arrays()), dtype="float32")
    assert nemotron_h.Model(loaded.config, loaded.weights).mtp is not None


def test_a_checkpoint_whose_head_was_dropped_loads_without(tmp_path: Path):
    loaded = load(write_directory(tmp_path, RAW | DRAFTS, arrays(())), dtype="float32")
    assert nemotron_h.Model(loaded.config, loaded.weights).mtp is None


@pytest.mark.parametrize(
    "changes", [{"mtp_hybrid_override_pattern": "E*"}, {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": ["mlp"]}]
)
def test_a_head_of_other_layers_than_the_config_says_is_an_error(tmp_path: Path, changes: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"mtp_layers_block_type lists layers .*, the MTP head in the files has \*E"):
        load(write_directory(tmp_path, RAW | DRAFTS | changes, arrays()))


def test_a_bad_pattern_of_a_head_is_a_bad_field():
    with pytest.raises(ConfigError, match="mtp_hybrid_override_pattern must be"):
        nemotron_h.Config.from_dict(RAW | DRAFTS | {"mtp_hybrid_override_pattern": "?"})


def test_a_head_with_experts_needs_their_fields(tmp_path: Path):
    raw = {k: v for k, v in RAW.items() if k != "n_routed_experts"} | {"hybrid_override_pattern": "M*-"}
    with pytest.raises(ConfigError, match="n_routed_experts is missing, and the MTP head in the files has experts"):
        load(write_directory(tmp_path, raw, arrays()))


@pytest.mark.parametrize(
    "name", ["mtp.layers.0.mixer.v_proj.weight", "mtp.layers.1.mixer.experts.3.up_proj.weight", "mtp.layers.1.norm.weight"]
)
def test_a_missing_tensor_of_the_head_is_an_error_that_names_it(tmp_path: Path, name: str):
    with pytest.raises(CheckpointError, match=rf"{name}.*missing"):
        load(write_directory(tmp_path, RAW, {n: w for n, w in arrays().items() if n != name}))


@pytest.mark.parametrize("name", ["mtp.layers.1.enorm.weight", "mtp.embed_tokens.weight", "mtp.layers.0.mixer.q_norm.weight"])
def test_any_other_tensor_of_the_head_is_an_error_that_names_it(tmp_path: Path, name: str):
    with pytest.raises(CheckpointError, match=rf"{name}.*not part of the model"):
        load(write_directory(tmp_path, RAW, arrays() | {name: np.zeros((2, 2), np.float32)}))


def test_tensors_of_a_head_without_its_projection_are_not_part_of_the_model(tmp_path: Path):
    named = {n: w for n, w in arrays().items() if "eh_proj" not in n}
    with pytest.raises(CheckpointError, match=r"mtp\..*not part of the model"):
        load(write_directory(tmp_path, RAW, named))
