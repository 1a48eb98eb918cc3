"""Directories of safetensors: what loads, and that whatever is wrong with them is a one-line EngineError."""

import json
import os

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checkpoint import load
from engine.checkpoint.safetensors import MAX_HEADER_BYTES, read_header
from engine.errors import CheckpointError, ConfigError, EngineError, Refused
from suites.engine.tiny_checkpoints import (
    CONFIG,
    header_and_data,
    tensors,
    write_directory,
    write_index,
    write_safetensors,
    write_shards,
)

FIRST = "model.layers.0.mlp.up_proj.weight"


def failure(path, kind=CheckpointError):
    """The text of the error that loading raises; one line, and short enough for a terminal."""
    with pytest.raises(kind) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


def check_equal(loaded, arrays):
    assert set(loaded.weights) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.array(loaded.weights[name].astype(mx.float32)), array)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_tensor_arrives_exactly_once_with_its_values(tmp_path, stored, dtype):
    loaded = load(write_directory(tmp_path / "m", dtype=stored), dtype=dtype)
    check_equal(loaded, tensors())
    assert {str(array.dtype) for array in loaded.weights.values()} == {f"mlx.core.{dtype}"}
    assert any(dtype in note and stored in note for note in loaded.notes)


def test_on_a_cpu_weights_are_held_in_float32_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx.core.default_device", lambda: mx.Device(mx.cpu))
    loaded = load(write_directory(tmp_path / "m", dtype="BF16"))
    assert loaded.dtype == "float32" and {array.dtype for array in loaded.weights.values()} == {mx.float32}


@pytest.mark.parametrize(("stored", "expected"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_on_a_gpu_weights_are_held_as_stored(tmp_path, monkeypatch, stored, expected):
    monkeypatch.setattr("mlx.core.default_device", lambda: mx.Device(mx.gpu))
    assert load(write_directory(tmp_path / "m", dtype=stored)).dtype == expected


def test_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(Refused, match="int4"):
        load(write_directory(tmp_path / "m"), dtype="int4")


def test_shards_load_as_one_checkpoint(tmp_path):
    write_shards(tmp_path / "m")
    check_equal(load(tmp_path / "m"), tensors())


def test_a_single_file_of_another_name_loads(tmp_path):
    path = write_directory(tmp_path / "m")
    (path / "model.safetensors").rename(path / "weights.safetensors")
    check_equal(load(path), tensors())


@pytest.mark.parametrize("keep", [0, 4, 8, 40, 0.5, 0.9, -1])
def test_truncated_safetensors_is_a_one_line_error(tmp_path, keep):
    path = write_directory(tmp_path / "m")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert "model.safetensors" in failure(path)


def test_bytes_after_the_last_tensor_are_an_error(tmp_path):
    path = write_directory(tmp_path / "m")
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"xx")
    assert "damaged" in failure(path)


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 1],
        [-8192, 0],
        [8192, 0],
        [0, 1 << 62],
        [1 << 62, (1 << 62) + 8192],
        [0],
        "0-8192",
        [0.0, 8192.0],
        [False, True],
        None,
    ],
)
def test_offsets_that_lie_are_an_error_naming_the_tensor(tmp_path, offsets):
    path = write_directory(tmp_path / "m", edit=lambda header: header[FIRST].update(data_offsets=offsets))
    assert FIRST in failure(path)


def test_overlapping_tensors_and_holes_are_errors(tmp_path):
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    path = write_directory(
        tmp_path / "m", edit=lambda header: header[first].update(data_offsets=header[second]["data_offsets"])
    )
    assert "overlaps" in failure(path) or "hole" in failure(path)
    header, data = header_and_data(tensors())
    shifted = {name: dict(entry, data_offsets=[n + 4 for n in entry["data_offsets"]]) for name, entry in header.items()}
    write_safetensors(path / "model.safetensors", shifted, b"1234" + data)
    assert "hole" in failure(path)


@pytest.mark.parametrize(
    "shape", [[64], [64, 31], [64, 33], [1 << 40, 1 << 40], [-64, -32], [64, 32.0], "64", None, [1] * 40, [True, True]]
)
def test_shapes_that_lie_are_an_error_naming_the_tensor(tmp_path, shape):
    path = write_directory(tmp_path / "m", edit=lambda header: header[FIRST].update(shape=shape))
    assert FIRST in failure(path)


