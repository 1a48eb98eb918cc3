"""`decodegate generate` from end to end on a tiny checkpoint."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from decodegate.commands import generate as command
from engine import cli
from engine.checkpoint import load
from engine.sampling import Sampling
from suites.engine.tiny_checkpoints import write_directory, write_gguf

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def checkpoint(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", edit=lambda writer: writer.add_chat_template(TEMPLATE))


@pytest.fixture
def run():
    """Runs the command with `arguments`."""
    app = typer.Typer()
    command.register(app)
    app.callback()(lambda: None)  # so that `generate` stays a name among others
    return lambda *arguments: CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_text_is_streamed_and_speeds_go_to_stderr(run, checkpoint):
    result = run(checkpoint, "the", "--max-tokens", 5)
    assert result.exit_code == 0
    assert "tok/s" in result.stderr and "tok/s" not in result.stdout and "float32" in result.stderr


def test_json_says_everything_and_matches_the_streamed_text(run, checkpoint):
    reply = json.loads(run(checkpoint, "the", "--max-tokens", 5, "--json").stdout)
    assert reply["text"] + "\n" == run(checkpoint, "the", "--max-tokens", 5).stdout
    assert len(reply["tokens"]) <= 5 and reply["finish_reason"] in ("length", "stop") and reply["chat"]
    assert reply["decode_tokens_per_s"] > 0


def test_the_chat_template_is_used_unless_it_is_declined(checkpoint):
    tokens = load(checkpoint).tokenizer.encode("the")
    chat = cli.generate(cli.Request(str(checkpoint), "the", max_tokens=1), lambda _: None)
    plain = cli.generate(cli.Request(str(checkpoint), "the", chat=False, max_tokens=1), lambda _: None)
    assert chat.prompt_tokens == len(tokens) + 1 and plain.prompt_tokens == len(tokens) and chat.chat and not plain.chat


def test_a_chat_whose_template_writes_the_bos_has_no_second_one(tmp_path):
    def both(writer):
        writer.add_chat_template(TEMPLATE)
        writer.add_add_bos_token(True)

    path = write_gguf(tmp_path / "bos.gguf", edit=both)
    tokens = load(path).tokenizer.encode("the")
    assert tokens[0] == 1
    for chat in (True, False):
        request = cli.Request(str(path), "the", chat=chat, max_tokens=0)
        assert cli.generate(request, lambda _: None).prompt_tokens == len(tokens)


def test_a_seed_draws_the_same_tokens_again(checkpoint):
    def tokens(seed):
        sampling = Sampling(temperature=5.0, seed=seed)
        return cli.generate(cli.Request(str(checkpoint), "the", max_tokens=12, sampling=sampling), lambda _: None).tokens

    assert tokens(1) == tokens(1) and len({tuple(tokens(seed)) for seed in range(4)}) > 1


def test_the_pieces_that_are_written_are_the_text(checkpoint):
    pieces = []
    reply = cli.generate(cli.Request(str(checkpoint), "the", max_tokens=9), pieces.append)
    assert "".join(pieces) == reply.text


def test_a_checkpoint_without_template_or_tokenizer_says_so(run, tmp_path):
    bare = write_gguf(tmp_path / "bare.gguf")
    result = run(bare, "the", "--chat")
    assert result.exit_code == 1 and "--no-chat" in result.stderr
    result = run(write_directory(tmp_path / "m"), "the")
    assert result.exit_code == 1 and "tokenizer.json" in result.stderr


def test_a_prompt_without_a_token_is_a_usage_error(run, tmp_path):
    result = run(write_gguf(tmp_path / "bare.gguf"), "", "--no-chat")
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith("decodegate generate: the prompt is empty") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "option", [("--temperature", -1), ("--top-p", 0), ("--top-k", -2), ("--seed", -1), ("--max-tokens", -1)]
)
def test_options_out_of_bounds_are_usage_errors(run, checkpoint, option):
    result = run(checkpoint, "the", *option)
    assert result.exit_code == 2 and option[0].strip("-").replace("-", "_") in result.stderr.replace("-", "_")


def test_help_has_examples(run):
    result = run("--help")
    assert result.exit_code == 0 and "--no-chat" in result.stdout and "Examples" in result.stdout


def test_a_damaged_checkpoint_ends_with_one_line_on_stderr_and_exit_code_1(tmp_path, checkpoint):
    half = tmp_path / "half.gguf"
    half.write_bytes(checkpoint.read_bytes()[: checkpoint.stat().st_size // 2])
    script = "import sys, typer; from decodegate.commands import generate as g; a = typer.Typer(); g.register(a); a()"
    result = subprocess.run([sys.executable, "-c", script, str(half), "the"], capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "half.gguf" in result.stderr and "cut off" in result.stderr


def test_a_hub_id_without_network_is_infra(run, tmp_path, monkeypatch):
    from harness.outcomes import Infra

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    result = run("owner/name-that-no-cache-has", "the")
    assert isinstance(result.exception, Infra) and "hf download" in str(result.exception)
