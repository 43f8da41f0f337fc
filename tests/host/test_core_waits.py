"""Time that threads waited for cores, from files as Linux writes them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tonnage.host.core_waits import CoreWaits


def write_thread(tasks: Path, number: int, waited: float, nice: int = 0) -> None:
    folder = tasks / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"123456 {int(waited * 1e9)} 42\n")
    (folder / "stat").write_text(f"{number} (a (name) ) S 1 1 1 0 -1 4194304 9 0 0 0 1 0 0 0 20 {nice} 9 0 1 1 1\n")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("tonnage.host.core_waits.time.perf_counter", lambda: now[0])
    return now


def test_the_thread_that_waited_longest_counts(tmp_path: Path, clock: list[float]) -> None:
    for number in (1, 2, 3):
        write_thread(tmp_path, number, 1.0, nice=10 * (number == 3))
    said = list[str]()
    waits = CoreWaits(said.append, tmp_path)
    clock[0] += 0.5
    assert waits.of_step(1, 0.5) == {}  # too short to look
    clock[0] += 1.5
    write_thread(tmp_path, 1, 1.2)
    write_thread(tmp_path, 2, 1.8)
    write_thread(tmp_path, 3, 2.9, nice=10)  # gives way, as it means to
    write_thread(tmp_path, 4, 0.1)  # begun meanwhile
    assert waits.of_step(2, 1.5) == {"core_wait": 0.4}
    clock[0] += 0.5
    assert waits.of_step(3, 0.5) == {"core_wait": 0.4}  # as was last seen
    clock[0] += 1.0
    assert waits.of_step(4, 1.0) == {"core_wait": 0.0}
    assert [line.split(":")[0] for line in said] == ["step 2 took 1.50 s", "step 4 took 1.00 s"]
    assert "40% of the time" in said[0]


def test_nothing_is_said_where_nothing_is_counted(tmp_path: Path, clock: list[float]) -> None:
    waits = CoreWaits(pytest.fail, tmp_path)
    clock[0] += 5
    assert waits.of_step(1, 5.0) == {}


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count")
def test_beside_a_busy_process_on_one_core() -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from tonnage.host.core_waits import CoreWaits\n"
        "busy = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "waits, end = CoreWaits(print), time.perf_counter() + 1.1\n"
        "while time.perf_counter() < end: pass\n"
        "print(waits.of_step(1, 1.1)['core_wait'])\n"
        "busy.kill()\n"
    )
    began = time.perf_counter()
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert time.perf_counter() - began < 30
    assert lines[0].startswith("step 1 took 1.10 s: for ")
    assert 0.2 < float(lines[1]) <= 1.0