def test_a_shape_that_the_config_does_not_say_is_an_error_before_anything_is_read(tmp_path, monkeypatch):
    path = write_directory(tmp_path / "m", edit=lambda header: header[FIRST].update(shape=[32, 64]))
    monkeypatch.setattr("engine.checkpoint.weights.read_tensor", lambda *_: pytest.fail("a weight was read"))
    text = failure(path)
    assert FIRST in text and "[32, 64]" in text and "[64, 32]" in text


@pytest.mark.parametrize("dtype", ["F33", "", 7, None, "f32"])
def test_unknown_dtypes_in_the_header_are_named(tmp_path, dtype):
    path = write_directory(tmp_path / "m", edit=lambda header: header[FIRST].update(dtype=dtype))
    assert repr(dtype) in failure(path)


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_integer_weights_are_no_parameters(tmp_path, dtype):
    path = write_directory(tmp_path / "m", edit=lambda header: header[FIRST].update(dtype=dtype))
    text = failure(path)
    assert FIRST in text and dtype in text and "no quantisation" in text


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b"nonsense",
        b"{",
        b"\xff\xfe{}",
        b'{"a": 1}',
        b'{"__metadata__": {"a": 1}}',
        b"[" * 50_000,
        b'{"a":' * 9000,
    ],
)
def test_headers_that_are_no_headers_are_one_line_errors(tmp_path, header):
    path = write_directory(tmp_path / "m")
    write_safetensors(path / "model.safetensors", header, b"")
    failure(path)


def test_a_name_twice_in_one_header_is_an_error(tmp_path):
    path = write_directory(tmp_path / "m")
    header, data = header_and_data(tensors())
    text = json.dumps(header)[:-1] + f', "{FIRST}": {json.dumps(header[FIRST])}}}'
    write_safetensors(path / "model.safetensors", text.encode(), data)
    text = failure(path)
    assert FIRST in text and "twice" in text


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER_BYTES + 1, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_absurd_header_lengths_are_errors_and_nothing_is_read(tmp_path, length):
    path = write_directory(tmp_path / "m")
    write_safetensors(path / "model.safetensors", b"{}", b"", length=length)
    assert "header" in failure(path)


def test_a_header_beyond_the_bound_is_an_error_even_if_the_file_has_it(tmp_path):
    path = write_directory(tmp_path / "m")
    with (path / "model.safetensors").open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 1000)  # sparse
    assert "header length" in failure(path)


def test_a_missing_tensor_is_named(tmp_path):
    arrays = tensors()
    del arrays[FIRST]
    text = failure(write_directory(tmp_path / "m", arrays=arrays))
    assert FIRST in text and "missing" in text


def test_an_extra_tensor_is_named(tmp_path):
    text = failure(write_directory(tmp_path / "m", arrays=tensors() | {"model.layers.2.input_layernorm.weight": np.ones(32)}))
    assert "model.layers.2.input_layernorm.weight" in text and "not part of the model" in text


def test_rotary_tables_of_old_files_are_ignored_and_noted(tmp_path):
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    loaded = load(write_directory(tmp_path / "m", arrays=tensors() | table))
    assert set(loaded.weights) == set(tensors()) and any("rotary" in note for note in loaded.notes)


