"""engine/layers/{rope,mla,moe}.py as LongCat uses them, piece by piece against float64 numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.layers.mla import MLA
from engine.layers.moe import GatedExperts, MixtureOfExperts, Router
from engine.layers.rope import Rope, RopeConfig, rotate_interleaved
from engine.layers.weights import Weights
from engine.models import longcat_flash
from engine.state import Span
from suites.engine.tiny_longcat import RAW, YARN, expected_experts, model, weights

HIDDEN, EXPERTS, ZERO = RAW["hidden_size"], RAW["n_routed_experts"], RAW["zero_expert_num"]


def test_interleaved_rope_rotates_neighbours_as_complex_numbers():
    positions = np.array([0, 1, 5, 100_000])
    x = np.random.default_rng(0).normal(size=(4, 2, 6)).astype(np.float32)
    cos, sin = Rope(RopeConfig(rope_theta=100.0), 6, interleaved=True).tables(positions)
    got = np.array(rotate_interleaved(mx.array(x), cos, sin))
    for row, position in enumerate(positions):
        for pair in range(3):
            turned = (x[row, :, 2 * pair] + 1j * x[row, :, 2 * pair + 1]) * np.exp(1j * position * 100.0 ** (-2 * pair / 6))
            np.testing.assert_allclose(got[row, :, 2 * pair], turned.real, atol=1e-6)
            np.testing.assert_allclose(got[row, :, 2 * pair + 1], turned.imag, atol=1e-6)


def attention(**changes: Any) -> MLA:
    raw = RAW | changes
    config = longcat_flash.Config.from_dict(raw)
    arrays = {name: mx.array(w) for name, w in weights(config, longcat_flash).items()}
    return MLA(config.attention, Weights(arrays).at("model.layers.0.self_attn.0"), slot=0)


@pytest.mark.parametrize("n", [1, 2, 24])
@pytest.mark.parametrize("changes", [{}, {"rope_scaling": YARN}, {"q_lora_rank": None}, {"v_head_dim": 9}])
def test_absorbed_and_expanded_attention_are_the_same(changes: dict[str, Any], n: int):
    mla = attention(**changes)
    rng = np.random.default_rng(1)
    for length in range(n, 25):
        q = mx.array(rng.normal(size=(3, n, 10)).astype(np.float32))
        c = mx.array(rng.normal(size=(length, 8)).astype(np.float32))
        k_rope = mx.array(rng.normal(size=(length, 6)).astype(np.float32))
        both = [np.array(path(q[..., :4], q[..., 4:], c, k_rope)) for path in (mla.absorbed, mla.expanded)]
        assert both[0].shape == (3, n, mla.config.v_head_dim)
        np.testing.assert_allclose(both[0], both[1], atol=1e-4 * np.abs(both[1]).max())


def test_decode_is_absorbed_and_a_prompt_is_expanded():
    mla = attention()
    assert all(mla.absorbs(1, length) for length in (2, 100, 10_000))
    assert not any(mla.absorbs(length, length) for length in (2, 100, 10_000))


def test_published_sizes_absorb_up_to_a_hundred_and_seventy_queries_on_a_long_context():
    raw = {"num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "hidden_size": 6144}
    raw |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    mla = MLA.__new__(MLA)
    mla.config = longcat_flash.Config.from_dict(RAW | raw).attention
    assert mla.absorbs(170, 100_000) and not mla.absorbs(171, 100_000)


def test_only_the_latent_is_scaled_in_the_cache_and_only_once():
    x = mx.array(np.random.default_rng(2).normal(size=(5, HIDDEN)).astype(np.float32))
    states = []
    for scaled in (True, False):
        served = model(RAW | {"mla_scale_kv_lora": scaled})
        slots = served.make_slots()
        cos, sin = served.rope.tables(np.arange(5))
        served.layers[0].self_attn[0](x, cos, sin, [Span(0, 5, 0, slots)])
        states.append([np.array(array)[:, :, :5] for array in slots[0].arrays()])
    (scaled_c, scaled_rope), (plain_c, plain_rope) = states
    np.testing.assert_allclose(scaled_c, plain_c * (HIDDEN / RAW["kv_lora_rank"]) ** 0.5, rtol=1e-5)
    np.testing.assert_array_equal(scaled_rope, plain_rope)


def router(logits: np.ndarray, correction: list[float], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Choices and weights of a router whose logits are given: the classifier is the identity."""
    arrays = {"classifier.weight": mx.eye(logits.shape[1]), "e_score_correction_bias": mx.array(correction)}
    if options.get("bias"):
        arrays["classifier.bias"] = mx.array(options.pop("bias"))
        options["bias"] = True
    made = Router(Weights(arrays), 2, **({"bias": False, "normalise": False, "scale": 1.0} | options))
    ids, weights = made(mx.array(logits.astype(np.float32)))
    order = np.argsort(np.array(ids), axis=1)
    return np.take_along_axis(np.array(ids), order, 1), np.take_along_axis(np.array(weights), order, 1)


LOGITS = np.log(np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]))


def test_the_correction_bias_chooses_and_does_not_weigh():
    ids, weights = router(LOGITS, [0.0, 0.0, 0.0, 0.25])
    assert ids.tolist() == [[0, 3], [2, 3]]
    np.testing.assert_allclose(weights, [[0.4, 0.1], [0.3, 0.4]], rtol=1e-6)


