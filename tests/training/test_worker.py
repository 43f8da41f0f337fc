"""A worker by itself: when it ends although nobody asks it to."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tonnage.rundir.directory import LAUNCHER_PROCESS
from tonnage.training import worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the system for it")


def forked(work: Callable[[], None]) -> int:
    if child := os.fork():
        return child
    try:
        work()
    finally:
        os._exit(0)


def lasting() -> None:
    worker._end_with_launcher()
    time.sleep(0.3)


@pytest.mark.parametrize("launcher", [None, os.getpid])
def test_a_worker_whose_launcher_is_there_or_that_has_none_goes_on(
    launcher: Callable[[], int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LAUNCHER_PROCESS, raising=False)
    if launcher is not None:
        monkeypatch.setenv(LAUNCHER_PROCESS, str(launcher()))
    assert os.waitpid(forked(lasting), 0)[1] == 0


def test_a_worker_whose_launcher_is_gone_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_PROCESS, str(os.getppid()))
    status = os.waitpid(forked(lasting), 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_worker_ends_with_a_launcher_whose_guardian_knows_nothing_of_it() -> None:
    read, write = os.pipe()  # held open by the worker alone in the end

    def launcher() -> None:
        os.environ[LAUNCHER_PROCESS] = str(os.getpid())

        def work() -> None:
            worker._end_with_launcher()
            os.write(write, b"x")
            time.sleep(60)

        forked(work)
        os.close(write)
        time.sleep(60)

    child = forked(launcher)
    os.close(write)
    try:
        assert os.read(read, 1) == b"x"
        os.kill(child, signal.SIGKILL)
        assert select.select([read], [], [], 10.0)[0], "the worker lives on"
        assert os.read(read, 1) == b""
    finally:
        os.waitpid(child, 0)
        os.close(read)
