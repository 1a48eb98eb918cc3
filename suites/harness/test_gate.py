"""The gate from end to end on the numpy target: outcomes, exit codes, selection, reruns, and runs that are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import filelock
import psutil
import pytest
from typer.testing import CliRunner

from decodegate.cli import app
from decodegate.commands.gate import plugin_is_installed
from harness.cases import find
from harness.cases.build import build
from harness.outcomes import ExitCode
from harness.records import Record, load
from suites.harness.runs import FAKE, REPEAT, REWIND, environment, gate_command

TWO = [f"--check={REWIND}", f"--check={REPEAT}", "--dtype=float32", "--layout=dense", "--case=llama/gqa"]


def gate(out: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and all output of the command, in this process."""
    result = CliRunner().invoke(app, ["gate", "--no-smoke", "--jobs=1", "--out", str(out), *arguments])
    return result.exit_code, result.output


def target(variant: str) -> str:
    return f"--target={FAKE}:{variant}"


def recorded(out: Path) -> dict[str, Record]:
    return {f"{record.target} {record.check}": record for record in load(out / "gate.jsonl")[1]}


def test_every_way_to_go_wrong_is_its_own_outcome_and_the_run_goes_on(tmp_path: Path) -> None:
    wanted = {
        "Segfaults": "crash", "Raises": "error", "GivesNan": "fail", "IsWrong": "fail", "GivesTooFewRows": "error",
        "RaisesUnsupported": "unsupported", "CannotRewind": "unsupported", "PrintsGarbage": "pass", "Honest": "pass",
    }  # fmt: skip
    code, _ = gate(tmp_path, *TWO, *map(target, wanted))
    records = recorded(tmp_path)
    names = {variant: re.sub("(?<!^)(?=[A-Z])", "_", variant).lower() for variant in wanted}
    assert {variant: str(records[f"{name} {REWIND}"].outcome) for variant, name in names.items()} == wanted
    assert {str(records[f"{name} {REPEAT}"].outcome) for name in names.values()} == {"pass"}
    assert code == ExitCode.WRONG
    assert records[f"is_wrong {REWIND}"].first_bad_position is not None
    assert (records[f"is_wrong {REWIND}"].error_ratio or 0) > 3
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "gate.jsonl", "gate.md", "gate.html", "gate.xml"}


