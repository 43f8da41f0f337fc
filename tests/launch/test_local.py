"""Real worker processes: they end well, fail, are killed, are stopped; none is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tonnage.errors import Problem, UserError, WorkerFailed
from tonnage.launch.local import Crew, run_workers
from tonnage.launch.watch import DONE, STOPPED
from tonnage.rundir.directory import RunDirectory

PROLOGUE = """
import os, pathlib, signal, sys, time
from tonnage.errors import Problem, UserError
from tonnage.rundir.directory import RunDirectory
run, rank = RunDirectory(sys.argv[1]), int(os.environ["RANK"])

def write(name, text):  # whole or not there: a test reads it at any time
    (run.path / f".{name}").write_text(text)
    (run.path / f".{name}").rename(run.path / name)

write(f"pid-{rank}", str(os.getpid()))

def wait_for(*names):
    while not all((run.path / name).exists() for name in names):
        time.sleep(0.01)

def fail(error, status):
    try:
        raise error
    except Exception as caught:
        run.write_error(rank, caught, status)
        sys.exit(status)
"""

WAIT_TO_BE_STOPPED = """
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
(run.path / f"ready-{rank}").touch()
while not stopped:
    time.sleep(0.01)
time.sleep(0.5)
write(f"saved-{rank}", str(len(stopped)))
sys.exit(3)
"""

IGNORE_SIGTERM = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run.path / f"ready-{rank}").touch()
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def command(run: RunDirectory, body: str) -> list[str]:
    """A worker that executes ``body``."""
    script = run.path / "worker.py"
    run.path.mkdir(exist_ok=True)
    script.write_text(PROLOGUE + textwrap.dedent(body))
    return [sys.executable, str(script), str(run.path)]


def launch(run: RunDirectory, body: str, num_workers: int = 2, poll: Callable[[], None] | None = None) -> int:
    return run_workers(run, num_workers, 1, poll=poll, command=command(run, body))


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def pids(run: RunDirectory, name: str = "pid") -> list[int]:
    return [int(path.read_text()) for path in run.path.glob(f"{name}-*")]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose parent has not looked yet does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def assert_none_left(run: RunDirectory, seconds: float = 0.0) -> None:
    wait_until(lambda: not any(map(is_alive, pids(run))), seconds + 0.5)


class Launcher:
    """A launcher in a process of its own, so that it can be signalled."""

    def __init__(self, run: RunDirectory, body: str, num_workers: int = 2, prefix: tuple[str, ...] = ()) -> None:
        script = run.path.parent / "launcher.py"
        script.write_text(
            "import sys\nfrom tonnage.launch.local import run_workers\n"
            "from tonnage.rundir.directory import RunDirectory\n"
            "try:\n"
            "    status = run_workers(RunDirectory(sys.argv[1]), int(sys.argv[2]), 1, command=sys.argv[3:])\n"
            "except KeyboardInterrupt:\n"
            "    status = 130\n"
            "sys.exit(status)\n"
        )
        arguments = [*prefix, sys.executable, str(script), str(run.path), str(num_workers), *command(run, body)]
        self.process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def end(self, seconds: float = 10) -> int:
        """Its exit status, once it has ended."""
        _, output = self.process.communicate(timeout=seconds)
        assert "Traceback" not in output
        return self.process.returncode


def ready(run: RunDirectory, num_workers: int = 2) -> Callable[[], bool]:
    return lambda: len(list(run.path.glob("ready-*"))) == num_workers


def test_workers_are_told_who_they_are(run: RunDirectory) -> None:
    body = """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    print(*(os.environ[name] for name in names), int(os.environ["MASTER_PORT"]) > 1024)
    """
    assert run_workers(run, 3, 5, command=command(run, body)) == DONE
    for rank in range(3):
        assert run.worker_log(rank).read_text() == f"{rank} 3 {rank} 3 127.0.0.1 5 True\n"


def test_poll_is_called_while_workers_run(run: RunDirectory) -> None:
    calls: list[float] = []
    began = time.monotonic()
    assert launch(run, "time.sleep(0.6)", poll=lambda: calls.append(time.monotonic())) == DONE
    assert 3 <= len(calls) <= 2 + (time.monotonic() - began) / 0.1


def test_a_display_that_lost_its_terminal_does_not_end_the_run(run: RunDirectory) -> None:
    def poll() -> None:
        raise OSError("input/output error")

    assert launch(run, "time.sleep(0.5)", poll=poll) == DONE


def test_a_fault_of_poll_leaves_no_worker(run: RunDirectory) -> None:
    def poll() -> None:
        if len(pids(run)) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(run, "time.sleep(60)", poll=poll)
    assert_none_left(run)


def test_one_worker_raises_and_all_stop(run: RunDirectory) -> None:
    body = """
    if rank == 1:
        wait_for("pid-0", "pid-2")
        fail(ZeroDivisionError("the first cause"), 1)
    time.sleep(60)
    """
    began = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        launch(run, body, num_workers=3)
    assert time.monotonic() - began < 30  # they would sleep for 60
    message = str(caught.value)
    assert message.startswith("worker 1 (of 3) failed: ZeroDivisionError: the first cause")
    assert message.count("raise error") == 1
    assert_none_left(run)


def test_the_earliest_error_is_shown_and_no_other(run: RunDirectory) -> None:
    body = """
    if rank == 2:
        fail(ValueError("the cause"), 1)
    while not run.worker_error(2).exists():
        time.sleep(0.01)
    fail(ConnectionError("lost a peer"), 1)
    """
    with pytest.raises(WorkerFailed, match="worker 2") as caught:
        launch(run, body, num_workers=4)
    assert "lost a peer" not in str(caught.value)


def test_the_earliest_error_is_shown_if_its_worker_is_slow_to_leave(run: RunDirectory) -> None:
    body = """
    if rank == 1:
        try:
            fail(ValueError("the cause"), 1)
        finally:
            time.sleep(60)
    while not run.worker_error(1).exists():
        time.sleep(0.01)
    fail(ConnectionError("lost a peer"), 1)
    """
    with pytest.raises(WorkerFailed, match=r"worker 1 \(of 2\) failed: ValueError: the cause"):
        launch(run, body)
    assert_none_left(run)


def test_a_killed_worker_is_the_cause_of_its_peers_complaints(run: RunDirectory) -> None:
    body = """
    if rank == 0:
        print("in the middle of a step", flush=True)
        wait_for("pid-1")
        os.kill(os.getpid(), signal.SIGKILL)
    pid = None
    while pid is None:
        try:
            pid = int((run.path / "pid-0").read_text())
        except (OSError, ValueError):
            time.sleep(0.01)
    while "Z" not in os.popen(f"ps -o stat= -p {pid}").read() and os.system(f"kill -0 {pid} 2>/dev/null") == 0:
        time.sleep(0.01)
    fail(ConnectionError("connection closed by peer"), 1)
    """
    with pytest.raises(WorkerFailed) as caught:
        launch(run, body)
    message = str(caught.value)
    assert message.startswith("worker 0 (of 2) was killed by SIGKILL")
    assert "memory" in message
    assert "in the middle of a step" in message
    assert_none_left(run)


def test_a_killed_worker_is_the_cause_also_if_its_peer_is_seen_to_fail_first(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Crew.update

    def first_without_rank_0(crew: Crew) -> bool:
        monkeypatch.setattr(Crew, "update", look)
        seen = crew.workers[0].last_seen_alive
        for worker in crew.workers:
            os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        killed = crew.workers[0].process
        crew.workers[0].process = SimpleNamespace(poll=lambda: None, pid=killed.pid)  # type: ignore[assignment]
        look(crew)
        crew.workers[0].process, crew.workers[0].last_seen_alive = killed, seen
        return True

    monkeypatch.setattr(Crew, "update", first_without_rank_0)
    body = """
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    fail(ConnectionError("connection closed by peer"), 1)
    """
    with pytest.raises(WorkerFailed, match=r"worker 0 \(of 2\) was killed by SIGKILL"):
        launch(run, body)


def test_a_users_mistake_arrives_whole(run: RunDirectory) -> None:
    body = """
    fail(UserError(Problem("3 rows", "4 rows", "add one", "data.json"), Problem("a", "b")), 2)
    """
    with pytest.raises(UserError) as caught:
        launch(run, body)
    assert caught.value.problems == (Problem("3 rows", "4 rows", "add one", "data.json"), Problem("a", "b"))


def test_a_worker_that_leaves_no_error(run: RunDirectory) -> None:
    with pytest.raises(WorkerFailed, match=r"exit status 7(.|\n)*last words"):
        launch(run, "print('last words'); sys.exit(7)", num_workers=1)


def test_a_worker_that_cannot_be_started(run: RunDirectory) -> None:
    with pytest.raises(FileNotFoundError):
        run_workers(run, 2, 1, command=["/no/such/program"])


def test_errors_of_an_earlier_launch_are_forgotten(run: RunDirectory) -> None:
    with pytest.raises(WorkerFailed, match="old"):
        launch(run, "fail(ValueError('old'), 1)", num_workers=1)
    assert launch(run, "pass", num_workers=1) == DONE
    assert not run.read_errors()


@pytest.mark.slow
def test_a_peer_that_ignores_sigterm_is_killed(run: RunDirectory) -> None:
    body = f"""
    if rank == 0:
        wait_for("ready-1")
        fail(ValueError("boom"), 1)
    {textwrap.indent(IGNORE_SIGTERM, "    ").strip()}
    """
    with pytest.raises(WorkerFailed, match="boom"):
        launch(run, body)
    assert_none_left(run)


def test_processes_that_a_worker_started_end_with_it(run: RunDirectory) -> None:
    body = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    write(f"child-{rank}", str(child.pid))
    """
    assert launch(run, body) == DONE
    wait_until(lambda: not any(map(is_alive, pids(run, "child"))), 1)


