"""The shipped checkpoints: whole, small, in published form, better than guessing; and that training repeats bit by bit."""

from __future__ import annotations

import json
import math
import platform

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import reference_models
from reference_models import train, training_text
from reference_models.loading import load

FAMILIES = sorted(train.CONFIGS)
CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "R"},
]


def rendered(family, messages, **options):
    template = train.ROOT / family / "chat_template.jinja"
    return training_text.render(template, messages, training_text.SPECIAL[family][0], **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_is_whole_and_small(family):
    directory = train.ROOT / family
    config, weights = load(directory)
    assert config == train.CONFIGS[family]
    assert {name: tuple(t.shape) for name, t in weights.items()} == reference_models.find(family).parameters(config)
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 3_000_000
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if ".router." in name else torch.bfloat16)
        assert bool(tensor.isfinite().all()) and float(tensor.float().std()) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_holds_the_special_tokens_that_config_and_template_name(family):
    directory = train.ROOT / family
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    special = training_text.SPECIAL[family]
    assert [tokenizer.id_to_token(i) for i in range(len(special))] == special
    names = json.loads((directory / "tokenizer_config.json").read_text())
    ends = config["eos_token_id"]
    assert tokenizer.token_to_id(names["eos_token"]) in (ends if isinstance(ends, list) else [ends])
    assert tokenizer.token_to_id(names["bos_token"]) == config["bos_token_id"]
    text = rendered(family, CHAT)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_predicts_text_that_it_was_not_trained_on(family):
    directory = train.ROOT / family
    report = json.loads((directory / "training.json").read_text())
    config, weights = load(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    chats = training_text.documents()
    assert len(chats) > 1000
    text = "".join(rendered(family, chat) for chat in chats[-6:])
    tokens = tokenizer.encode(text, add_special_tokens=False).ids[:300]
    rows = reference_models.find(family).recompute(config, weights, tokens[:-1]).logits
    loss = float(torch.nn.functional.cross_entropy(rows, torch.tensor(tokens[1:])))
    assert loss < 0.65 * math.log(config["vocab_size"])
    assert abs(loss - report["held_out_loss"]) < 1.0
    assert report["held_out_loss"] < report["train_loss"] + 1.0
    assert 0 < report["top2_margin"]["least"] < report["top2_margin"]["median"]
    assert (report["router_margin"] is not None) == family.startswith("longcat")


@pytest.mark.parametrize("family", ["nemotron_nas", "longcat_flash_ngram"])
def test_training_repeats_bit_by_bit(family):
    first, tokenizer, report = train.train(family, 1)
    second, again, _ = train.train(family, 1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert tokenizer.to_str() == again.to_str()
    assert report["parameters"] == sum(t.numel() for t in load_file(train.ROOT / family / "model.safetensors").values())


def test_the_shipped_tokenizers_come_from_the_training_code():
    chats = training_text.documents()
    for family in FAMILIES:
        texts = [rendered(family, chat) for chat in chats]
        made = training_text.tokenizer(family, texts[: int(len(texts) * (1 - train.HELD_OUT))], 512)
        shipped = json.loads((train.ROOT / family / "training.json").read_text())
        if shipped["versions"]["python"].rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
            pytest.skip("the help topics of another Python version are another text")
        assert json.loads(made.to_str()) == json.loads((train.ROOT / family / "tokenizer.json").read_text())


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "llama",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "Q<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "R<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "nemotron_nas",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "Q<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "R<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("longcat_flash", "SYSTEM:S [Round 0] USER:Q ASSISTANT:A</longcat_s> [Round 1] USER:R ASSISTANT:"),
        (
            "longcat_flash_ngram",
            "<longcat_system>S<longcat_user>Q<longcat_assistant>A</longcat_s><longcat_user>R<longcat_assistant>",
        ),
    ],
)
def test_chat_in_the_format_of_the_family(family, text):
    assert rendered(family, CHAT, add_generation_prompt=True) == text


def test_nemotron_nas_thinking_is_switched_by_the_system_message():
    def prompt(system):
        return rendered("nemotron_nas", [{"role": "system", "content": system}, CHAT[1]], add_generation_prompt=True)

    assert prompt("Be short. /no_think").endswith("<think>\n\n</think>\n\n")
    assert "<|end_header_id|>\n\nBe short.<|eot_id|>" in prompt("Be short. /no_think")
    assert prompt("/think").endswith("assistant<|end_header_id|>\n\n")
    assert rendered("nemotron_nas", CHAT[1:2]).startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n<|eot_id|>"
    )


def test_nemotron_nas_history_drops_thinking_and_joins_tool_results():
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    text = rendered(
        "nemotron_nas",
        [
            CHAT[1],
            {"role": "assistant", "content": "<think>\nhm</think>\n\nLook:", "tool_calls": [call, call]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ],
    )
    assert (
        'Look:<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 1}}]</TOOLCALL><|eot_id|>'
        in text
    )
    assert text.endswith("tool<|end_header_id|>\n\n<TOOL_RESPONSE>[1, 2]</TOOL_RESPONSE><|eot_id|>")
