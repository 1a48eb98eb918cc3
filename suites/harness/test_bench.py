"""The benchmark: peers in processes of their own, honest intervals, and a table that claims no more than the samples show."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decodegate.cli import app
from engine import blas
from harness import cases
from harness.bench import process as bench_process
from harness.bench import quiet as bench_quiet
from harness.bench import run as bench_run
from harness.bench.process import Peer, PeerProcess
from harness.bench.run import measure, measure_checkpoint
from harness.bench.statistics import interval, ratio, shown
from harness.builds import Made
from harness.cases.build import build
from harness.export import export
from harness.outcomes import ExitCode, Infra, Rejected
from reference_models import loading
from reports.bench import rows, table
from suites.harness.fixture_engine import run_git

ROOT = Path(__file__).parents[2]
OURS = Peer("engine", "float32", sys.executable, Made("working tree", ROOT, "as it is"))
PROMPT = list(range(3, 43))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return build(cases.find("llama/gqa"), 0, tmp_path_factory.mktemp("case"))


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(bench_quiet, "busy_fraction", lambda: 0.01)
    monkeypatch.setattr(bench_run, "SETTLE_S", 0.0)


def result(ours: list[float], theirs: list[float]) -> dict:
    def peer(name: str, speeds: list[float]) -> dict:
        samples = [{"prefill_tok_s": s, "decode_tok_s": s, "tokens": [1, 2]} for s in speeds]
        return {"name": name, "build": None, "environment": {}, "samples": samples}

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


def test_one_round_has_no_interval():
    text = table(result([20.0], [10.0]))
    assert "| decode | theirs | 10 | 2× | ~ |" in text and "n = 1, no interval." in text


def test_table_says_which_revision_the_base_is_and_where_its_code_is_the_same():
    found = result([20.0] * 6, [10.0] * 6)
    for peer, name in zip(found["peers"], ("working tree", "0123456789"), strict=True):
        peer["build"] = Made(name, ROOT, "as it is", "0123456789abcdef", name == "working tree", "First\n`line`").described()
    text = table(found)
    assert "- ours: working tree at 0123456789 with changes\n" in text
    assert "- theirs: 0123456789 · `` First `line` `` · the same code as ours\n" in text


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
    monkeypatch.setattr(bench_quiet, "busy_fraction", lambda: 0.6)
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


def test_checkpoint_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(Rejected, match=r"cannot be measured: .*config\.json") as caught:
        measure_checkpoint([OURS], str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def test_peer_that_imports_another_engine_than_its_build_is_not_measured(tiny, quiet, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    astray = Peer("engine", "float32", sys.executable, Made("0123456789", tmp_path, "nothing"), "base")
    found = measure([OURS, astray], {"float32": tiny}, PROMPT, decode=2, rounds=1)
    assert [peer["name"] for peer in found["peers"]] == ["engine[float32]"]
    assert f"imported engine from {ROOT / 'engine'}" in found["missing"][0]["reason"]


BASE_BLAS = "the base's own"


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """HEAD is our engine; HEAD~1 says another BLAS, HEAD~2 does not load, HEAD~3 has none."""
    directory = tmp_path_factory.mktemp("repository")
    run_git(directory, "init", "--quiet", "--initial-branch=main")
    package = directory / "engine"

    def commit(message: str) -> None:
        run_git(directory, "add", "-A")
        run_git(directory, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", message)

    (directory / "readme").write_text("nothing yet")
    commit("No engine")
    shutil.copytree(ROOT / "engine", package, ignore=shutil.ignore_patterns("__pycache__"))
    whole = {name: (package / name).read_text() for name in ("direct.py", "blas.py")}
    (package / "direct.py").write_text("import nowhere_to_be_found\n")
    commit("Break it")
    (package / "direct.py").write_text(whole["direct.py"])
    (package / "blas.py").write_text(f"{whole['blas.py']}\n\ndef describe():\n    return {BASE_BLAS!r}\n")
    commit("Say another BLAS")
    (package / "blas.py").write_text(whole["blas.py"])
    commit("Our engine")
    return directory


@pytest.fixture
def bench(repository, tiny, quiet, tmp_path, monkeypatch):
    monkeypatch.setenv("DECODEGATE_LOCK", str(tmp_path / "lock"))
    arguments = ["bench", str(tiny), "--repo", str(repository), "--prompt", "40", "--decode", "4", "--rounds", "2"]
    return lambda *options: CliRunner().invoke(app, [*arguments, *options], catch_exceptions=False)


def test_base_is_measured_after_the_working_tree_and_before_the_peers_in_the_same_rounds(bench, repository, tmp_path):
    out = tmp_path / "bench.json"
    ran = bench("--base", "HEAD~1", "--peers", "engine:bfloat16", "--out", str(out))
    assert ran.exit_code == ExitCode.OK
    found = json.loads(out.read_text())
    commit = run_git(repository, "rev-parse", "HEAD~1")
    name = f"engine@{commit[:10]}[float32]"
    ours, base, other = found["peers"]
    assert [peer["name"] for peer in (ours, base, other)] == ["engine[float32]", name, "engine[bfloat16]"]
    assert base["environment"]["blas"] == BASE_BLAS != ours["environment"]["blas"] == found["header"]["blas"]
    assert (base["build"]["commit"], base["build"]["subject"]) == (commit, "Say another BLAS")
    assert [[s["place"] for s in peer["samples"]] for peer in (ours, base, other)] == [[0, 2], [1, 0], [2, 1]]
    assert f"| same greedy tokens | {name} | 4 of 4 |" in ran.stdout and "ratio = engine[float32] / peer" in ran.stdout
    assert str(tmp_path.parent) not in ran.stdout


def test_json_of_a_base_in_bfloat16_is_printed_whole(bench):
    ran = bench("--base", "HEAD~1", "--peers", "", "--dtype", "bfloat16", "--json", "--rounds", "1")
    found = json.loads(ran.stdout)
    assert [peer["dtype"] for peer in found["peers"]] == ["bfloat16"] * 2
    assert found["peers"][0]["samples"][0]["tokens"] == found["peers"][1]["samples"][0]["tokens"]


def test_base_that_does_not_run_is_named_with_its_reason_and_the_exit_code_is_4(bench):
    ran = bench("--base", "HEAD~2", "--peers", "", "--rounds", "1")
    assert ran.exit_code == ExitCode.BASELINE_RED
    assert "not measured: " in ran.stdout and "nowhere_to_be_found" in ran.stdout
    assert ran.stderr.splitlines()[-1].startswith("decodegate bench: the base was not measured: ")


@pytest.mark.parametrize(("base", "said"), [("nowhere", "'nowhere' is no commit"), ("HEAD~3", "no usable engine/")])
def test_base_that_there_is_not_is_a_usage_error_of_one_line(bench, base: str, said: str):
    ran = bench("--base", base)
    assert ran.exit_code == ExitCode.USAGE and not ran.stdout
    assert said in ran.stderr and ran.stderr.startswith("decodegate bench: ") and ran.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [("--dtype", "float99"), ("--peers", "engine:float99"), ("--peers", "vllm")])
def test_what_cannot_be_compared_is_a_usage_error(bench, options):
    ran = bench(*options)
    assert ran.exit_code == ExitCode.USAGE and options[1].split(":")[-1] in ran.stderr


@pytest.mark.parametrize(
    ("peers", "code"),
    [("mlx_lm:float32,transformers:float32", ExitCode.TEMPORARY), ("mlx_lm:float32,engine:bfloat16", ExitCode.OK)],
)
def test_a_run_in_which_no_peer_that_was_asked_for_is_here_ends_with_75(bench, monkeypatch, peers: str, code: ExitCode):
    def require(peer: Peer) -> None:
        if peer.engine != "engine":
            raise Infra(f"{peer.engine} is not installed")

    monkeypatch.setattr(Peer, "require", require)
    ran = bench("--peers", peers, "--rounds", "1")
    assert ran.exit_code == code and "mlx_lm is not installed" in ran.stdout
    assert ("nothing was compared" in ran.stderr) == (code == ExitCode.TEMPORARY)


def test_products_with_experts_have_no_base():
    ran = CliRunner().invoke(app, ["bench", "moe", "--base", "HEAD"])
    assert ran.exit_code == ExitCode.USAGE and "--base" in ran.stderr


def test_peers_do_not_inherit_what_our_engine_has_set_in_this_process(monkeypatch, tmp_path):
    script = "import json, os; print(json.dumps({'environment': {'seen': os.environ.get('MKL_CBWR', 'nothing')}}), flush=True)"
    (tmp_path / "serve_transformers.py").write_text(script, "utf-8")
    monkeypatch.setattr(bench_process, "SCRIPTS", tmp_path)
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    peer = Peer("transformers", "float32", sys.executable)
    for set_by_engine, seen in [({"MKL_CBWR": "AUTO"}, "nothing"), ({}, "AUTO")]:  # in turn; the latter is the user's own
        monkeypatch.setattr(blas, "_variables", set_by_engine)
        with PeerProcess(peer, tmp_path, 20.0) as process:
            assert process.environment["seen"] == seen
