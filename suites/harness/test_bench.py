"""The benchmark: peers in processes of their own, honest intervals, and a table that claims no more than the samples show."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cases
from harness.bench import run as bench_run
from harness.bench.process import Peer, PeerProcess
from harness.bench.run import measure
from harness.bench.statistics import interval, ratio, shown
from harness.cases.build import build
from harness.export import export
from harness.outcomes import Infra
from reference_models import loading
from reports.bench import rows, table

ROOT = Path(__file__).parents[2]
OURS = Peer("engine", "float32", sys.executable, ROOT)
PROMPT = list(range(3, 43))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return build(cases.find("llama/gqa"), 0, tmp_path_factory.mktemp("case"))


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(bench_run, "busy_fraction", lambda: 0.01)
    monkeypatch.setattr(bench_run, "SETTLE_S", 0.0)


def result(ours: list[float], theirs: list[float]) -> dict:
    def peer(name: str, speeds: list[float]) -> dict:
        samples = [{"prefill_tok_s": s, "decode_tok_s": s, "tokens": [1, 2]} for s in speeds]
        return {"name": name, "environment": {}, "samples": samples}

    return {
        "prompt_tokens": 4,
        "decode_tokens": 2,
        "rounds": len(ours),
        "peers": [peer("ours", ours), peer("theirs", theirs)],
        "missing": [{"name": "absent", "reason": "not installed"}],
        "warnings": ["busy"],
    }


@pytest.mark.parametrize(
    ("n", "low", "high", "coverage"), [(1, 0, 0, 0.0), (5, 0, 4, 0.9375), (6, 0, 5, 0.96875), (9, 1, 7, 0.9609375)]
)
def test_interval_is_the_narrowest_pair_of_order_statistics_that_covers(n, low, high, coverage):
    found = interval([float(i) for i in range(n)])
    assert (found.low, found.high, found.coverage, found.median) == (low, high, coverage, (n - 1) / 2)


def test_interval_covers_the_median_as_often_as_it_says():
    draw = random.Random(0)
    covered = 0
    for _ in range(2000):
        found = interval([draw.expovariate(1.0) for _ in range(9)])
        covered += found.low <= 0.6931 <= found.high
    assert 0.94 < covered / 2000 < 0.98


def test_interval_refuses_samples_that_are_not_finite():
    with pytest.raises(ValueError, match="finite"):
        interval([1.0, float("nan")])


def test_same_speed_shows_no_difference_and_twice_the_speed_does():
    draw = random.Random(1)
    slow = [10 + draw.random() for _ in range(8)]
    also = [10 + draw.random() for _ in range(8)]
    assert not shown(ratio(also, slow))
    assert shown(ratio([2 * speed for speed in slow], slow))


def test_too_few_rounds_never_show_a_difference():
    assert not shown(ratio([20.0] * 5, [10.0] * 5))


def test_table_marks_what_is_not_shown_and_names_missing_peers_and_warnings():
    noise = table(result([10, 11, 9, 10, 12, 9], [11, 10, 10, 9, 11, 10]))
    assert "| ~ |" in noise and "absent: not measured: not installed" in noise and "Warning: busy" in noise
    faster = rows(result([20.0] * 6, [10.0] * 6))
    assert [row["verdict"] for row in faster] == ["", "faster", "", "faster"]


def test_engine_answers_in_interleaved_rounds_with_the_same_tokens_each_time(tiny, quiet):
    found = measure([OURS, OURS], {"float32": tiny}, PROMPT, decode=6, rounds=2)
    samples = [sample for peer in found["peers"] for sample in peer["samples"]]
    assert len({tuple(sample["tokens"]) for sample in samples}) == 1 and len(samples[0]["tokens"]) == 6
    assert all(sample["prefill_s"] > 0 and sample["decode_s"] > 0 for sample in samples)
    json.dumps(found)


def test_peer_that_is_not_installed_is_named_with_the_install_command(tiny, quiet, tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    absent = Peer("transformers", "float32", str(bare / "bin" / "python"))
    found = measure([OURS, absent], {"float32": tiny}, PROMPT, decode=2, rounds=1)
    assert (
        found["missing"][0]["name"] == "transformers[float32]" and "pip install transformers" in found["missing"][0]["reason"]
    )


def test_our_own_engine_missing_ends_the_run(tiny, quiet, tmp_path):
    with pytest.raises(Infra, match="engine"):
        measure([Peer("engine", "float32", str(tmp_path / "no-python"))], {"float32": tiny}, PROMPT, decode=2, rounds=1)


def test_busy_machine_is_refused_and_said_where_it_is_accepted(tiny, monkeypatch):
    monkeypatch.setattr(bench_run, "busy_fraction", lambda: 0.6)
    with pytest.raises(Infra, match=r"60%.*--busy-ok"):
        measure([OURS], {"float32": tiny}, PROMPT, decode=2, rounds=1)
    found = measure([OURS], {"float32": tiny}, PROMPT, decode=2, rounds=1, allow_busy=True)
    assert "60%" in found["warnings"][0]


def test_peer_that_dies_is_infra_with_its_last_words(tmp_path):
    with pytest.raises(Infra, match="exit code 1"):
        PeerProcess(OURS, tmp_path / "no-checkpoint", 60.0)


def test_export_writes_the_weights_the_references_read(tiny, tmp_path):
    written = export(tiny, tmp_path, ["float32", "bfloat16"])
    _, expected = loading.load(tiny)
    for dtype, directory in written.items():
        config, weights = loading.load(directory)
        assert config["dtype"] == dtype and weights.keys() == expected.keys()
        assert all(str(tensor.dtype) == f"torch.{dtype}" for tensor in weights.values())
        # a case's values are exact in bfloat16, so that rounding loses nothing
        assert all(bool((weights[name].double() == expected[name].double()).all()) for name in expected)