def test_a_failure_is_shown_with_a_command_that_shows_it_again(tmp_path: Path) -> None:
    _, text = gate(tmp_path, *TWO, target("IsWrong"))
    command = recorded(tmp_path)[f"is_wrong {REWIND}"].replay
    assert command in text
    program, verb, *arguments = command.replace("'", "").split()
    again = CliRunner().invoke(app, [verb, *arguments, "--bad"])
    assert program == "decodegate"
    assert again.exit_code == ExitCode.WRONG
    assert "DRIFT" in again.output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "JSON object"), ("{", "not JSON"), ('{"a":' * 100_000, "not JSON"), ('{"model_type": "../x"}', "model_type"),
        ('{"architectures": ["Mystery"]}', "'architectures' (['Mystery']) names no known class"),
        ('{"model_type": "llama"}', "vocab_size"), ('{"model_type": "llama", "vocab_size": 1e9}', "vocab_size"),
        ('{"model_type": "llama", "vocab_size": 99999999999}', "vocab_size"), (" " * (5 << 20), "larger than"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_can_be_no_case_is_wrong_in_one_line(
    tmp_path: Path, content: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    code, text = gate(tmp_path / "out", "--checkpoint", str(tmp_path))
    shown = (text + capfd.readouterr().err).strip()
    assert code == ExitCode.WRONG
    assert said in shown and "\n" not in shown


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nowhere"])
def test_a_place_that_cannot_be_written_to_is_a_usage_error_before_anything_runs(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    for command in (["gate"], ["smoke"], ["report", str(tmp_path)]):
        place = tmp_path / out if command != ["smoke"] else tmp_path / out / "smoke.jsonl"
        result = CliRunner().invoke(app, [*command, "--out", str(place)])
        assert result.exit_code == ExitCode.USAGE
        assert isinstance(result.exception, SystemExit)
        assert "no directory" in " ".join(re.sub("[│\n]", " ", result.output).split())


@pytest.mark.parametrize(
    ("variant", "said"),
    [("CannotBeMade", "no way"), ("HasNoName", "its name must be"), ("HasABadName", "a::b"), ("Session", "__init__")],
)
def test_a_class_that_is_no_target_is_a_usage_error_in_one_line(
    tmp_path: Path, variant: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = gate(tmp_path, *TWO, target(variant))
    shown = (text + capfd.readouterr().err).strip()
    assert code == ExitCode.USAGE
    assert said in shown and "\n" not in shown


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_exception_that_no_file_can_hold_as_it_is_costs_its_cell_only(tmp_path: Path, jobs: int) -> None:
    code, _ = gate(tmp_path, *TWO, target("RaisesSurrogates"), "--layout=dense", f"--jobs={jobs}")
    records = recorded(tmp_path)
    assert code == ExitCode.WRONG
    assert {str(record.outcome) for record in records.values()} == {"error"} and len(records) == 2
    assert "bad \\ud800 text" in records[f"raises_surrogates {REWIND}"].message


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_to_no_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("harness.smoke.run", lambda *_, **__: ran.append("smoke"))
    monkeypatch.setattr("harness.execution.Execution.record", interrupt)
    assert gate(tmp_path, "--smoke", "--jobs=1", *TWO, target("Honest"))[0] == ExitCode.INTERRUPTED
    assert not ran


@pytest.mark.parametrize("place", ["pytest.main", "harness.plugin.header", "harness.execution.Execution.record"])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_run_that_is_interrupted_before_its_first_cell_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, earlier: bool
) -> None:
    if earlier:
        gate(tmp_path, *TWO, target("IsWrong"))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"}
    monkeypatch.setattr(place, interrupt)
    code, text = gate(tmp_path, *TWO, target("Honest"))
    assert code == ExitCode.INTERRUPTED
    assert text.strip() == f"decodegate gate: interrupted before the first cell; {tmp_path} is as it was"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"} == before


@pytest.mark.parametrize(("variant", "code"), [("Honest", ExitCode.INTERRUPTED), ("IsWrong", ExitCode.WRONG)])
def test_a_run_that_is_interrupted_in_its_smoke_writes_its_reports_and_a_cell_that_failed_makes_it_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, code: ExitCode
) -> None:
    monkeypatch.setattr("harness.smoke.run", interrupt)
    assert gate(tmp_path, "--smoke", *TWO, target(variant))[0] == code
    assert len(recorded(tmp_path)) == 2
    assert "did not finish" in (tmp_path / "gate.md").read_text()


def test_a_run_that_selects_no_cell_leaves_the_last_records(tmp_path: Path) -> None:
    gate(tmp_path, *TWO, target("Honest"))
    before = (tmp_path / "gate.jsonl").read_bytes()
    assert gate(tmp_path, *TWO, target("Honest"), "--rerun-failed")[0] == ExitCode.VACUOUS
    assert (tmp_path / "gate.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("selected", "smoked"),
    [
        (["--family=llama"], ["smollm2 float32", "llama float32"]),
        (["--family=llama", "--dtype=bfloat16"], ["smollm2 bfloat16", "llama bfloat16"]),
        (["--family=nemotron_nas", "--dtype=bfloat16", "--dtype=float32"], ["nemotron_nas bfloat16", "nemotron_nas float32"]),
        (["--family=gpt_oss"], []),
    ],
)
def test_the_smoke_of_a_selection_is_of_its_families_and_in_its_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selected: list[str], smoked: list[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("harness.smoke.run", lambda smoke, *_, **__: ran.append(f"{Path(smoke.source).name} {smoke.dtype}"))
    _, text = gate(tmp_path, "--smoke", *selected, f"--check={REPEAT}", "--layout=dense", target("IsNotInstalled"))
    assert ran == smoked
    assert ("there is no checkpoint of the selected families" in text) == (not smoked)


def test_a_checkpoint_is_a_further_case_that_is_selected_as_the_others_are_and_alone_by_its_name(tmp_path: Path) -> None:
    checkpoint = build(find("llama/gqa"), 0, tmp_path)
    common = [f"--checkpoint={checkpoint}", *TWO[1:-1], target("IsNotInstalled")]
    name = f"llama/{checkpoint.name}"
    for selected in (["llama/gqa"], ["llama/gqa", name], [name]):
        gate(tmp_path / "out", *common, *(f"--case={case}" for case in selected))
        assert {record.case for record in load(tmp_path / "out" / "gate.jsonl")[1]} == set(selected)


def test_a_damaged_checkpoint_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    damaged = build(find("llama/gqa"), 0, tmp_path)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-1])
    code, _ = gate(tmp_path / "out", "--checkpoint", str(damaged), f"--check={REPEAT}", f"--case=llama/{damaged.name}")
    assert code == ExitCode.WRONG
    for record in load(tmp_path / "out" / "gate.jsonl")[1]:
        assert record.outcome == "error" and "model.safetensors" in record.message and not record.detail


@pytest.mark.parametrize(
    ("variant", "code"),
    [("Honest", ExitCode.OK), ("IsNotInstalled", ExitCode.TEMPORARY), ("IsWrong", ExitCode.WRONG)],
)
def test_exit_codes_follow_the_outcomes(tmp_path: Path, variant: str, code: ExitCode) -> None:
    assert gate(tmp_path, *TWO, target(variant))[0] == code


def test_a_feature_that_did_not_run_is_vacuous_and_names_its_counter(tmp_path: Path) -> None:
    check = "engine_cut_prefill_matches_full_forward"
    code, _ = gate(tmp_path, target("CutsNothing"), "--case=llama/gqa", "--dtype=float32", "--layout=dense", f"--check={check}")
    record = recorded(tmp_path)[f"cuts_nothing {check}"]
    assert (code, str(record.outcome)) == (ExitCode.VACUOUS, "vacuous")
    assert "counter prefill_chunks" in record.message


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("has_no_effect", "moves the error to 0.0"),
        ("is_never_called", "the code that it breaks was never called"),
        ("raises", "raised RuntimeError: planted"),
    ],
)
def test_a_fault_that_does_not_show_makes_the_cell_vacuous_and_is_named(tmp_path: Path, fault: str, words: str) -> None:
    suite = tmp_path / f"test_weak_{fault}.py"  # a module of its own: this process keeps those it has imported
    suite.write_text(
        "from harness.check import Check\n"
        "from harness.schedule import Schedule\n"
        f"weak = Check('weak', '', lambda case: [Schedule.parse('feed 40')], faults=('{fault}', 'shows'))\n"
    )
    code, records = own_suite(tmp_path, suite, target("Faulty"))
    (record,) = records
    assert code == 1
    assert str(record.outcome) == "vacuous"
    assert f"fault {fault}" in record.message
    assert words in record.message
    assert record.power["shows"] > 20


