"""JSON of a checkpoint within bounds, chat templates and hub ids on disk."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import HubUnavailable, load
from engine.checkpoint.bounded import MAX_JSON_BYTES, parse_json, shown
from engine.checkpoint.hub import is_hub_id
from engine.errors import CheckpointError
from suites.engine.tiny_checkpoints import write_directory


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b"3", "object"),
        (b"null", "object"),
        (b"\xff", "UTF-8"),
        (b'{"a": 1, "a": 2}', "'a'"),
        (b'{"b": {"a": 1, "a": 2}}', "'a'"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": ' + b"9" * 41 + b"}", "40 digits"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "40 digits"),
        (b'{"a": {"__float__": "nan"}}', "nan"),
        (b'{"a": {"__float__": 3}}', "__float__"),
        (b'{"a": {"__float__": "Infinity", "b": 1}}', "__float__"),
        (b'{"__float__": "Infinity"}', "object"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "deeper"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "deeper"),
    ],
)
def test_json_out_of_bounds_is_a_one_line_error(text, named):
    with pytest.raises(CheckpointError) as caught:
        parse_json(text, "config.json")
    message = str(caught.value)
    assert named in message and message.startswith("config.json") and "\n" not in message and len(message) < 400


def test_infinity_is_read_in_both_published_spellings():
    parsed = parse_json(b'{"a": Infinity, "b": {"__float__": "-Infinity"}, "c": [{"__float__": "Infinity"}]}', "config.json")
    assert parsed == {"a": math.inf, "b": -math.inf, "c": [math.inf]}


def test_an_infinite_field_is_a_config_error_that_names_it(tmp_path):
    path = write_directory(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": {"__float__": "Infinity"}}))
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        load(path)


def test_a_config_of_unusual_size_is_an_error(tmp_path):
    path = write_directory(tmp_path / "m")
    (path / "config.json").write_bytes(b"{" + b" " * MAX_JSON_BYTES + b"}")
    with pytest.raises(CheckpointError, match="larger than"):
        load(path)


def test_a_missing_config_is_an_error_that_names_it(tmp_path):
    path = write_directory(tmp_path / "m")
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(path)
    (path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(path)


JSON = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9) | st.lists(st.integers(0, 9), max_size=3)
)


KEYS = st.text(max_size=9).filter(lambda key: key != "__float__")  # which is how numbers are spelled that JSON has not


@settings(max_examples=50)
@given(st.dictionaries(KEYS, JSON | st.dictionaries(KEYS, JSON, max_size=3), max_size=4))
def test_ordinary_json_is_read_as_it_is(value):
    assert parse_json(json.dumps(value).encode(), "x") == value


@settings(max_examples=50)
@given(st.one_of(st.text(), st.binary(), st.lists(st.integers())))
def test_shown_values_are_one_short_line(value):
    assert len(shown(value)) <= 80 and "\n" not in shown(value)


def test_the_length_that_transformers_writes_for_no_limit_is_read(tmp_path):
    path = write_directory(tmp_path / "m")
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30), "chat_template": "plain"}))
    assert load(path).chat_template == "plain"


def test_chat_templates_are_found_where_checkpoints_have_them(tmp_path):
    path = write_directory(tmp_path / "m")
    assert load(path).chat_template is None
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "plain"}))
    assert load(path).chat_template == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load(path).chat_template == "named"
    (path / "chat_template.jinja").write_text("file\r\n", newline="")
    assert load(path).chat_template == "file\r\n"


@pytest.mark.parametrize(
    "value", [3, {}, [3], [{"name": "a"}], [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], []]
)
def test_chat_templates_of_other_shapes_are_errors(tmp_path, value):
    path = write_directory(tmp_path / "m")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match="chat_template"):
        load(path)


def test_damaged_chat_template_and_tokenizer_files_are_named(tmp_path):
    path = write_directory(tmp_path / "m")
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        load(path)
    (path / "chat_template.jinja").unlink()
    for text in (
        "",
        "{}",
        "[]",
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        "[" * 100_000,
    ):
        (path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
            load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("a/b", True),
        ("gpt2", False),
        ("/a/b", False),
        ("a/b/c", False),
        ("../b", False),
        ("a/..", False),
        ("a/b\n", False),
        ("~/b", False),
    ],
)
def test_hub_ids_are_owner_and_name(text, is_id):
    assert is_hub_id(text) is is_id


def test_a_hub_id_without_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Offline mode is what a machine without network meets after its timeouts.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(HubUnavailable) as caught:
        load("owner/name-that-no-cache-has")
    text = str(caught.value)
    assert "hf download owner/name-that-no-cache-has" in text and "HF_HUB_OFFLINE" in text and "\n" not in text


def test_a_hub_snapshot_loads_like_a_directory(tmp_path, monkeypatch):
    path = write_directory(tmp_path / "snapshot")
    asked = []

    def download(repo_id, *, allow_patterns):
        asked.append((repo_id, allow_patterns))
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert load("owner/tiny").source == "owner/tiny"
    assert asked[0][0] == "owner/tiny" and "*.safetensors" in asked[0][1] and not any("bin" in name for name in asked[0][1])
