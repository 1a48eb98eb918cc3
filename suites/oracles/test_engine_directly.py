"""Our engine against third implementations on the same files, no reference between them: families of which there are oracles.

The disagreements are those of the references (test_transformers_longcat_flash, test_mlx_lm_nemotron_nas, test_mlx_lm_longcat):
an oracle is asked for what it computes as the model does.
"""

from __future__ import annotations

import shutil

import pytest

from suites.oracles import engine_models
from suites.oracles.comparison import Comparison


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["plain", "no_zero_experts", "yarn"])
def test_longcat_flash_as_transformers_saved_it(written, tmp_path, name, seed):
    pytest.importorskip("transformers", minversion="5.24", reason="needs the transformers extra")
    from suites.oracles.test_transformers_longcat_flash import logits, model, padded

    directory, tokens = written(f"longcat_flash/{name}", seed)
    loaded = model(padded(directory, tmp_path / "padded"))
    loaded.save_pretrained(tmp_path / "saved")
    theirs = logits(loaded, tokens)
    comparison = Comparison(tmp_path / "saved", tokens)
    what = f"transformers, {name}"
    comparison.agree_with(engine_models.logits(tmp_path / "saved", tokens), theirs, f"engine and {what}")
    comparison.agree_with(engine_models.stepped(tmp_path / "saved", tokens, 9), theirs, f"engine in steps and {what}")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["all_attention", "no_op_first", "mixed_gqa", "linear_first", "linear_between"])
def test_nemotron_nas_as_mlx_lm_computes_it(written, tmp_path, name, seed):
    pytest.importorskip("mlx_lm", reason="needs the mlx-lm extra")
    from suites.oracles.mlx_lm_models import load, logits
    from suites.oracles.test_mlx_lm_nemotron_nas import renamed

    directory, tokens = written(f"nemotron_nas/{name}", seed)
    theirs = logits(load(renamed(directory, tmp_path / "renamed")), tokens)
    comparison = Comparison(directory, tokens)
    comparison.agree_with(engine_models.logits(directory, tokens), theirs, f"engine and mlx-lm, {name}")
    comparison.agree_with(engine_models.stepped(directory, tokens, 9), theirs, f"engine in steps and mlx-lm, {name}")


@pytest.mark.parametrize("name", ["n3_k2", "n4_k2", "wide_hash"])
def test_longcat_flash_ngram_as_mlx_lm_computes_it(written, name):
    pytest.importorskip("mlx_lm", reason="needs the mlx-lm extra")
    from suites.oracles.mlx_lm_models import load, logits
    from suites.oracles.test_mlx_lm_longcat import with_latent_eps

    directory, tokens = written(f"longcat_flash_ngram/{name}")
    theirs = logits(with_latent_eps(load(directory)), tokens)
    comparison = Comparison(directory, tokens)
    comparison.agree_with(engine_models.logits(directory, tokens), theirs, f"engine and mlx-lm, {name}")
    comparison.agree_with(engine_models.chunked(directory, tokens, 5), theirs, f"engine in pieces and mlx-lm, {name}")


@pytest.mark.parametrize("name", ["gqa", "tied", "llama3_rope", "yarn"])
def test_llama_as_transformers_computes_it(written, tmp_path, name):
    transformers = pytest.importorskip("transformers", minversion="5.24", reason="needs the transformers extra")
    import torch

    directory, tokens = written(f"llama/{name}")
    shutil.copytree(directory, tmp_path / "own")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        theirs = model.eval()(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    comparison = Comparison(directory, tokens)
    comparison.agree_with(engine_models.logits(directory, tokens), theirs, f"engine and transformers, {name}")


def test_a_directory_that_transformers_saved_with_its_tokenizer_loads(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.24", reason="needs the transformers extra")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from engine.checkpoint import load

    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "1000000000000000019884624838656" in (tmp_path / "tokenizer_config.json").read_text(
        "utf-8"
    )  # no limit, in its words
    loaded = load(tmp_path)
    text = "Why is the sky blue, naïve one?"
    tokens = loaded.tokenizer.encode(text)
    assert tokens == tokenizer.encode(text) and loaded.tokenizer.decode(tokens) == text
    assert loaded.chat_template == tokenizer.chat_template and set(loaded.eos_token_ids) == {1}