def test_a_tied_checkpoint_may_repeat_the_embedding_and_nothing_else(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    arrays = tensors(config)
    copy = arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    loaded = load(write_directory(tmp_path / "m", config, copy))
    assert "lm_head.weight" not in loaded.weights and any("lm_head" in note for note in loaded.notes)
    other = arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"] + 1}
    text = failure(write_directory(tmp_path / "n", config, other))
    assert "lm_head.weight" in text and "tie_word_embeddings" in text


def test_an_untied_checkpoint_needs_its_head(tmp_path):
    arrays = tensors()
    del arrays["lm_head.weight"]
    assert "lm_head.weight" in failure(write_directory(tmp_path / "m", arrays=arrays))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", "", 7, "a\nb.safetensors"]
)
def test_an_index_cannot_point_out_of_its_directory(tmp_path, name):
    weight_map = write_shards(tmp_path / "m")
    write_index(tmp_path / "m", weight_map | {FIRST: name})
    assert FIRST in failure(tmp_path / "m")


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 3])
def test_a_weight_map_that_is_no_map_is_an_error(tmp_path, weight_map):
    write_shards(tmp_path / "m")
    write_index(tmp_path / "m", weight_map)
    assert "weight_map" in failure(tmp_path / "m")


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path / "m")
    (tmp_path / "m" / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in failure(tmp_path / "m")


def test_a_tensor_in_two_shards_is_named(tmp_path):
    write_shards(tmp_path / "m")
    arrays = tensors()
    write_safetensors(tmp_path / "m" / "model-00003-of-00003.safetensors", *header_and_data(arrays))
    assert "again" in failure(tmp_path / "m")


def test_an_index_that_disagrees_with_its_shards_is_an_error(tmp_path):
    weight_map = write_shards(tmp_path / "m")
    name = next(iter(weight_map))
    write_index(tmp_path / "m", {key: value for key, value in weight_map.items() if key != name})
    assert name in failure(tmp_path / "m")
    write_index(tmp_path / "m", weight_map | {"stray": weight_map[name]})
    assert "stray" in failure(tmp_path / "m")


def test_directories_without_weights_say_what_is_missing(tmp_path):
    path = write_directory(tmp_path / "m")
    (path / "model.safetensors").unlink()
    assert "no safetensors" in failure(path)
    (path / "pytorch_model.bin").write_bytes(b"")
    assert "pickle" in failure(path)
    for name in ("a", "b"):
        write_safetensors(path / f"{name}.safetensors", *header_and_data({}))
    assert "index" in failure(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_a_file_is_an_error_and_is_not_waited_for(tmp_path):
    path = write_directory(tmp_path / "m")
    for name in ("model.safetensors", "config.json"):
        (path / name).unlink()
        os.mkfifo(path / name)
        assert "is not a file" in failure(path)


@pytest.mark.parametrize("source", ["nowhere", "no/such/place", "missing.gguf", "a/missing.gguf", "", "x\ny"])
def test_sources_that_do_not_exist_are_errors(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if source:
        failure(source)
    else:
        with pytest.raises(EngineError):
            load(source)


def test_values_beyond_float16_are_an_error_in_float16_only(tmp_path):
    arrays = tensors()
    arrays[FIRST][0, 0] = 1e6
    path = write_directory(tmp_path / "m", arrays=arrays)
    load(path, dtype="float32")
    with pytest.raises(CheckpointError, match=FIRST):
        load(path, dtype="float16")


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    path = write_directory(tmp_path_factory.mktemp("whole") / "m")
    return (path / "model.safetensors").read_bytes()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_right_or_is_an_engine_error(data, whole_file, tmp_path):
    damaged = bytearray(whole_file)
    header_end = 8 + int.from_bytes(whole_file[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.safetensors"
    path.write_bytes(damaged[: data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))])
    try:
        headers = read_header(path)
    except EngineError as error:
        assert "\n" not in str(error)
    else:
        assert all(header.offset + header.nbytes <= path.stat().st_size for header in headers.values())


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), length=st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_arbitrary_bytes_are_an_engine_error(content, length, tmp_path):
    path = write_safetensors(tmp_path / "model.safetensors", content, b"", length)
    try:
        read_header(path)
    except EngineError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"vocab_size": 2**62}, "vocab_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"quantization": {"group_size": 64, "bits": 0}}, "bits"),
        ({"quantization": {"group_size": 0, "bits": 4}}, "group_size"),
        ({"quantization_config": {"bits": 0}}, "bits"),
        ({"quantization_config": 3}, "quantization_config"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": [2, 64]}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"model_type": None, "architectures": ["Mystery"]}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_a_config_field_out_of_bounds_is_named(tmp_path, change, field):
    assert field in failure(write_directory(tmp_path / "m", CONFIG | change), ConfigError)


def test_a_plan_of_quantised_weights_without_any_is_an_error(tmp_path):
    path = write_directory(tmp_path / "m", CONFIG | {"quantization": {"group_size": 64, "bits": 4}})
    assert "no tensor is" in failure(path)


def test_an_unknown_family_lists_the_known_ones(tmp_path):
    text = failure(write_directory(tmp_path / "m", CONFIG | {"model_type": "florence9"}), Refused)
    assert "florence9" in text and "llama" in text


def test_both_spellings_of_rope_load_to_the_same_config(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = load(write_directory(tmp_path / "old", CONFIG | {"rope_theta": 5e5, "rope_scaling": scaling}))
    bare = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    new = load(write_directory(tmp_path / "new", bare | {"rope_parameters": scaling | {"rope_theta": 5e5}}))
    assert old.config == new.config and old.config.rope.rope_theta == 5e5


def test_eos_of_the_generation_config_goes_before_that_of_the_config(tmp_path):
    path = write_directory(tmp_path / "m")
    assert load(path).eos_token_ids == {2}
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert load(path).eos_token_ids == {3, 5}
    (path / "generation_config.json").write_text('{"eos_token_id": 64}')
    assert "generation_config.json" in failure(path, ConfigError)
    (path / "generation_config.json").write_text("{}")
    assert load(path).eos_token_ids == {2}