def test_a_very_negative_correction_bias_drops_an_expert_and_no_other():
    ids, weights = router(LOGITS, [-9.0, -8.0, -7.0, -9.5])
    assert ids.tolist() == [[1, 2], [1, 2]]
    np.testing.assert_allclose(weights, [[0.3, 0.2], [0.2, 0.3]], rtol=1e-6)


def test_weights_are_normalised_before_they_are_scaled_and_only_when_asked():
    _, weights = router(LOGITS, [0.0] * 4, scale=6.0)
    np.testing.assert_allclose(weights, [[2.4, 1.8], [1.8, 2.4]], rtol=1e-6)
    _, weights = router(LOGITS, [0.0] * 4, scale=6.0, normalise=True)
    np.testing.assert_allclose(weights, [[24 / 7, 18 / 7], [18 / 7, 24 / 7]], rtol=1e-6)


def test_the_router_bias_moves_the_scores():
    ids, weights = router(LOGITS, [0.0] * 4, bias=[0.0, 0.0, 0.0, float(np.log(9))])
    assert ids.tolist() == [[0, 3], [2, 3]]
    np.testing.assert_allclose(weights, [[0.4 / 1.8, 0.9 / 1.8], [0.3 / 4.2, 3.6 / 4.2]], rtol=1e-6)


def test_a_bfloat16_input_is_routed_in_float32():
    logits = np.array([[0.0, 1.0, 2.0, 3.0]])
    arrays = {"classifier.weight": mx.eye(4) * 1.001, "e_score_correction_bias": mx.array([0.0] * 4)}
    made = Router(Weights(arrays), 1, bias=False, normalise=False, scale=1.0)
    _, weights = made(mx.array(logits).astype(mx.bfloat16))
    expected = np.exp(logits * 1.001)[0, 3] / np.exp(logits * 1.001).sum()  # bfloat16 would round 1.001 to 1
    assert weights.dtype == mx.float32
    np.testing.assert_allclose(np.array(weights), [[expected]], rtol=1e-6)


def experts(x: np.ndarray, ids: np.ndarray, weights_: np.ndarray, hidden: int = HIDDEN) -> np.ndarray:
    """The layer's output for given choices."""
    rng = np.random.default_rng(3)
    shapes = {"gate_proj": (10, hidden), "up_proj": (10, hidden), "down_proj": (hidden, 10)}
    arrays = {f"{e}.{n}.weight": mx.array(rng.normal(size=s).astype(np.float32)) for e in range(4) for n, s in shapes.items()}
    layer = GatedExperts(Weights(arrays), 4)
    made = MixtureOfExperts(lambda _: (mx.array(ids), mx.array(weights_.astype(np.float32))), layer)  # type: ignore[arg-type]
    got = np.array(made(mx.array(x.astype(np.float32))))
    expected = np.zeros_like(x)
    for row, (chosen, shares) in enumerate(zip(ids, weights_, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            if expert >= 4:
                expected[row] += share * x[row]
                continue
            w = {name: np.array(arrays[f"{expert}.{name}.weight"], np.float64) for name in shapes}
            gate = w["gate_proj"] @ x[row]
            expected[row] += share * (w["down_proj"] @ (gate / (1 + np.exp(-gate)) * (w["up_proj"] @ x[row])))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    return got


@pytest.mark.parametrize("hidden", [24, 32, 40])
def test_zero_experts_return_their_input_at_any_width(hidden: int):
    rng = np.random.default_rng(4)
    x, share = rng.normal(size=(9, hidden)), rng.uniform(0.1, 1, size=(9, 2))
    got = experts(x, np.array([[4, 5]] * 9, np.int32), share, hidden)  # no expert with weights is chosen at all
    np.testing.assert_allclose(got, share.sum(1, keepdims=True) * x, atol=1e-5)


def test_tokens_with_and_without_zero_experts_mix():
    rng = np.random.default_rng(5)
    ids = np.array([[0, 4, 3], [5, 4, 2], [1, 0, 3], [4, 5, 3], [3, 2, 1], [0, 1, 5], [2, 5, 0]], np.int32)
    experts(rng.normal(size=(7, HIDDEN)), ids, rng.uniform(0.1, 1, size=ids.shape))


def test_one_token_and_one_expert():
    experts(np.random.default_rng(6).normal(size=(1, HIDDEN)), np.array([[2]], np.int32), np.array([[0.7]]))


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": True}, {"router_bias": True}, {"zero_expert_num": 0}])
def test_router_and_experts_together_equal_the_equations(changes: dict[str, Any]):
    raw = RAW | changes
    served = model(raw)
    drawn = weights(longcat_flash.Config.from_dict(raw), longcat_flash)
    x = np.random.default_rng(7).normal(size=(50, HIDDEN))
    expected = expected_experts(x, "model.layers.1.mlp", raw, {name: w.astype(np.float64) for name, w in drawn.items()})
    got = np.array(served.layers[1].mlp(mx.array(x.astype(np.float32))))
    np.testing.assert_allclose(got, expected, atol=2e-5)
