"""The shipped nemotron_h, converted to ModelOpt's layout by our own writer: the reference decodes it, the engine loads it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.checkpoint.convert import convert
from harness.oracle import Oracle
from harness.targets.engine import EngineTarget
from reference_models import nemotron_h, train, training_text
from reference_models.loading import load

SHIPPED = train.ROOT / "nemotron_h"
K = 3.0
TOKENS = 160
MODES = {  # most nats a token that the loss may grow by; measured: 0.03 and 0.01
    "nvfp4": 0.2,
    "mxfp8": 0.05,
}


@pytest.fixture(scope="module", params=MODES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("converted") / request.param
    convert(str(SHIPPED), out, mode=request.param, layout="modelopt", policy=None, group_size=None)
    return request.param, out


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    chats = training_text.documents()[-8:]
    text = "".join(training_text.render(SHIPPED / "chat_template.jinja", chat, "") for chat in chats)
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode(text, add_special_tokens=False).ids[:TOKENS]


def test_the_files_have_modelopt_s_names_dtypes_and_plan(converted: tuple[str, Path]) -> None:
    mode, directory = converted
    tensors = load_file(directory / "model.safetensors")
    name = "backbone.layers.1.mixer.experts.0.up_proj"
    assert tensors[f"{name}.weight"].dtype in (torch.uint8, torch.float8_e4m3fn) and f"{name}.weight_scale" in tensors
    assert (f"{name}.weight_scale_2" in tensors) == (tensors[f"{name}.weight"].dtype is torch.uint8)
    assert tensors["backbone.layers.1.mixer.gate.weight"].dtype is torch.float32
    config = json.loads((directory / "config.json").read_text())
    assert (directory / "hf_quant_config.json").is_file() or config["quantization_config"]["quant_method"] == "modelopt"
    small, large = (
        sum(t.numel() * t.element_size() for t in load_file(d / "model.safetensors").values()) for d in (directory, SHIPPED)
    )
    assert small < {"nvfp4": 0.6, "mxfp8": 0.7}[mode] * large


def test_the_engine_computes_what_the_reference_decodes(converted: tuple[str, Path], tokens: list[int]) -> None:
    _, directory = converted
    oracle = Oracle(directory)
    noise = oracle.noise(tokens, "float32")
    session = EngineTarget().load(directory, dtype="float32", layout="dense").start()
    session.open("a")
    first = session.feed("a", tokens[:100], all_rows=True, chunk=None)
    rows = np.concatenate([first, *(session.step({"a": token}) for token in tokens[100:])])
    assert np.abs(rows - oracle.rows(tokens)).max() <= K * noise.max.max()


def test_a_converted_model_still_reads_english(converted: tuple[str, Path], tokens: list[int]) -> None:
    mode, directory = converted
    losses = []
    for source in (SHIPPED, directory):
        config, weights = load(source)
        rows = nemotron_h.logits(config, weights, tokens[:-1], dtype=torch.float32)
        losses.append(float(torch.nn.functional.cross_entropy(rows, torch.tensor(tokens[1:]))))
    assert losses[1] < losses[0] + MODES[mode], losses


def test_the_mtp_head_is_converted_too_and_still_guesses(converted: tuple[str, Path], tokens: list[int]) -> None:
    _, directory = converted
    config, weights = load(directory)
    assert nemotron_h.mtp_parameters(config).keys() <= weights.keys()
    hidden = nemotron_h.hidden_states(config, weights, tokens[:-1], dtype=torch.float32)
    guess = nemotron_h.mtp(config, weights, hidden[:-1], tokens[1:-1]).logits.argmax(-1)
    own = nemotron_h.head(config, weights, hidden)[1:].argmax(-1)
    assert float((guess == own).double().mean()) > 0.4
