"""GGUF files: what loads, and that whatever is wrong with them is a one-line EngineError."""

import contextlib
import struct

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quantisation
from gguf import GGUFValueType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checkpoint import load
from engine.checkpoint.gguf_header import SUPPORTED, GgufHeader, read_header
from engine.checkpoint.read import read_tensor
from engine.checkpoint.tensors import TensorHeader
from engine.errors import CheckpointError, ConfigError, EngineError, Refused
from suites.engine.tiny_checkpoints import CONFIG, tensors, write_gguf

UP = "blk.0.ffn_up.weight"


def failure(path, kind=EngineError):
    with pytest.raises(kind) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


def key(name, value, kind=Kind.UINT32):
    return lambda writer: writer.add_key_value(name, value, kind)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf").read_bytes()


@pytest.fixture
def damaged(tmp_path, whole):
    """Writes the whole file with the first occurrence of `old` replaced by `new`, at `skip` bytes after it where given."""

    def write(after, new, skip=0):
        position = whole.index(after) + len(after) + skip
        path = tmp_path / "damaged.gguf"
        path.write_bytes(whole[:position] + new + whole[position + len(new) :])
        return path

    return write


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def test_weights_config_and_special_tokens_come_from_the_file(tmp_path):
    loaded = load(write_gguf(tmp_path / "m.gguf"))
    for name, array in tensors().items():
        np.testing.assert_array_equal(np.array(loaded.weights[name]), array, err_msg=name)
    assert set(loaded.weights) == set(tensors())
    config = loaded.config
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim, config.vocab_size) == (32, 2, 8, 64)
    assert config.rms_norm_eps == pytest.approx(1e-5) and not config.tie_word_embeddings
    assert loaded.eos_token_ids == {2} and loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "quantisation",
    [Quantisation.Q4_0, Quantisation.Q4_1, Quantisation.Q8_0, Quantisation.F16, Quantisation.BF16, Quantisation.F32],
)
def test_dequantised_weights_equal_those_of_the_gguf_package(tmp_path, quantisation):
    arrays = tensors()
    for array in arrays.values():
        array *= np.float32(1.37)
    path = write_gguf(tmp_path / "m.gguf", arrays, lambda name, array: quantisation if array.ndim == 2 else Quantisation.F32)
    loaded = load(path, dtype="float32")
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        expected = gguf.dequantize(gguf.quantize(arrays[name], quantisation), quantisation)
        np.testing.assert_array_equal(np.array(loaded.weights[name]), expected.reshape(arrays[name].shape), err_msg=name)


