"""What all commands have in common: help that flows, and one rule for what they end with where a checkpoint cannot be used."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from decodegate.cli import app
from harness.outcomes import ExitCode
from suites.harness.runs import FAKE, REWIND, environment

COMMANDS = sorted(typer.main.get_command(app).commands)
CELL = "engine::llama/x::repeat_is_deterministic[float32,dense]"
WITH_CHECKPOINT = {
    "generate": ["generate", "HERE", "Hello"],
    "smoke": ["smoke", "HERE"],
    "convert": ["convert", "HERE", "OUT/converted"],
    "bench": ["bench", "HERE", "--peers=", "--busy-ok"],
    "gate": ["gate", "--checkpoint=HERE", "--out=OUT", "--case=llama/gqa"],
    "replay": ["replay", CELL, "--checkpoint=HERE"],
    "evidence": ["evidence", "--base=HEAD", "--checkpoint=HERE", "--out=OUT"],
}


def invoke(name: str, checkpoint: str, out: Path) -> tuple[int, str]:
    """Exit code of the command on this checkpoint, and all it said."""
    arguments = [word.replace("HERE", checkpoint).replace("OUT", str(out)) for word in WITH_CHECKPOINT[name]]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("DECODEGATE_LOCK", str(tmp_path / "device.lock"))


@pytest.mark.parametrize("name", WITH_CHECKPOINT)
def test_a_checkpoint_that_is_not_there_is_a_usage_error_in_one_line(name: str, tmp_path: Path) -> None:
    code, said = invoke(name, "/no/such/path", tmp_path)
    assert code == ExitCode.USAGE
    assert said.startswith(f"decodegate {name}: checkpoint '/no/such/path' ") and said.count("\n") == 1


@pytest.mark.parametrize("name", WITH_CHECKPOINT)
def test_a_checkpoint_that_is_malformed_is_wrong_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.json").write_text('{"model_type": "llama"')
    code, said = invoke(name, str(tmp_path / "bad"), tmp_path / "out")
    lines = [line for line in said.splitlines() if not line.startswith("[")]  # without the count of records
    assert code == ExitCode.WRONG
    assert (
        len(lines) == 1 and lines[0].startswith(f"decodegate {name}: ") and "config.json" in lines[0] and "not JSON" in lines[0]
    )


@pytest.mark.parametrize("name", ["generate", "smoke", "convert", "bench"])
def test_a_hub_id_that_cannot_be_fetched_is_infra_in_one_line(name: str, tmp_path: Path) -> None:
    code, said = invoke(name, "no-such-owner/no-such-model", tmp_path)
    lines = [line for line in said.splitlines() if not line.startswith("[")]
    assert code == ExitCode.TEMPORARY
    assert len(lines) == 1 and lines[0].startswith(f"decodegate {name}: infra: ") and "hf download" in lines[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "/no/such/gate.jsonl"],
        ["bench", "--peer-python=/no/such/python"],
        ["evidence", "--base=HEAD", "--repo=/no/such/repository"],
        ["mutants", "--repo=/no/such/repository"],
        ["mutants", "--catalogue=/no/such/catalogue"],
        ["gate", "--build=x=/no/such/build", "--case=llama/gqa", "--out=OUT"],
        ["replay", CELL.replace("/x", "/gqa"), "--build=x=/no/such/build"],
        ["convert", "reference_models", "OUT/converted", "--mode=int3"],
        ["convert", "reference_models", "OUT/converted", "--policy=none"],
        ["convert", "reference_models", "OUT"],
        ["convert", "reference_models", "OUT/converted", "--mode=mxfp4", "--layout=modelopt"],
        ["convert", "OUT/model.gguf", "OUT/converted"],
        ["convert", "reference_models", "/proc/nowhere"],
        ["mutants", "--id=rewind_leaves_the_slots", "--out=/proc/nowhere"],
    ],
)
def test_anything_else_that_is_not_there_is_a_usage_error(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    result = CliRunner().invoke(app, [word.replace("OUT", str(tmp_path)) for word in arguments])
    assert result.exit_code == ExitCode.USAGE and isinstance(result.exception, SystemExit)


@pytest.fixture
def closed() -> Iterator[int]:
    """A pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


