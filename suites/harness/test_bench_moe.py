"""The benchmark of products with experts: what it measures, and a table that claims no more than the samples show."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness.bench import moe, quiet
from harness.outcomes import Infra
from reports.bench_moe import rows, table


def result(baseline: list[float], ours: list[float]) -> dict:
    measured = {
        "format": "nvfp4",
        "path": "grouped",
        "samples": {moe.BASELINE: baseline, "mapped": ours},
        "largest_error": {moe.BASELINE: 1e-6, "mapped": 2e-6},
        "largest": 2.0,
    }
    shape = {"rows": 512, "experts": 16, "top_k": 4, "hidden": 512, "rounds": len(ours)}
    return shape | {"environment": {"mlx": "0"}, "formats": [measured], "warnings": ["busy"]}


def test_speed_ups_are_paired_by_round():
    found = rows(result([10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]))
    assert [row["contender"] for row in found] == [moe.BASELINE, "mapped"]
    assert found[1]["speedup"].median == found[1]["speedup"].low == 5.0 and found[1]["verdict"] == "faster"
    assert found[1]["milliseconds"].median == 7000.0 and found[1]["error"] == 1e-6


def test_what_the_rounds_do_not_show_is_marked():
    found = rows(result([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.5, 2.0, 0.9, 1.1, 1.0, 0.8]))
    assert found[1]["verdict"] == "~"
    text = table(result([1.0] * 6, [0.1] * 6))
    assert "| nvfp4 | mapped | 100 [100, 100] | 10 [10, 10]× | faster | 1.0e-06 |" in text and "Warning: busy" in text


def test_a_busy_machine_is_refused(monkeypatch):
    monkeypatch.setattr(quiet, "busy_fraction", lambda: 0.5)
    with pytest.raises(Infra, match="busy-ok"):
        moe.measure(["nvfp4"])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "affine4"])
def test_every_contender_computes_the_product(monkeypatch, name: str):
    monkeypatch.setattr(quiet, "busy_fraction", lambda: 0.5)
    found = moe.measure([name], rows=40, experts=4, top_k=2, hidden=64, rounds=2, allow_busy=True)
    (measured,) = found["formats"]
    assert len(measured["samples"]) == 3 and all(len(samples) == 2 for samples in measured["samples"].values())
    assert all(error <= 5e-6 * measured["largest"] for error in measured["largest_error"].values())
    assert found["warnings"] and json.loads(json.dumps(found)) == found


def test_the_command_names_a_format_that_there_is_not():
    done = subprocess.run(
        [sys.executable, "-m", "decodegate", "bench", "moe", "--formats", "int3"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "int3" in done.stderr