def own_suite(tmp_path: Path, suite: Path, *arguments: str) -> tuple[int, list[Record]]:
    """pytest, in this process, on a suite of another project."""
    options = [argument.replace("--target", "--gate-target") for argument in arguments]
    file = tmp_path / "own.jsonl"
    off = [f"-pno:{name}" for name in ("randomly", "cacheprovider", "benchmark")]
    loaded = [] if plugin_is_installed() else ["-pharness.plugin"]
    code = pytest.main(
        [
            str(suite), *loaded, *off, "--import-mode=importlib", "-o", "addopts=",
            f"--gate-record={file}", "--gate-case=llama/gqa", "--gate-dtype=float32", "--gate-layout=dense", *options,
        ]
    )  # fmt: skip
    return int(code), load(file)[1]


def test_another_project_uses_the_checks_in_its_own_suite_beside_ordinary_tests(tmp_path: Path) -> None:
    suite = tmp_path / "test_mine.py"
    suite.write_text("from suites.decoding import repeat_is_deterministic\n\ndef test_ordinary():\n    assert True\n")
    code, records = own_suite(tmp_path, suite, target("Honest"))
    assert code == 0
    assert [record.cell for record in records] == ["honest::llama/gqa::repeat_is_deterministic[float32,dense]"]


def test_pytest_selects_a_cell_by_keyword_and_by_node_id(tmp_path: Path) -> None:
    suite = tmp_path / "test_mine.py"
    suite.write_text("from suites.decoding import repeat_is_deterministic, rewind_and_go_on_matches_recompute\n")
    cell = f"honest::llama/gqa::{REPEAT}[float32,dense]"
    for selection in ([str(suite), "-k", "repeat and gqa"], [f"{suite}::{cell}"]):
        code, records = own_suite(tmp_path, Path(selection[0]), target("Honest"), *selection[1:])
        assert code == 0
        assert [record.cell for record in records] == [cell]


