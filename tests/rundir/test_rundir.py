"""The run directory: one run at a time, and metrics that are as if nothing had happened."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest

from tonnage.api.curve import SHOWN
from tonnage.api.steps import Step
from tonnage.errors import UserError
from tonnage.report.curves import SERIES
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.records import MetricsRecord
from tonnage.rundir.samples import read_samples, rewind_samples


def test_answers_after_the_step_that_a_run_goes_on_from_are_cut(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    rewind_samples(run, 3)  # nothing was asked
    lines = [f'{{"step": {step}, "number": 1, "prompt": "a", "answer": "b"}}' for step in (0, 3, 6)]
    run.samples.write_text("\n".join(lines) + '\n{"step": 3, "numb')
    assert [one.step for one in read_samples(run)] == [0, 3, 6]
    rewind_samples(run, 3)
    assert run.samples.read_text() == "\n".join(lines[:2]) + "\n"
    run.samples.write_text('{"step": "x", "number": 1, "prompt": "a", "answer": "b"}\n')
    with pytest.raises(UserError, match=r"samples.jsonl:1: step is"):
        read_samples(run)


def test_a_second_run_is_told_who_works_here(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.locked():
        with (
            pytest.raises(UserError, match=rf"process {os.getpid()} on {socket.gethostname()}"),
            RunDirectory(run.path).locked(),
        ):
            pytest.fail("two runs in one directory")
        with pytest.raises(UserError), RunDirectory(run.path).locked():
            pytest.fail("the first refusal opened the lock")
        assert run.is_locked()
    assert not run.is_locked()
    with RunDirectory(run.path).locked():
        pass


def test_somebody_who_only_looks_is_no_other_run(tmp_path: Path) -> None:
    """To look is to hold the lock for a moment."""
    run = RunDirectory(tmp_path)
    with run.lock.open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)
        threading.Timer(0.03, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with run.locked():
            assert run.is_locked()


def test_what_fails_under_the_lock_is_not_taken_for_another_run(tmp_path: Path) -> None:
    """As a system does that has no room for another process: it says ``EAGAIN``, which locks say as well."""
    with pytest.raises(BlockingIOError), RunDirectory(tmp_path / "run").locked():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@pytest.mark.parametrize("other", ["/dev/zero", "pipe"])
def test_what_is_no_file_is_not_locked(tmp_path: Path, other: str) -> None:
    run = RunDirectory(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    run.lock.symlink_to(other)
    with pytest.raises(UserError, match="lock: no regular file"), run.locked():
        pytest.fail("it was locked")


def test_records_are_read_from_files_alone(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"metrics.jsonl: no regular file"):
        run.read_metrics()


LAUNCHER = """
import os, subprocess, sys
from tonnage.rundir.directory import RunDirectory
run = RunDirectory(sys.argv[1])
with run.locked() as lock:
    worker = "import pathlib, time; time.sleep(1); pathlib.Path('ended').touch()"
    subprocess.Popen([sys.executable, "-c", worker], pass_fds=[lock], cwd=run.path, stdout=subprocess.DEVNULL)
    os._exit(0)  # as if it were killed: nothing is cleaned up
"""


def test_what_is_read_of_a_step_is_a_field_of_its_record(tmp_path: Path) -> None:
    read_by_name = {*SERIES, *SHOWN, *(field.name for field in fields(Step))} - {"record"}
    assert read_by_name <= {field.name for field in fields(MetricsRecord)}
    run = RunDirectory(tmp_path)
    run.metrics.write_text('{"step": 1, "loss": 1.0, "grad_norm": "large"}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:1: grad_norm is"):
        list(run.read_metrics())


def test_workers_that_outlive_their_launcher_are_waited_for(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LAUNCHER, str(tmp_path)], check=True)
    assert not (tmp_path / "ended").exists()
    with RunDirectory(tmp_path).locked():
        assert (tmp_path / "ended").exists()


def test_traces_of_an_earlier_launch_go_with_what_it_could_not_finish(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.workers.mkdir()
    failed = {"rank-0.error.json", ".rank-1.error.json.77"}
    worked = {"rank-0.position", "stop-asked", "rank-0.log"}
    for name in failed | worked:
        (run.workers / name).touch()
    run.clear_traces(of_work=False)
    assert {path.name for path in run.workers.iterdir()} == worked
    run.clear_traces()
    assert list(run.workers.iterdir()) == []


def test_metrics_after_the_checkpoint_are_cut_and_kept_elsewhere(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.rewind_metrics(3) == 0
    lines = [json.dumps({"step": step, "loss": step / 3}) for step in (1, 2, 3, 4)]
    lines.insert(3, json.dumps({"step": 3, "eval_loss": 1.5}))
    run.metrics.write_text("\n".join(lines) + "\n" + '{"step": 5, "lo')
    kept = "".join(line + "\n" for line in lines[:4])
    assert run.rewind_metrics(3) == 2
    assert run.metrics.read_text() == kept
    assert run.cut_metrics.read_text() == lines[4] + "\n" + '{"step": 5, "lo\n'
    assert run.rewind_metrics(3) == 0
    assert run.rewind_metrics(2) == 2
    assert len(run.cut_metrics.read_text().splitlines()) == 4


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_refused_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(UserError, match="a file system without locks"), run.locked():
        raise AssertionError
    assert not run.path.exists()
    run.path.mkdir()
    run.lock.touch()
    assert not run.is_locked()