@pytest.mark.parametrize("name", ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
@pytest.mark.parametrize("at_once", [None, 24])
def test_types_that_the_gguf_package_dequantises_are_read_in_pieces_without_a_seam(tmp_path, monkeypatch, name, at_once):
    kind = Quantisation[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (9 * 512 // block, size), np.uint8)  # no scale is NaN
    if at_once is not None:
        monkeypatch.setattr("engine.checkpoint.read._BLOCKS_AT_ONCE", at_once)
    path = tmp_path / "blocks"
    path.write_bytes(b"before" + blocks.tobytes() + b"after")
    got = np.array(read_tensor(TensorHeader("w", name, (9, 512), path, 6, blocks.nbytes), "float32"))
    np.testing.assert_array_equal(got, gguf.dequantize(blocks, kind).reshape(9, 512))


def test_sizes_of_blocks_are_those_of_the_gguf_package():
    for number, (name, block, size) in SUPPORTED.items():
        assert Quantisation(number).name == name and gguf.GGML_QUANT_SIZES[Quantisation(number)] == (block, size)


def test_many_blocks_are_read_in_pieces_without_a_seam(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.checkpoint.read._BLOCKS_AT_ONCE", 7)
    test_dequantised_weights_equal_those_of_the_gguf_package(tmp_path, Quantisation.Q4_1)


def test_a_file_without_output_weight_has_a_tied_head(tmp_path):
    arrays = tensors()
    del arrays["lm_head.weight"]
    loaded = load(write_gguf(tmp_path / "m.gguf", arrays))
    assert loaded.config.tie_word_embeddings and set(loaded.weights) == set(arrays)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_become_the_scaling_they_were_made_from(tmp_path, factor):
    wavelengths = 2 * np.pi * 500000.0 ** (2 * np.arange(4) / 8)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    edit = [key("llama.rope.dimension_count", 8), key("llama.rope.freq_base", 500000.0, Kind.FLOAT32)]
    arrays = tensors() | {"rope_freqs.weight": divisors}
    loaded = load(write_gguf(tmp_path / "m.gguf", arrays, edit=lambda w: [e(w) for e in edit], skip="llama.rope.freq_base"))
    assert loaded.config.rope.rope_type == "llama3" and loaded.config.rope.factor == factor
    arrays["rope_freqs.weight"] = divisors + np.float32(0.01)
    path = write_gguf(tmp_path / "n.gguf", arrays, edit=lambda w: [e(w) for e in edit], skip="llama.rope.freq_base")
    assert "rope_freqs" in failure(path, Refused)


def test_rope_scaling_keys_are_read(tmp_path):
    def edit(writer):
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_uint32("llama.rope.scaling.original_context_length", 64)

    rope = load(write_gguf(tmp_path / "m.gguf", edit=edit)).config.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 64)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (key("llama.rope.scaling.type", "longrope", Kind.STRING), "longrope"),
        (key("llama.expert_count", 8), "expert_count"),
        (key("llama.attention.sliding_window", 128), "sliding_window"),
        (key("llama.attention.value_length", 16), "value_length"),
        (key("llama.rope.dimension_count", 4), "q_proj"),
        (key("split.count", 2), "parts"),
        (key("llama.attention.clamp_kqv", 1.0, Kind.FLOAT32), "clamp_kqv"),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(tmp_path, edit, named):
    assert named in failure(write_gguf(tmp_path / "m.gguf", edit=edit))


def test_another_architecture_is_refused_by_name(damaged):
    assert "llamb" in failure(damaged(b"general.architecture" + u32(8) + u64(5), b"llamb"), Refused)


@pytest.mark.parametrize("number", [9, 15, 16, 24, 34, 39])
def test_other_quantisations_are_refused_with_their_name_and_a_remedy(damaged, number):
    text = failure(damaged(UP.encode() + u32(2) + u64(32) + u64(64), u32(number)), Refused)
    assert Quantisation(number).name in text and UP in text and "requantise" in text


@pytest.mark.parametrize("number", [4, 5, 99, 2**32 - 1])
def test_undefined_tensor_types_are_errors(damaged, number):
    assert str(number) in failure(damaged(UP.encode() + u32(2) + u64(32) + u64(64), u32(number)), CheckpointError)


@pytest.mark.parametrize("part", [0, 3, 4, 8, 20, 24, 0.02, 0.1, 0.5, 0.99])
def test_a_gguf_file_cut_anywhere_is_a_one_line_error(tmp_path, whole, part):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: part if isinstance(part, int) else int(part * len(whole))])
    assert "cut.gguf" in failure(path, CheckpointError)


@pytest.mark.parametrize("position", [8, 16])
@pytest.mark.parametrize("count", [0, 10**6, 2**31, 2**63, 2**64 - 1])
def test_absurd_counts_are_errors_and_allocate_nothing(tmp_path, whole, position, count):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:position] + u64(count) + whole[position + 8 :])
    failure(path)


@pytest.mark.parametrize("length", [2**20 + 1, 2**40, 2**64 - 1])
@pytest.mark.parametrize("after", [b"tokenizer.ggml.model" + u32(8), b"tokenizer.ggml.tokens" + u32(9) + u32(8) + u64(64)])
def test_absurd_text_lengths_are_errors_naming_the_key(damaged, after, length):
    assert "tokenizer.ggml" in failure(damaged(after, u64(length)), CheckpointError)


@pytest.mark.parametrize("count", [2**21 + 1, 2**40, 2**64 - 1, 10**6])
def test_absurd_array_counts_are_errors_naming_the_key(damaged, count):
    assert "tokenizer.ggml.tokens" in failure(damaged(b"tokenizer.ggml.tokens" + u32(9) + u32(8), u64(count)), CheckpointError)


@pytest.mark.parametrize("kind", [9, 13, 77, 2**32 - 1])
def test_nested_arrays_and_undefined_value_types_are_errors(damaged, kind):
    assert "tokenizer.ggml.tokens" in failure(damaged(b"tokenizer.ggml.tokens" + u32(9), u32(kind)), CheckpointError)
    if kind != 9:
        assert "tokenizer.ggml.model" in failure(damaged(b"tokenizer.ggml.model", u32(kind)), CheckpointError)


@pytest.mark.parametrize("dimensions", [(0, 64), (32, 0), (2**63, 2**63), (2**32, 2**32), (2**64 - 1, 1), (33, 64), (32, 63)])
def test_dimensions_of_zero_overflowing_or_wrong_are_errors(damaged, dimensions):
    text = failure(damaged(UP.encode() + u32(2), u64(dimensions[0]) + u64(dimensions[1])), CheckpointError)
    assert "ffn_" in text or "up_proj" in text


@pytest.mark.parametrize("count", [0, 5, 2**32 - 1])
def test_absurd_numbers_of_dimensions_are_errors(damaged, count):
    assert UP in failure(damaged(UP.encode(), u32(count)), CheckpointError)


