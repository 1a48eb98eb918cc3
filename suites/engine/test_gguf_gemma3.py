"""GGUF files of architecture gemma3: config, folded norms, and SentencePiece vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Kind

from engine.checkpoint import load
from engine.checkpoint.gguf_header import read_header
from engine.engine import Engine
from engine.errors import CheckpointError, EngineError, Refused
from engine.models import gemma3
from engine.prompt import gguf_sentencepiece
from engine.prompt.gguf_vocabulary import from_gguf
from reference_models import gemma3 as reference
from reference_models import loading

PIECES = [
    ("<pad>", 3, 0.0),
    ("<eos>", 3, 0.0),
    ("<bos>", 3, 0.0),
    ("<unk>", 2, 0.0),
    ("\n\n", 4, 0.0),
    ("  ", 4, 0.0),
    ("<start_of_turn>", 3, 0.0),
    *((f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)),
    ("▁t", 1, -1.0),
    ("he", 1, -2.0),
    ("▁the", 1, -3.0),
    ("er", 1, -4.0),
    *((letter, 1, -10.0 - i) for i, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz")),
]
RAW: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": len(PIECES),
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 32,
    "rope_theta": 1e6,
    "sliding_window": 8,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def weights() -> dict[str, np.ndarray]:
    """Exact in float16; norms are small multiples of 1/64, so that 1 + w is exact too."""
    rng = np.random.default_rng(0)
    shapes = gemma3.parameters(gemma3.Config.from_dict(RAW))
    return {name: (rng.integers(-16, 16, shape) / 64).astype(np.float32) for name, shape in shapes.items()}


def write(path: Path, edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None, skip: str = "") -> Path:
    """`edit` adds keys, `skip` leaves out one."""
    writer = gguf.GGUFWriter(path, "gemma3")
    keys: dict[str, tuple[Any, Kind]] = {
        "block_count": (RAW["num_hidden_layers"], Kind.UINT32),
        "context_length": (256, Kind.UINT32),
        "embedding_length": (RAW["hidden_size"], Kind.UINT32),
        "feed_forward_length": (RAW["intermediate_size"], Kind.UINT32),
        "attention.head_count": (RAW["num_attention_heads"], Kind.UINT32),
        "attention.head_count_kv": (RAW["num_key_value_heads"], Kind.UINT32),
        "attention.key_length": (RAW["head_dim"], Kind.UINT32),
        "attention.value_length": (RAW["head_dim"], Kind.UINT32),
        "attention.layer_norm_rms_epsilon": (RAW["rms_norm_eps"], Kind.FLOAT32),
        "attention.sliding_window": (RAW["sliding_window"], Kind.UINT32),
        "rope.freq_base": (RAW["rope_theta"], Kind.FLOAT32),
    }
    for key, (value, kind) in keys.items():
        if key != skip:
            writer.add_key_value(f"gemma3.{key}", value, kind)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _, _ in PIECES])
    writer.add_token_types([kind for _, kind, _ in PIECES])
    writer.add_token_scores([score for _, _, score in PIECES])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_space_prefix(False)
    edit(writer)
    for name, array in weights().items():
        stem, _, kind = name.rpartition(".")
        layer = ""
        if stem.startswith("model.layers."):
            number, stem = stem.removeprefix("model.layers.").split(".", 1)
            layer = f"blk.{number}."
        stored = array + np.float32(1) if "norm" in name else array
        writer.add_tensor(f"{layer}{NAMES[stem]}.{kind}", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def key(name: str, value: Any, kind: Kind = Kind.UINT32) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_key_value(f"gemma3.{name}", value, kind)


def metadata(tmp_path: Path) -> dict[str, Any]:
    return dict(read_header(write(tmp_path / "m.gguf")).metadata)


def test_config_and_weights_are_those_of_the_checkpoint_that_the_file_was_made_of(tmp_path: Path):
    loaded = load(write(tmp_path / "m.gguf"), dtype="float32")
    config = gemma3.Config.from_dict(RAW | {"rms_norm_eps": float(np.float32(1e-6))})
    assert loaded.config == config and loaded.model_type == "gemma3_text"
    assert loaded.eos_token_ids == {1}
    for name, array in weights().items():
        np.testing.assert_array_equal(np.array(loaded.weights[name]), array, err_msg=name)


def test_engine_and_reference_read_one_model_from_the_file(tmp_path: Path):
    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    path = write(tmp_path / "m.gguf", scaled)
    config, tensors = loading.load(path)
    loaded, ids = load(path, dtype="float32"), [2, *range(100, 120)]
    engine = Engine(gemma3.Model(loaded.config, loaded.weights))
    got = np.array(engine.prefill(engine.open(), ids, all_logits=True, chunk=5))
    np.testing.assert_allclose(got, reference.logits(config, tensors, ids).numpy(), atol=1e-4)
    assert dict(loaded.config.rope)["full_attention"].factor == 8.0
    assert dict(loaded.config.rope)["sliding_attention"].rope_type == "default"


def test_the_largest_model_scales_queries_by_its_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.checkpoint.gguf_gemma3.LAYERS_OF_27B", 7)
    assert load(write(tmp_path / "m.gguf")).config.query_pre_attn_scalar == 32 / 2
    said = key("attention.scale", 0.5, Kind.FLOAT32)
    assert load(write(tmp_path / "n.gguf", said)).config.query_pre_attn_scalar == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("attention.sliding_window", "sliding_window"),
        ("attention.key_length", "value_length"),  # without it the other length is all that speaks of the head
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.layer_norm_rms_epsilon", "layer_norm_rms_epsilon"),
        ("block_count", "num_hidden_layers"),
    ],
)
def test_a_missing_key_is_a_one_line_error(tmp_path: Path, name: str, error: str):
    with pytest.raises(EngineError, match=error) as caught:
        load(write(tmp_path / "m.gguf", skip=name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (key("attention.value_length", 16), "value_length"),
        (key("attention.shared_kv_layers", 3), "shared_kv_layers"),
        (key("attention.scale", 0.0, Kind.FLOAT32), "scale"),
        (key("attention.scale", 3), "scale"),
        (key("attention.sliding_window_pattern", 0), "sliding_window_pattern"),
    ],
)
def test_what_cannot_be_served_is_a_one_line_error_that_names_the_key(tmp_path: Path, edit: Any, error: str):
    skip = "attention.value_length" if error == "value_length" else ""
    with pytest.raises(EngineError, match=error) as caught:
        load(write(tmp_path / "m.gguf", edit, skip=skip))
    assert "\n" not in str(caught.value)


def test_pieces_are_joined_by_score_and_the_rest_is_bytes(tmp_path: Path):
    tokenizer = from_gguf(metadata(tmp_path))

    def pieces(text: str) -> list[str]:
        return [PIECES[token][0] for token in tokenizer.encode(text, specials=False)]

    assert pieces(" the") == ["▁the"]
    assert pieces("he her") == ["he", "▁", "he", "r"]  # not h and er, whose score is lower
    assert pieces("xé") == ["x", "<0xC3>", "<0xA9>"]
    assert pieces("a\n\nb<start_of_turn>") == ["a", "\n\n", "b", "<start_of_turn>"]
    assert pieces("a   b") == ["a", "  ", "▁", "b"]
    assert tokenizer.encode("a")[0] == 2 and tokenizer.encode("a", specials=False) == tokenizer.encode("a")[1:]
    for text in ("the quick  fox\n\njumps é 🤯", " leading", "", "  "):
        assert tokenizer.decode(tokenizer.encode(text, specials=False)) == text


def test_a_vocabulary_may_put_a_space_before_every_text(tmp_path: Path):
    tokenizer = from_gguf(metadata(tmp_path) | {"tokenizer.ggml.add_space_prefix": True})
    ids = tokenizer.encode("the", specials=False)
    assert [PIECES[token][0] for token in ids] == ["▁the"] and tokenizer.decode(ids) == "the"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scores", None),
        ("scores", [1.0]),
        ("scores", ["a"] * len(PIECES)),
        ("token_type", [1]),
        ("tokens", ["a"] * len(PIECES)),
        ("tokens", []),
        ("bos_token_id", len(PIECES)),
        ("add_space_prefix", 3),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_an_error_naming_the_key(tmp_path: Path, name: str, value: Any):
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{name}") as caught:
        from_gguf(metadata(tmp_path) | {f"tokenizer.ggml.{name}": value})
    assert "\n" not in str(caught.value)


def test_a_piece_of_any_length_is_bounded(tmp_path: Path):
    changed = metadata(tmp_path)
    tokens = list(changed["tokenizer.ggml.tokens"])
    tokens[-1] = "z" * (gguf_sentencepiece.MAX_PIECE + 1)
    with pytest.raises(CheckpointError, match="limit"):
        from_gguf(changed | {"tokenizer.ggml.tokens": tokens})


def test_another_vocabulary_model_is_refused_by_name(tmp_path: Path):
    with pytest.raises(Refused, match="'t5'"):
        from_gguf(metadata(tmp_path) | {"tokenizer.ggml.model": "t5"})
