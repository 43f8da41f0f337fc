"""A worker by itself: when it ends although nobody asks it to."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pretended import pretend_gpus
from tiny import write_config
from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.errors import UserError
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import LAUNCHER, LAUNCHER_PROCESS, RunDirectory
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


def test_a_plan_for_a_gpu_is_not_carried_out_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here there is none: a worker that took what it found would train all the same, and say that it is done."""
    write_config(tmp_path, 20, steps=2)
    run = RunDirectory(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpus(patch, 2)
        decision = decide(str(tmp_path / "config.yaml"), [f"output={run.path}"])
    assert decision.plan.layout.device == "cuda"
    write_run(run, decision)
    run.workers.mkdir(exist_ok=True)
    monkeypatch.setenv(LAUNCHER, "local")
    monkeypatch.delenv(LAUNCHER_PROCESS, raising=False)

    def work() -> None:
        worker.main(str(run.path))

    os.waitpid(forked(work), 0)
    (account,) = run.read_errors()
    assert account.exit_status == UserError.exit_status
    (problem,) = account.problems
    assert "0 GPUs on" in problem.found


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB of which ..."
            ),
            "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"
            ),
            "DefaultCPUAllocator: can't allocate memory",
        ),
        (MemoryError(), "out of memory: MemoryError"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: [Errno 12] Cannot allocate memory"),
    ],
)
def test_memory_that_does_not_suffice_is_told_with_what_was_planned(
    error: Exception, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, 20, steps=2)
    run = RunDirectory(tmp_path / "run")
    write_run(run, decide(str(tmp_path / "config.yaml"), [f"output={run.path}"]))
    run.workers.mkdir(exist_ok=True)

    def fail(*_: object) -> bool:
        raise error

    monkeypatch.setattr(worker, "_imported", lambda: fail)
    monkeypatch.setenv(LAUNCHER, "local")
    monkeypatch.delenv(LAUNCHER_PROCESS, raising=False)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    status = worker.main(str(run.path))
    for number, handler in before:
        signal.signal(number, handler)
    assert status == UserError.exit_status
    (account,) = run.read_errors()
    (problem,) = account.problems
    assert found in problem.found
    assert problem.change is not None
    change = re.search(r"memory\.budget\.device=\d+MB", problem.change)
    assert change is not None
    plan = decide(str(tmp_path / "config.yaml"), [f"output={tmp_path / 'again'}", change[0]]).plan
    assert plan.budget.memory < Plan.read(run.plan).budget.memory