@pytest.mark.parametrize("offset", [1, 16, 2**20, 2**40, 2**63, 2**64 - 32, 0])
def test_offsets_outside_misaligned_or_taken_are_errors(damaged, offset):
    failure(damaged(UP.encode() + u32(2) + u64(32) + u64(64) + u32(0), u64(offset)), CheckpointError)


@pytest.mark.parametrize("alignment", [0, 1, 3, 48, 2**31])
def test_alignment_must_be_a_power_of_two_within_bounds(tmp_path, alignment):
    path = write_gguf(tmp_path / "m.gguf", edit=key("general.alignmenu", alignment))
    path.write_bytes(path.read_bytes().replace(b"general.alignmenu", b"general.alignment"))
    assert "general.alignment" in failure(path, CheckpointError)


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_other_versions_and_byte_orders_are_errors(tmp_path, whole, version):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:4] + u32(version) + whole[8:])
    assert "version" in failure(path, CheckpointError)


def test_a_key_twice_and_a_tensor_twice_are_errors(tmp_path, whole):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"))
    assert "twice" in failure(path, CheckpointError)
    path.write_bytes(whole.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"))
    assert "twice" in failure(path, CheckpointError)


def test_missing_and_extra_tensors_are_named(tmp_path):
    arrays = tensors()
    del arrays["model.layers.1.mlp.up_proj.weight"]
    assert "model.layers.1.mlp.up_proj.weight" in failure(write_gguf(tmp_path / "m.gguf", arrays), CheckpointError)
    arrays = tensors() | {"model.layers.1.attn_rot_embd.weight": np.ones(4, np.float32)}
    assert "attn_rot_embd" in failure(write_gguf(tmp_path / "n.gguf", arrays), CheckpointError)


@pytest.mark.parametrize(
    "name",
    ["llama.embedding_length", "llama.block_count", "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon"],
)
def test_a_missing_key_is_an_error(tmp_path, name):
    failure(write_gguf(tmp_path / "m.gguf", skip=name), ConfigError)


@pytest.mark.parametrize("value", [0, 7, 2**32 - 1])
@pytest.mark.parametrize("name", ["llama.attention.head_count", "llama.attention.head_count_kv", "llama.block_count"])
def test_metadata_out_of_bounds_is_an_error(tmp_path, name, value):
    failure(write_gguf(tmp_path / "m.gguf", skip=name, edit=key(name, value)))


def test_numbers_that_are_not_finite_are_errors(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", edit=key("llama.rope.freq_base", float("nan"), Kind.FLOAT32), skip="llama.rope.freq_base"
    )
    assert "llama.rope.freq_base" in failure(path, CheckpointError)


def test_a_list_where_a_number_belongs_is_refused(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        edit=lambda w: w.add_array("llama.attention.head_count_kv", [2, 1]),
        skip="llama.attention.head_count_kv",
    )
    assert "head_count_kv" in failure(path, Refused)


def test_a_file_without_vocabulary_has_no_tokenizer(tmp_path):
    loaded = load(write_gguf(tmp_path / "m.gguf", vocabulary=False))
    assert loaded.tokenizer is None and loaded.eos_token_ids == frozenset()


def test_weights_are_narrowed_on_request(tmp_path):
    loaded = load(write_gguf(tmp_path / "m.gguf"), dtype="bfloat16")
    assert {array.dtype for array in loaded.weights.values()} == {mx.bfloat16}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_or_is_an_engine_error(data, whole, tmp_path):
    header_end = len(whole) - 4 * sum(array.size for array in tensors().values())
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    try:
        tensors_read = read_header(path).tensors
        assert all(header.offset + header.nbytes <= path.stat().st_size for header in tensors_read.values())
        load(path)
    except EngineError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("value", ["x", -1, 0, 1.5, True, 2**63, [1], ["x"], []])
def test_a_key_of_any_other_type_or_size_loads_or_is_an_engine_error(tmp_path, monkeypatch, value):
    path = write_gguf(
        tmp_path / "m.gguf", tensors() | {"rope_freqs.weight": np.ones(4, np.float32)}, edit=key("split.count", 1)
    )
    header = read_header(path)
    for name in [*header.metadata, "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.attention.key_length"]:
        changed = GgufHeader(header.metadata | {name: value}, header.tensors)
        monkeypatch.setattr("engine.checkpoint.gguf_header.read_header", lambda _, changed=changed: changed)
        with contextlib.suppress(EngineError):
            load(path)


def test_vocabulary_size_of_the_tiny_file_is_that_of_its_config(tmp_path):
    assert load(write_gguf(tmp_path / "m.gguf")).tokenizer.size == CONFIG["vocab_size"]
