"""Both LongCats against mlx-lm on the same files. It knows what transformers leaves out: norm_topk_prob and the router bias.

Known disagreements:

- eps of the two latent norms: mlx-lm 1e-5, the model 1e-6. With 1e-6 set on mlx-lm's norms the two agree, and with 1e-5 in
  the reference they agree as well.
- EOS in the n-gram context: mlx-lm lets the context run through it. Without EOS ids in its config the reference agrees.
- the router's dtype: mlx-lm multiplies in the dtype of the model, the model in float32. It shows in bfloat16 only.
- scale switches that are off, and q_lora_rank null: mlx-lm leaves the attribute unset and raises; with it set the two agree.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference_models
from suites.oracles.comparison import Comparison
from suites.oracles.mlx_lm_models import load, logits, mx

PLAIN = ["plain", "no_zero_experts", "yarn", "norm_topk", "router_bias"]
NGRAM = ["n2_k1", "n3_k2", "n4_k1", "n4_k2", "wide_hash"]
WITH_EOS = ["eos_in_prompt", "eos_at_chunk_edge"]


def attentions(model):
    return [attention for layer in model.layers for attention in layer.self_attn]


def with_latent_eps(model, eps=1e-6):
    for attention in attentions(model):
        attention.kv_a_layernorm.eps = eps
        if attention.q_lora_rank is not None:
            attention.q_a_layernorm.eps = eps
    return model


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("id", [f"longcat_flash/{n}" for n in PLAIN] + [f"longcat_flash_ngram/{n}" for n in NGRAM])
def test_reference_agrees_once_the_latent_eps_is_that_of_the_model(written, id, seed):
    directory, tokens = written(id, seed)
    Comparison(directory, tokens).agree(logits(with_latent_eps(load(directory)), tokens), "mlx-lm, latent eps 1e-6")


@pytest.mark.parametrize(
    ("id", "least", "most"),
    [  # measured: 0.079, 0.073, 0.040: the latents of the cases are quiet, so that this eps shows
        ("longcat_flash/plain", 0.01, 0.5),
        ("longcat_flash/norm_topk", 0.01, 0.5),
        ("longcat_flash_ngram/n4_k2", 0.01, 0.5),
    ],
)
def test_latent_eps_of_mlx_lm_is_ten_times_the_model_s(written, monkeypatch, id, least, most):
    directory, tokens = written(id)
    theirs = logits(load(directory), tokens)
    Comparison(directory, tokens).differ(theirs, "mlx-lm has latent eps 1e-5", least, most)
    monkeypatch.setattr(reference_models.find(id.partition("/")[0]), "_LATENT_EPS", 1e-5)
    Comparison(directory, tokens).agree(theirs, "mlx-lm, latent eps 1e-5 in the reference")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", WITH_EOS)
def test_mlx_lm_lets_the_context_run_through_eos(written, name, seed):
    directory, tokens = written(f"longcat_flash_ngram/{name}", seed)
    theirs = logits(with_latent_eps(load(directory)), tokens)
    Comparison(directory, tokens).differ(theirs, "mlx-lm has no EOS rule", 0.5, 20.0)
    Comparison(directory, tokens, {"eos_token_id": None}).agree(theirs, "mlx-lm, no EOS in the reference")
    first = tokens.index(2)
    whole = Comparison(directory, tokens)
    before = np.abs(theirs[: first + 1] - whole.truth[: first + 1]).max()
    assert before <= 3 * whole.noise, "rows up to the first EOS do not depend on the rule"


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [("float32", 0.0, 3e-6), ("bfloat16", 4e-3, 0.1)],  # measured: 7e-7 and 2.2e-2, relative to the weight
)
def test_router_of_mlx_lm_works_in_the_dtype_of_the_model(written, dtype, least, most):
    """On the router alone, since mlx has no expert product in bfloat16 on CPU; the input is exact in both dtypes."""
    directory, _ = written("longcat_flash/plain")
    _, weights = reference_models.loading.load(directory)
    router = load(directory).layers[0].mlp.router
    router.set_dtype(getattr(mx, dtype))
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).double()
    scores = (x @ weights["model.layers.0.mlp.router.classifier.weight"].double().T).softmax(-1)
    chosen, theirs = router(mx.array(x.float().numpy()).astype(getattr(mx, dtype)))
    ours = 2.5 * scores.gather(1, torch.from_numpy(np.array(chosen).astype(np.int64)))
    error = (torch.from_numpy(np.array(theirs.astype(mx.float32))).double() / ours - 1).abs().max()
    assert least <= float(error) <= most


@pytest.mark.parametrize("name", ["q_unscaled", "q_lora_null"])
def test_switches_that_are_off_break_mlx_lm_and_agree_once_set(written, name):
    directory, tokens = written(f"longcat_flash/{name}")
    if name == "q_lora_null":
        with pytest.raises(TypeError):  # hidden_size / None
            load(directory)
        (directory / "config.json").write_text(
            (directory / "config.json").read_text().replace('"mla_scale_q_lora": true', '"mla_scale_q_lora": false')
        )
    model = with_latent_eps(load(directory))
    with pytest.raises(AttributeError, match="mla_scale"):
        logits(model, tokens)
    for attention in attentions(model):
        for switch in ("mla_scale_q_lora", "mla_scale_kv_lora"):
            if not hasattr(attention, switch):
                setattr(attention, switch, None)
    Comparison(directory, tokens).agree(logits(model, tokens), f"mlx-lm, {name} with the switches set")
