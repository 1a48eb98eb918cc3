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
from reference_models import nemotron_h, train, training_text
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
    assert {name: tuple(t.shape) for name, t in weights.items()} == train.parameters(config)
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 3_000_000
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if name.endswith(train.FLOAT32) else torch.bfloat16)
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
    assert (report["router_margin"] is not None) == (family == "nemotron_h" or family.startswith("longcat"))


def test_nemotron_h_guesses_a_token_further_and_often_as_the_model_chooses():
    """Where the MTP head agrees with the model's own choice a draft of it is accepted."""
    directory = train.ROOT / "nemotron_h"
    report = json.loads((directory / "training.json").read_text())
    config, weights = load(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "".join(rendered("nemotron_h", chat) for chat in training_text.documents()[-6:])
    tokens = tokenizer.encode(text, add_special_tokens=False).ids[:200]
    hidden = nemotron_h.hidden_states(config, weights, tokens[:-1])
    guess = nemotron_h.mtp(config, weights, hidden[:-1], tokens[1:-1]).logits
    loss = float(torch.nn.functional.cross_entropy(guess, torch.tensor(tokens[2:])))
    own = nemotron_h.head(config, weights, hidden)[1:].argmax(-1)
    assert loss < 0.75 * math.log(config["vocab_size"])
    agree = float((guess.argmax(-1) == own).double().mean())
    assert agree > 0.25 and abs(agree - report["guesses_agree"]) < 0.2


@pytest.mark.parametrize("family", ["nemotron_nas", "longcat_flash_ngram", "nemotron_h"])
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
            "nemotron_h",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think></think>A<|im_end|>\n"
            "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
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


def test_nemotron_h_thinking_is_an_option_and_history_loses_it():
    assert rendered("nemotron_h", CHAT[1:2], add_generation_prompt=True, enable_thinking=False).endswith(
        "assistant\n<think></think>"
    )
    assert rendered("nemotron_h", CHAT[1:2]).startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\nQ")
    thought = {"role": "assistant", "content": "A", "reasoning_content": "hm"}
    assert "<think>\nhm\n</think>\nA<|im_end|>" in rendered("nemotron_h", [CHAT[1], thought])
    assert "assistant\n<think></think>A<|im_end|>" in rendered("nemotron_h", [CHAT[1], thought, CHAT[3]])
    assert "hm" in rendered("nemotron_h", [CHAT[1], thought, CHAT[3]], truncate_history_thinking=False)


def test_nemotron_h_calls_are_written_out_and_tool_results_share_a_turn():
    call = {"function": {"name": "f", "arguments": {"x": 1, "y": "z"}}}
    tool = {"name": "f", "description": "d ", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}
    turns = [
        CHAT[1],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = rendered("nemotron_h", turns, tools=[{"type": "function", "function": tool}])
    assert (
        "<function>\n<name>f</name>\n<description>d</description>\n<parameters>\n<parameter>\n<name>x</name>\n<type>integer</type>"
        in text
    )
    assert (
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\nz\n</parameter>\n</function>\n</tool_call><|im_end|>"
        in text
    )
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\n"
    assert text.endswith(f"<|im_start|>user\n{results}<|im_end|>\n")
