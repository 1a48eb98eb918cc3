"""The device lock: never two inside, nobody is told stale news, a killed holder frees it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from harness import lock
from harness.outcomes import Infra

HOLD = (
    "import sys, time; from harness.lock import hold\nwith hold('holder under test'):\n print('in', flush=True); time.sleep(60)"
)


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch) -> Path:
    found = tmp_path / "device.lock"
    monkeypatch.setenv(lock.PATH_VARIABLE, str(found))
    monkeypatch.delenv(lock.PROOF_VARIABLE, raising=False)
    return found


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def holding_process():
    with start(HOLD) as process:
        try:
            assert process.stdout and process.stdout.readline() == "in\n"
            yield process
        finally:
            process.kill()


def cli(*arguments: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "decodegate", "lock", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_twenty_processes_get_through_and_never_two_are_inside(tmp_path):
    code = (
        "import os, sys, time; from harness.lock import hold\n"
        "inside, count = sys.argv[1:]\n"
        "for _ in range(3):\n"
        " with hold('contender', timeout=60, notify=lambda text: None):\n"
        "  marker = os.open(inside, os.O_CREAT | os.O_EXCL)\n"  # fails when another is inside
        "  seen = int(open(count).read()); time.sleep(0.002)\n"
        "  open(count, 'w').write(str(seen + 1))\n"
        "  os.close(marker); os.unlink(inside)\n"
    )
    count = tmp_path / "count"
    count.write_text("0")
    contenders = [start(code, str(tmp_path / "inside"), str(count)) for _ in range(20)]
    errors = [contender.communicate(timeout=60)[1] for contender in contenders]
    assert [contender.returncode for contender in contenders] == [0] * 20, next(filter(None, errors))
    assert count.read_text() == "60"


def test_a_killed_holder_frees_the_lock_and_is_not_believed_any_more(path):
    with holding_process() as process:
        assert lock.status().holder is not None
        process.kill()
        process.wait()
        assert lock._holder_path(path).exists(), "a killed holder cannot clean up"
        assert lock.status() == lock.Status(path, False, None)
        with lock.hold(timeout=5) as waited:
            assert waited < 1


def test_lock_moves_on_while_holders_are_killed_one_after_another(tmp_path):
    code = "import os; from harness.lock import hold\nwith hold(notify=lambda t: None):\n os.kill(os.getpid(), 9)"
    doomed = [start(code) for _ in range(6)]
    for process in doomed:
        process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
    with lock.hold(timeout=5):
        assert lock.status().holder.pid == os.getpid()


def test_waiter_is_told_who_holds_the_lock_and_for_how_long():
    said: list[str] = []
    with holding_process() as process:
        with pytest.raises(Infra) as deadline, lock.hold(timeout=0.3, notify=said.append):
            pytest.fail("two inside")
        assert f"pid {process.pid} (holder under test) since" in said[0]
        assert f"pid {process.pid} (holder under test) since" in str(deadline.value)
        assert "0.3 s" in str(deadline.value)


def test_status_names_the_holder_and_says_free_after_it(path):
    assert lock.status() == lock.Status(path, False, None)
    with lock.hold("measuring"):
        found = lock.status()
        assert found.held and found.holder.pid == os.getpid() and found.holder.command == "measuring"
    assert lock.status() == lock.Status(path, False, None)


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 2**22 + 7},
        {"started": 1.0},
        {"pid": -1},
        {"pid": "x"},
        {"since": float("nan")},
        {"command": "x" * 5000},
    ],
)
def test_holder_file_that_cannot_be_true_is_not_believed(path, change):
    with lock.hold("true"):
        file = lock._holder_path(path)
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        assert lock.status() == lock.Status(path, True, None)


def test_holder_file_cannot_drive_the_terminal():
    with lock.hold("evil\x1b[2J\nnext"):
        assert lock.status().holder.command == "evil [2J next"


def test_same_thread_may_enter_again():
    with lock.hold(), lock.hold(timeout=0) as waited:
        assert waited == 0


def test_other_thread_of_the_same_process_waits():
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            with lock.hold(timeout=0.1):
                pass
        except Infra as error:
            caught.append(error)

    with lock.hold():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(caught) == 1


def test_child_of_a_holder_does_not_deadlock_but_two_children_exclude_each_other():
    with lock.hold("parent"):
        inner = cli("--timeout", "0", "--", sys.executable, "-c", "print('nested')")
        assert inner.communicate(timeout=30)[0] == "nested\n"
        with holding_process():
            second = cli("--timeout", "0.2", "--", "true")
            assert "holder under test" in second.communicate(timeout=30)[1]
            assert second.returncode == 75


def test_forged_or_outlived_proof_gives_no_entry(monkeypatch):
    with lock.hold():
        proof = os.environ[lock.PROOF_VARIABLE]
    assert lock.PROOF_VARIABLE not in os.environ
    with holding_process():
        for forged in (proof, "0:", f"0:{'0' * 32}", "7:x", "junk", "²:x"):
            monkeypatch.setenv(lock.PROOF_VARIABLE, forged)
            with pytest.raises(Infra), lock.hold(timeout=0, notify=lambda text: None):
                pytest.fail(f"{forged} let us in")


def test_exception_inside_frees_the_lock(path):
    with pytest.raises(ZeroDivisionError), lock.hold():
        _ = 1 / 0
    assert not lock.status().held


def test_unusable_path_is_infra_that_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setenv(lock.PATH_VARIABLE, str(tmp_path / "absent" / "no.lock"))
    (tmp_path / "absent").write_text("a file, not a directory")
    with pytest.raises(Infra, match=lock.PATH_VARIABLE), lock.hold(timeout=0):
        pass


def test_default_path_is_private_to_the_user_and_does_not_follow_tmpdir(tmp_path, monkeypatch):
    monkeypatch.delenv(lock.PATH_VARIABLE)
    before = lock.lock_path("cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert lock.lock_path("cpu") == before != lock.lock_path("cuda0")
    assert before.parent.stat().st_mode & 0o077 == 0


def test_command_passes_exit_code_and_signal_death_through():
    assert cli("--", sys.executable, "-c", "raise SystemExit(7)").wait(30) == 7
    assert cli("--", "sh", "-c", "kill -9 $$").wait(30) == 128 + 9
    assert cli("--", "no-such-command-here").wait(30) == 127
    assert cli().wait(30) == 2


def test_command_forwards_signals_to_its_child():
    child = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('up', flush=True)\n"
        "time.sleep(60)"
    )
    process = cli("--", sys.executable, "-c", child, stdin=subprocess.DEVNULL)
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(30) == 9
    assert not lock.status().held


def test_killed_lock_command_frees_the_lock_and_takes_its_child_along():
    process = cli("--", sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    with lock.hold(timeout=5):
        pass
    if sys.platform == "linux":
        deadline = time.monotonic() + 10
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the command went on using the device without the lock"
            time.sleep(0.02)
    else:
        child.kill()
