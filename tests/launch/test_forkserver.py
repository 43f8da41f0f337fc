"""Workers that are forked: they are as good as started, and nothing of them stays."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tonnage.errors import WorkerFailed
from tonnage.launch.forkserver import Forked, ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

WORKER = """
import fcntl, json, os, signal, sys, time

def main(*words):
    told = {"words": words, "argv": sys.argv, "environment": dict(os.environ), "directory": os.getcwd(),
            "group": os.getpgid(0) == os.getpid(), "parent": os.getppid()}
    print(json.dumps(told))
    if words[0] == "returns":
        return int(words[1])
    if words[0] == "exits":
        sys.exit(None if words[1] == "None" else int(words[1]) if words[1].isdigit() else words[1])
    if words[0] == "raises":
        raise ZeroDivisionError("by hand")
    if words[0] == "forgives":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    time.sleep(60)
"""
THRESHOLDS = (700, 10, 10)


@pytest.fixture
def among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have threads of its own, which wait."""
    monkeypatch.setattr("tonnage.launch.forkserver.can_fork", lambda: True)


@pytest.mark.slow
def test_a_process_that_uses_a_gpu_is_not_copied() -> None:
    program = (
        "import torch; from tonnage.launch.forkserver import can_fork; before = can_fork(); "
        "torch.cuda.is_initialized = lambda: True; print(before, can_fork())"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split() == [
        "True",
        "False",
    ]


@pytest.fixture
def forkserver(among_threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "some_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    with ForkServer(lambda: None, THRESHOLDS) as forkserver:
        yield forkserver


def fork(forkserver: ForkServer, folder: Path, *words: str, keep_open: tuple[int, ...] = ()) -> tuple[Forked, Path]:
    said = folder / f"said-{'-'.join(words)}"
    with said.open("wb") as output:
        environment = {"RANK": "0", "PATH": os.environ["PATH"], "LONG": "x" * 300_000}
        forked = forkserver.fork(
            "some_worker", words, environment, output=output.fileno(), keep_open=keep_open, directory=folder
        )
    return forked, said


def awaited(path: Path) -> dict[str, object]:
    deadline = time.monotonic() + 10
    while not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found: dict[str, object] = json.loads(path.read_text().splitlines()[0])
    return found


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_what_was_told_is_there_and_nothing_else(forkserver: ForkServer, tmp_path: Path) -> None:
    forked, said = fork(forkserver, tmp_path, "returns", "0")
    assert forked.wait() == 0
    told = awaited(said)
    assert told["words"] == ["returns", "0"]
    assert told["argv"] == ["some_worker", "returns", "0"]
    assert told["directory"] == str(tmp_path)
    assert told["group"]
    environment = told["environment"]
    assert isinstance(environment, dict)
    assert environment.pop("TONNAGE_LAUNCHER_PROCESS") == str(told["parent"])
    assert environment.keys() == {"RANK", "PATH", "LONG"}


@pytest.mark.parametrize(
    ("words", "status"),
    [(("returns", "3"), 3), (("exits", "2"), 2), (("exits", "None"), 0), (("exits", "words"), 1), (("raises",), 1)],
)
def test_how_it_ends_is_told(forkserver: ForkServer, tmp_path: Path, words: tuple[str, ...], status: int) -> None:
    forked, said = fork(forkserver, tmp_path, *words)
    assert forked.wait() == forked.poll() == status
    assert ("ZeroDivisionError: by hand" in said.read_text()) == (words[0] == "raises")


def test_signals_arrive_and_several_ends_are_kept_apart(forkserver: ForkServer, tmp_path: Path) -> None:
    dies, first = fork(forkserver, tmp_path, "sleeps", "1")
    forgives, second = fork(forkserver, tmp_path, "forgives")
    sleeps, third = fork(forkserver, tmp_path, "sleeps", "2")
    for said in (first, second, third):
        awaited(said)
    assert [one.poll() for one in (dies, forgives, sleeps)] == [None] * 3
    dies.send_signal(signal.SIGKILL)
    forgives.send_signal(signal.SIGTERM)
    sleeps.send_signal(signal.SIGTERM)
    assert [one.wait() for one in (sleeps, forgives, dies)] == [-signal.SIGTERM, 3, -signal.SIGKILL]
    dies.send_signal(signal.SIGTERM)  # to nobody


def test_a_signal_right_after_the_fork_is_not_lost(forkserver: ForkServer, tmp_path: Path) -> None:
    for number in range(6):
        forked, _ = fork(forkserver, tmp_path, "sleeps", str(number))
        forked.send_signal(signal.SIGTERM)
        assert forked.wait() == -signal.SIGTERM


def test_its_group_is_there_right_after_the_fork(forkserver: ForkServer, tmp_path: Path) -> None:
    for number in range(6):
        forked, _ = fork(forkserver, tmp_path, "sleeps", str(number))
        os.killpg(forked.pid, signal.SIGKILL)
        assert forked.wait() == -signal.SIGKILL


def test_no_room_for_another_process_is_an_error_and_no_end(
    among_threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    real, calls = os.fork, []

    def refused_once() -> int:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.EAGAIN, "")
        return real()

    monkeypatch.setattr(os, "fork", refused_once)
    with ForkServer(lambda: None, THRESHOLDS) as forkserver:
        with pytest.raises(OSError, match="unavailable"):
            fork(forkserver, tmp_path, "returns", "0")
        assert fork(forkserver, tmp_path, "returns", "4")[0].wait() == 4


def test_threads_that_were_begun_meanwhile_are_no_copy(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    with pytest.raises(OSError, match="threads"):
        ForkServer(thread.start, THRESHOLDS)
    stop.set()
    thread.join()


def test_children_of_whom_nobody_wants_to_hear(among_threads: None) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with ForkServer(lambda: None, THRESHOLDS):
            pass
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_ends_at_the_same_time_are_all_heard_of(forkserver: ForkServer, tmp_path: Path) -> None:
    forked = [fork(forkserver, tmp_path, "returns", str(number))[0] for number in range(5)]
    time.sleep(0.5)
    deadline = time.monotonic() + 10
    while any(one.poll() is None for one in reversed(forked)):
        assert time.monotonic() < deadline
    assert [one.poll() for one in forked] == [0, 1, 2, 3, 4]


def test_what_is_locked_stays_locked_as_long_as_it_lives(forkserver: ForkServer, tmp_path: Path) -> None:
    import fcntl

    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    forked, said = fork(forkserver, tmp_path, "sleeps", keep_open=(held,))
    awaited(said)
    os.close(held)
    again = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    forked.send_signal(signal.SIGKILL)
    forked.wait()
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(again)


def test_a_killed_forkserver_takes_its_workers_with_it(forkserver: ForkServer, tmp_path: Path) -> None:
    forked, said = fork(forkserver, tmp_path, "sleeps")
    worker = awaited(said)
    assert isinstance(worker["parent"], int)
    os.kill(worker["parent"], signal.SIGKILL)
    assert forked.wait() == -signal.SIGKILL
    assert is_gone(forked.pid)
    with pytest.raises(WorkerFailed, match="something killed it"):
        fork(forkserver, tmp_path, "returns", "0")


def test_nothing_is_left_when_the_context_is(
    among_threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    with ForkServer(lambda: None, THRESHOLDS) as forkserver:
        forked, said = fork(forkserver, tmp_path, "forgives")
        awaited(said)
    assert is_gone(forked.pid)


LAUNCHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tonnage.errors import WorkerFailed
from tonnage.launch.forkserver import ForkServer
forkserver = ForkServer(lambda: None, (700, 10, 10))
with open(Path(sys.argv[1], "said"), "wb") as output:
    forked = forkserver.fork("some_worker", ["forgives"], {"RANK": "0"}, output=output.fileno())
print(forked.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "some_worker.py").write_text(WORKER)
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None
        worker = int(launcher.stdout.readline())
        forkserver = awaited(tmp_path / "said")["parent"]
        assert isinstance(forkserver, int)
        launcher.kill()
    assert is_gone(forkserver)
    assert is_gone(worker)


ASKED = """
import torch
torch.cuda.is_available, torch.version.cuda = lambda: True, "13.0"
asked = []
torch.cuda.get_device_capability = lambda *_: asked.append("capability") or (9, 0)
torch.cuda.device_count = lambda: asked.append("count") or 1
from tonnage.training.worker import import_all
import_all("llama")
assert torch.cuda.is_available()
print(asked)
"""


@pytest.mark.matrix
def test_imports_ask_no_device_what_it_can_do() -> None:
    """That would begin CUDA, and no process that has begun it can be forked. torchao asks when it is imported."""
    pytest.importorskip("torchao")
    ended = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