def test_ctrl_c_stops_once_and_waits_for_the_save(run: RunDirectory) -> None:
    launcher = Launcher(run, WAIT_TO_BE_STOPPED)
    wait_until(ready(run))
    launcher.process.send_signal(signal.SIGINT)
    launcher.process.send_signal(signal.SIGINT)  # a wrapper passing the same key press on
    assert launcher.end() == STOPPED
    assert [path.read_text() for path in run.path.glob("saved-*")] == ["1", "1"]
    assert run.stop_asked.exists()


def test_sigterm_and_a_lost_terminal_stop_too(run: RunDirectory) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        for path in run.path.glob("ready-*"):
            path.unlink()
        launcher = Launcher(run, WAIT_TO_BE_STOPPED, num_workers=1)
        wait_until(ready(run, 1))
        launcher.process.send_signal(number)
        assert launcher.end() == STOPPED


def test_nohup_is_respected(run: RunDirectory) -> None:
    launcher = Launcher(run, WAIT_TO_BE_STOPPED, num_workers=1, prefix=("nohup",))
    wait_until(ready(run, 1))
    launcher.process.send_signal(signal.SIGHUP)
    time.sleep(0.4)
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGTERM)
    _, _ = launcher.process.communicate(timeout=10)
    assert launcher.process.returncode == STOPPED