@pytest.mark.parametrize(
    ("argument", "near"),
    [
        ("--case=llama/gqaa", "llama/gqa"),
        ("--check=rewind_and_go_on", REWIND),
        ("--check=zzz", "there are batched_steps_match_solo"),
        ("--family=lama", "llama"),
        ("--target=enginee", "engine"),
        ("--dtype=float23", "float32"),
        ("--checkpoint=/nowhere", "'/nowhere' is no directory"),
        ("--build=nowhere", "NAME=DIR"),
    ],
)
def test_an_unknown_name_is_a_usage_error_that_says_what_is_near(tmp_path: Path, argument: str, near: str) -> None:
    code, text = gate(tmp_path, argument)
    assert code == ExitCode.USAGE
    assert near in text
    assert "Traceback" not in text


def test_a_usage_error_leaves_the_last_records_to_rerun_from(tmp_path: Path) -> None:
    gate(tmp_path, *TWO, target("IsWrong"))
    before = (tmp_path / "gate.jsonl").read_bytes()
    assert gate(tmp_path, "--case=llama/gqaa")[0] == ExitCode.USAGE
    assert (tmp_path / "gate.jsonl").read_bytes() == before


def test_a_second_run_into_the_same_place_is_a_usage_error_and_leaves_the_first_alone(tmp_path: Path) -> None:
    (tmp_path / "gate.jsonl").write_text("the first run's\n")
    with filelock.FileLock(tmp_path / ".lock", timeout=0):
        code, text = gate(tmp_path, *TWO, target("Honest"))
    assert code == ExitCode.USAGE
    assert "another run is writing to" in text
    assert (tmp_path / "gate.jsonl").read_text() == "the first run's\n"


def test_a_rerun_takes_what_did_not_pass_and_nothing_else(tmp_path: Path) -> None:
    gate(tmp_path, *TWO, target("IsWrong"))
    code, _ = gate(tmp_path, *TWO, target("IsWrong"), "--rerun-failed")
    assert code == ExitCode.WRONG
    assert list(recorded(tmp_path)) == [f"is_wrong {REWIND}"]


def test_two_jobs_write_the_records_of_one(tmp_path: Path) -> None:
    arguments = [*TWO, "--check=incremental_logits_match_full_forward", target("IsWrong")]
    gate(tmp_path / "one", *arguments)
    code, _ = gate(tmp_path / "two", *arguments, "--jobs=2")
    one, two = recorded(tmp_path / "one"), recorded(tmp_path / "two")
    assert code == ExitCode.WRONG
    assert {name: (r.outcome, r.error_ratio) for name, r in one.items()} == {
        name: (r.outcome, r.error_ratio) for name, r in two.items()
    }
    assert load(tmp_path / "two" / "gate.jsonl")[0].selected == 3


def test_a_shuffled_run_has_the_same_cells_in_an_order_drawn_from_the_seed(tmp_path: Path) -> None:
    orders = []
    for seed in (1, 1, 2):
        gate(
            tmp_path,
            "--case=llama/gqa",
            "--dtype=float32",
            "--target=suites.harness.fake:IsNotInstalled",
            "--shuffle",
            f"--seed={seed}",
        )
        orders.append([record.cell for record in load(tmp_path / "gate.jsonl")[1]])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def _until(found: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not found() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)
    assert found()  # type: ignore[operator]


def _lines(out: Path) -> int:
    file = out / "gate.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _worker(process: subprocess.Popen[bytes]) -> psutil.Process:
    (worker,) = (
        child for child in psutil.Process(process.pid).children() if any("spawn_main" in word for word in child.cmdline())
    )
    return worker