CELLS = ["--jobs=1", "--no-smoke", "--case=llama/gqa", "--dtype=float32", "--layout=dense", f"--check={REWIND}"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["gate", "--help"], ExitCode.OK),
        (["list", "cases"], ExitCode.OK),
        (["generate", "llama", "the", "--max-tokens=1000000"], ExitCode.OK),
        (["gate", *CELLS, f"--target={FAKE}:Honest"], ExitCode.OK),
        (["gate", *CELLS, f"--target={FAKE}:IsWrong"], ExitCode.WRONG),
        (["gate", "--no-such-option"], ExitCode.USAGE),
    ],
)
def test_a_reader_that_ends_early_costs_no_command_its_exit_code(
    arguments: list[str], code: ExitCode, closed: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "decodegate", *arguments]
    ran = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=closed, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr and "Broken" not in ran.stderr
    assert subprocess.run(command, cwd=tmp_path, env=environment(), stdout=closed, stderr=closed).returncode == code


def test_a_stdout_that_is_closed_from_the_beginning_is_no_error() -> None:
    shell = ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-m", "decodegate", "list", "cases"]
    ran = subprocess.run(shell, env=environment(), capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (ExitCode.OK, "")


def wrapped(text: str, width: int) -> list[str]:
    """Words in lines that take as many of them as fit."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_paragraphs_of_help_flow_and_examples_keep_their_lines(name: str, width: int) -> None:
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [name, "--help"])
    shown = [line.strip() for line in result.output.splitlines()]
    command = typer.main.get_command(app).commands[name]
    for paragraph in inspect.cleandoc(command.help).replace("`", "").split("\n\n"):
        lines = wrapped(paragraph, width - 2)
        assert any(shown[i : i + len(lines)] == lines for i in range(len(shown))), lines
    title, *examples = (line.removesuffix("\\") for line in command.epilog.split("\n") if line)
    start = shown.index(title)
    assert title == "Examples:" and shown[start + 2 : start + 2 + len(examples)] == examples


def test_the_list_of_commands_names_each_once_under_a_heading() -> None:
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["--help"]).output
    assert [shown.count(f"│ {name} ") for name in COMMANDS] == [1] * len(COMMANDS)
    assert all(f"─ {heading} ─" in shown for heading in ("Judge an engine", "Look closer", "Use the engine"))


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("feed 5; rewind 6", "operation 1 (rewind a 6): sequence a holds 5 tokens only"),
        ("greedy 3", "operation 0 (greedy a 3): sequence a was never fed"),
        ("feed 3; close a; step 1", "operation 2 (step a 1): sequence a is closed; 'open a' opens it again"),
        ("feed 5; sideways 6", "in 'sideways 6': unknown operation 'sideways'"),
    ],
)
def test_a_schedule_that_no_target_can_run_is_a_usage_error_in_one_line(schedule: str, reason: str) -> None:
    result = CliRunner().invoke(app, ["replay", "engine::llama/gqa::mine[float32,dense]", "--schedule", schedule])
    assert result.exit_code == ExitCode.USAGE
    assert result.output.startswith(f"decodegate replay: {reason}") and result.output.count("\n") == 1


def test_what_the_target_refuses_in_a_schedule_of_ones_own_is_said_without_a_traceback() -> None:
    cell = "engine::llama/gqa::mine[float32,model_owned]"
    result = CliRunner().invoke(app, ["replay", cell, "--schedule", "feed 5; rewind 2"])
    assert result.exit_code == ExitCode.WRONG
    assert "the target refuses: layout model_owned cannot rewind" in result.output and "Traceback" not in result.output
