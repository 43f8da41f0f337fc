"""Threads of OpenMP that sleep soon while others use the machine."""

import os
import subprocess
import sys

import pytest

from tonnage.host import spinning

PAUSES = """
import os, time
os.sched_setaffinity(0, range(os.cpu_count()))
import torch
from tonnage.host import spinning
torch.set_num_threads(2)
numbers = torch.zeros(1_000_000)

def used():
    began, before = time.perf_counter(), time.process_time()
    for _ in range(40):
        numbers.add_(1)
        time.sleep(0.005)
    return (time.process_time() - before) / (time.perf_counter() - began)

used()
alone = used()
pools = [spinning._SecondPool(library) for library in spinning._libraries()]
time.sleep(0.1)
beside = used()
for pool in pools:
    pool.close()
print(alone, beside, used())
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2 or sys.platform != "linux", reason="nobody waits on one CPU")
def test_a_thread_that_waits_spins_alone_and_sleeps_beside_a_second_pool() -> None:
    """Between operations that are 5 ms apart the other thread uses a core, or next to nothing."""
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    command = [sys.executable, "-c", PAUSES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    alone, beside, again = map(float, done.stdout.split())
    assert beside < 0.5 * alone
    assert beside < 0.5 * again


class Over(Exception):
    """Nobody looks any more."""


def watch(shares: list[float], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done where a thread waits for these shares of the time, look by look."""
    done, clock, waited = list[str](), [0.0], [0.0]

    class Pool:
        def __init__(self, library: str) -> None:
            done.append(f"{library} sleeps at {round(clock[0] / spinning.SECONDS)}")

        def close(self) -> None:
            done.append(f"spins at {round(clock[0] / spinning.SECONDS)}")

    def sleep(seconds: float) -> None:
        if not shares:
            raise Over
        clock[0] += seconds
        waited[0] += seconds * shares.pop(0)

    monkeypatch.setattr("tonnage.host.spinning.time.sleep", sleep)
    monkeypatch.setattr("tonnage.host.spinning.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(spinning, "waited_seconds", lambda tasks: {"1": waited[0], "2": 0.0})
    monkeypatch.setattr(spinning, "_libraries", lambda: ["gnu"])
    monkeypatch.setattr(spinning, "_SecondPool", Pool)
    with pytest.raises(Over):
        spinning._watch()
    return done


def test_they_sleep_while_others_are_there_and_some_time_after(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch([0.01] * 10, monkeypatch) == []
    assert watch([0.01, 0.3, 0.2, *[0.0] * 5, 0.07, *[0.0] * 8, 0.5], monkeypatch) == [
        "gnu sleeps at 2",
        "spins at 17",
        "gnu sleeps at 18",
    ]


@pytest.mark.parametrize("name", spinning.CHOSEN)
def test_what_the_user_chose_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1000")
    monkeypatch.setattr(spinning, "_watched", False)
    spinning.sleep_soon_beside_others()
    assert not spinning._watched