def _is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_run_that_is_killed_loses_no_finished_record_and_leaves_no_process(tmp_path: Path) -> None:
    command = gate_command(
        tmp_path, "--jobs=1", "--case=llama/gqa", "--dtype=float32", "--layout=dense", target("LingersOnEachRun")
    )
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _until(lambda: _lines(tmp_path) >= 4)
    worker = _worker(process)
    process.kill()
    process.wait()
    header, records = load(tmp_path / "gate.jsonl")
    assert 3 <= len(records) < header.selected
    assert {str(record.outcome) for record in records} <= {"pass", "unsupported"}
    _until(lambda: _is_gone(worker), 10)

    code, _ = gate(
        tmp_path, "--case=llama/gqa", "--rerun-failed", target("LingersOnEachRun"), "--dtype=float32", "--layout=dense"
    )
    assert code == ExitCode.OK
    done = {record.cell for record in records}
    assert not done & {record.cell for record in load(tmp_path / "gate.jsonl")[1]}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_is_asked_to_end_writes_its_reports_says_nothing_else_and_leaves_no_process(
    tmp_path: Path, jobs: int
) -> None:
    out, said = tmp_path / "out", tmp_path / "said"
    command = gate_command(
        out, f"--jobs={jobs}", "--case=llama/gqa", "--dtype=float32", "--layout=dense", target("LingersOnEachRun")
    )
    with said.open("wb") as file:
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=file)
        _until(lambda: _lines(out) >= 3)
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(timeout=90) == ExitCode.INTERRUPTED  # nothing was wrong in what had been run
    header, records = load(out / "gate.jsonl")
    assert 2 <= len(records) < header.selected
    assert {str(record.outcome) for record in records} <= {"pass", "unsupported"}
    assert "did not finish" in (out / "gate.md").read_text()
    assert said.read_text() == ""
    _until(lambda: all(map(_is_gone, children)), 10)


@pytest.mark.parametrize("killed", ["spawn_main", "sys.stdin.readline"])  # a worker; a process of pytest-xdist
def test_any_process_of_several_jobs_that_is_killed_is_a_crash_of_one_cell(tmp_path: Path, killed: str) -> None:
    command = gate_command(
        tmp_path, "--jobs=2", "--case=llama/gqa", "--dtype=float32", "--layout=dense", target("LingersOnEachRun")
    )
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _until(lambda: _lines(tmp_path) >= 3)
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len([child for child in processes if "spawn_main" in " ".join(child.cmdline())]) == 2, "none stands idle"
    next(child for child in processes if killed in " ".join(child.cmdline())).kill()
    assert process.wait(timeout=90) == ExitCode.WRONG
    header, records = load(tmp_path / "gate.jsonl")
    outcomes = [str(record.outcome) for record in records if record.outcome != "unsupported"]
    assert sorted(outcomes) == ["crash", *["pass"] * (len(outcomes) - 1)]
    assert len({record.cell for record in records}) == len(records) == header.selected
    assert next(record for record in records if record.outcome == "crash").replay


def test_a_replay_takes_a_checkpoint_under_the_name_that_a_run_gave_it(tmp_path: Path) -> None:
    checkpoint = build(find("llama/gqa"), 0, tmp_path)
    command = ["replay", "engine::llama/other-2::x[float32,dense]", "--schedule=feed 5", f"--checkpoint={checkpoint}"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == ExitCode.OK and "MATCH" in result.output
    command[1] = "engine::nemotron_nas/other::x[float32,dense]"
    result = CliRunner().invoke(app, command)
    assert result.exit_code == ExitCode.USAGE and "llama family" in result.output


def test_a_worker_that_is_killed_in_a_run_is_a_crash_of_one_cell_and_exit_code_1(tmp_path: Path) -> None:
    command = gate_command(
        tmp_path, "--jobs=1", "--case=llama/gqa", "--dtype=float32", "--layout=dense", target("LingersOnEachRun")
    )
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _until(lambda: _lines(tmp_path) >= 2)
    os.kill(_worker(process).pid, signal.SIGKILL)
    assert process.wait(timeout=90) == ExitCode.WRONG
    outcomes = sorted(str(record.outcome) for record in load(tmp_path / "gate.jsonl")[1] if record.outcome != "unsupported")
    assert outcomes == ["crash", *["pass"] * (len(outcomes) - 1)] and len(outcomes) > 4


def test_the_example_of_an_adapter_in_the_docs_passes_what_it_says_that_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = str(Path(__file__).parents[2] / "docs")
    monkeypatch.syspath_prepend(docs)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([docs, os.environ.get("PYTHONPATH", "")]))
    code, text = gate(tmp_path, "--target=example_target:Target", "--case=llama/gqa", "--dtype=float32", "--layout=dense")
    outcomes = [str(record.outcome) for record in load(tmp_path / "gate.jsonl")[1]]
    assert code == ExitCode.OK, text
    assert set(outcomes) == {"pass", "unsupported"} and outcomes.count("pass") >= 6
