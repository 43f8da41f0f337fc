"""``tonnage train`` where others start the workers: what is written, printed, refused, and left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tiny import write_config
from tonnage.cli.follow import follow
from tonnage.cli.train import train
from tonnage.errors import UserError, WorkerFailed
from tonnage.files.reading import read_json
from tonnage.rundir.directory import RunDirectory


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("elsewhere")
    return str(write_config(folder, 60, steps=5))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs in place of Slurm's; each answers with the text of the file of its name, and notes the call."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("sbatch", "scontrol", "scancel", "srun"):
        body = (
            f'echo {name} "$@" >> {directory}/calls\ncat {directory}/{name}.says\ntest ! -e {directory}/{name}.fails\n'
        )
        (directory / name).write_text(f"#!/bin/sh\n{body}")
        (directory / name).chmod(0o755)
        (directory / f"{name}.says").touch()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (directory / "sbatch.says").write_text("12\n")
    (directory / "scontrol.says").write_text("JobId=12 JobState=PENDING Reason=Priority ExitCode=0:0\n")
    return directory


def on_slurm(config: str, run: RunDirectory, *words: str, dry_run: bool = False) -> None:
    train(config, [f"output={run.path}", "launch.with=slurm", *words], dry_run=dry_run)


def test_a_prepared_run_says_how_it_is_started(
    config: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, [f"output={run.path}"], prepare=True)
    said = capsys.readouterr().out
    assert f"torchrun --nproc-per-node 2 -m tonnage.training.worker {run.path}" in said
    assert f"mpirun -n 2 python -m tonnage.training.worker {run.path}" in said
    assert read_json(run.plan)["choice"]["layout"]["workers"] == 2
    assert not run.metrics.exists()
    with pytest.raises(UserError, match="already holds a run"):
        train(config, [f"output={run.path}"], prepare=True)


def test_a_dry_run_shows_the_script_and_writes_nothing(
    config: str, run: RunDirectory, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_slurm(config, run, "launch.partition=gpu", dry_run=True)
    said = capsys.readouterr().out
    script = said[said.index("#!/bin/bash") :]
    assert "#SBATCH --partition=gpu\n" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert not run.path.exists()
    assert not (programs / "calls").exists()


def test_a_job_that_is_refused_leaves_no_run(config: str, run: RunDirectory, programs: Path) -> None:
    (programs / "sbatch.says").write_text("sbatch: error: Invalid account\n")
    (programs / "sbatch.fails").touch()
    with pytest.raises(UserError, match="refuses the job: Invalid account"):
        on_slurm(config, run)
    assert not run.is_run()
    with pytest.raises(UserError, match="refuses the job"):  # not: the directory holds a run
        on_slurm(config, run)


def interrupt(programs: Path) -> None:
    """Ctrl-C as soon as somebody has asked for the job's state."""

    def wait_and_send() -> None:
        deadline = time.monotonic() + 60
        while not (programs / "calls").exists() or "scontrol" not in (programs / "calls").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait_and_send).start()


def test_ctrl_c_without_a_terminal_leaves_the_job_alone(
    config: str, run: RunDirectory, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(programs)
    with pytest.raises(SystemExit) as caught:
        on_slurm(config, run)
    assert caught.value.code == 130
    said = capsys.readouterr().out
    assert "job 12 is pending: Priority" in said
    assert f"Job 12 goes on. To follow it:  tonnage follow {run.path}    to cancel it:  scancel 12" in said
    assert "scancel" not in (programs / "calls").read_text()

    with pytest.raises(UserError, match="Slurm job 12 works on this run"):
        train(resume=str(run.path))
    (programs / "scontrol.says").write_text("JobId=12 JobState=FAILED Reason=NonZeroExitCode ExitCode=1:0\n")
    run.write_error(1, ZeroDivisionError("the cause"), 1)
    with pytest.raises(WorkerFailed, match="the cause"):
        follow(str(run.path))


def test_ctrl_c_and_yes_saves_and_ends_the_job(
    config: str,
    run: RunDirectory,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tonnage.cli.follow._wants_to_stop", lambda *_: True)
    (programs / "scontrol.says").write_text("JobId=12 JobState=RUNNING Reason=None ExitCode=0:0\n")
    over = "JobId=12 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0"
    (programs / "scancel").write_text(
        f"#!/bin/sh\necho scancel $@ >> {programs}/calls\necho {over} > {programs}/scontrol.says\n"
    )
    interrupt(programs)
    with pytest.raises(SystemExit) as caught:
        on_slurm(config, run)
    assert caught.value.code == 3
    assert "scancel --signal=TERM 12" in (programs / "calls").read_text()
    assert "Stopped as asked, and saved." in capsys.readouterr().out


def test_following_a_run_that_nobody_works_on(
    config: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="no run"):
        follow(str(run.path))
    train(config, [f"output={run.path}"], prepare=True)
    follow(str(run.path))
    assert "no step of 5 was taken" in capsys.readouterr().out