def test_a_second_ctrl_c_kills(run: RunDirectory) -> None:
    launcher = Launcher(run, IGNORE_SIGTERM)
    wait_until(ready(run))
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end(seconds=3) == 130
    assert_none_left(run)


def test_ctrl_c_before_workers_can_save(run: RunDirectory) -> None:
    launcher = Launcher(run, "time.sleep(60)")
    wait_until(lambda: len(pids(run)) == 2)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end(seconds=5) == 130
    assert_none_left(run)


@pytest.mark.parametrize("body", [IGNORE_SIGTERM, "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_no_worker_survives_a_killed_launcher(run: RunDirectory, body: str) -> None:
    launcher = Launcher(run, body, num_workers=3)
    wait_until(lambda: len([path for path in run.path.glob("pid-*") if path.read_text()]) == 3)
    launcher.process.kill()
    launcher.process.communicate()
    assert len(pids(run)) == 3
    assert_none_left(run, seconds=2)


@pytest.mark.slow
def test_many_workers(run: RunDirectory) -> None:
    body = """
    import os, time
    (run.path / f"here-{rank}").touch()
    wait_for(*(f"here-{other}" for other in range(int(os.environ["WORLD_SIZE"]))))
    """
    assert launch(run, body, num_workers=24) == DONE


def test_worker_0_can_listen_on_its_port_and_others_cannot_take_it(run: RunDirectory) -> None:
    body = """
    import socket
    port = int(os.environ["MASTER_PORT"])
    taker = socket.socket()
    try:
        taker.bind(("127.0.0.1", port))
    except OSError:
        print("reserved")
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taker.close()
    server.bind(("", port))
    server.listen()
    print("listening")
    """
    assert launch(run, body, num_workers=1) == DONE
    said = run.worker_log(0).read_text().split()
    assert said[-1] == "listening"
    assert sys.platform != "linux" or said[0] == "reserved"


def test_the_default_command_is_the_training_worker(run: RunDirectory) -> None:
    """Without a run to carry out it fails, and says so itself."""
    with pytest.raises((WorkerFailed, UserError)):
        run_workers(run, 1, 1)
    (error,) = run.read_errors()
    assert error.rank == 0
    assert "worker.py" in error.trace
    assert "RANK" not in os.environ
