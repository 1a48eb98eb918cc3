"""What the small checkpoints are trained on: Python's own help topics, as chats, and a tokenizer made from them."""

from __future__ import annotations

import functools
import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import jinja2.sandbox
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

__all__ = ["SPECIAL", "documents", "render", "tokenizer"]

_LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_LONGCAT = ["<longcat_unk>", "<longcat_s>", "</longcat_s>", "<longcat_pad>"]
SPECIAL: dict[str, list[str]] = {  # in the order of their ids, from 0
    "llama": _LLAMA,
    "nemotron_h": [
        *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ],
    "nemotron_nas": [*_LLAMA, "<think>", "</think>"],
    "longcat_flash": [*_LONGCAT, "<longcat_tool_call>", "</longcat_tool_call>"],
    "longcat_flash_ngram": [
        *_LONGCAT,
        "<longcat_system>",
        "<longcat_user>",
        "<longcat_assistant>",
        "<longcat_tool>",
        "<longcat_tool_declare>",
        "</longcat_tool_declare>",
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
    ],
}
_SYSTEM = "You explain Python."


def documents() -> list[list[dict[str, str]]]:
    """One chat for each paragraph of each topic, in a fixed order; every third has a system message."""
    chats: list[list[dict[str, str]]] = []
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        for number, paragraph in enumerate(part.strip() for part in text.split("\n\n")):
            if len(paragraph) < 40 or not paragraph.isascii():
                continue
            chat = [{"role": "user", "content": f"{topic} {number}"}, {"role": "assistant", "content": paragraph}]
            chats.append([{"role": "system", "content": _SYSTEM}, *chat] if len(chats) % 3 == 0 else chat)
    return chats


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # jinja's own escapes for HTML
    return environment.from_string(template)


def render(template: Path, messages: list[dict[str, str]], bos: str, **options: Any) -> str:
    """The text of a chat in a checkpoint's template."""
    return _compiled(template.read_text("utf-8")).render(messages=messages, bos_token=bos, **options)


def tokenizer(family: str, texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of `vocab` entries, the special tokens first; Llama's puts its begin of text before plain text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL[family],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    bos = SPECIAL[family][0]
    if family in ("llama", "nemotron_nas"):
        made.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))])
    return made
