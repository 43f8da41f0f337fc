"""A run as a job of a real Slurm: followed to its end, told to stop and queued again, refused, cancelled by others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import entry
import tonnage
from forked import train
from hostile.strings import CANARY
from launch import slurm_cluster
from tiny import write_config
from tonnage.config import SlurmLaunch
from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.errors import UserError, WorkerFailed
from tonnage.launch import slurm
from tonnage.rundir.directory import RunDirectory, complete_checkpoints, step_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.privileged,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]
STEPS = 60
LONG = 250
"""Steps of a run that is stopped before its end."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def in_cluster(cluster: slurm_cluster.Cluster, monkeypatch: pytest.MonkeyPatch) -> slurm_cluster.Cluster:
    """This process speaks to the cluster as well."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return cluster


def numbers(run: Path) -> list[dict[str, Any]]:
    """What every step computed."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    kept = ("step", "loss", "grad_norm", "lr", "tokens")
    return [{key: record[key] for key in kept} for record in records if "loss" in record]


def started(folder: Path, cluster: slurm_cluster.Cluster, *words: str, config: bool = True) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tonnage", "train", *(["config.yaml"] if config else []), *words]
    wide = cluster.environment | {"COLUMNS": "400"}  # so that no path is broken in two
    return subprocess.Popen(command, cwd=folder, env=wide, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(False, id="a signal"),
        pytest.param(True, id="a time limit of a minute", marks=pytest.mark.matrix),
    ],
)
def test_a_job_that_is_told_to_stop_goes_on_and_gives_the_same_bits(
    tmp_path: Path, in_cluster: slurm_cluster.Cluster, limit: bool
) -> None:
    folder = tmp_path / f"a $(touch {CANARY}) run" / "of 'a' \"job\" %j #1; é"
    folder.mkdir(parents=True)
    write_config(folder, 100, steps=STEPS)
    run = folder / "run"
    process = started(folder, in_cluster, "launch.with=slurm", f"output={json.dumps(str(run))}")
    wait_for(lambda: len(numbers(run)) >= 10, process, in_cluster)
    job = slurm.job_of(RunDirectory(run))
    assert job is not None
    if limit:
        hold(run)
        in_cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        wait_for(lambda: "stopped as asked" in (run / "log.txt").read_text(), process, in_cluster)
        in_cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=30")  # or it is asked again as it goes on
    else:
        in_cluster.ask("scancel", "--signal=USR1", job)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"Job {job} was submitted" in output
    assert f"Model: {run}/export" in output
    log = (run / "log.txt").read_text()
    assert log.count("stopped as asked") == 1
    assert "going on from step-" in log
    assert (run / "export" / "model.safetensors").exists()
    assert slurm.job_of(RunDirectory(run)) is None

    decision = decide(str(folder / "config.yaml"), [f"output={folder / 'local'}"])
    local = RunDirectory(folder / "local")
    write_run(local, decision)
    train((2, [local]))
    assert numbers(run) == numbers(local.path)
    assert len(numbers(run)) == STEPS


def hold(run: Path) -> None:
    """Stops a run's workers until Slurm, which looks at time limits every half minute, wakes and signals them."""
    pattern = (
        rf"^\S*python\S* -m tonnage\.training\.worker {re.escape(str(run))}$"  # and not srun, whose words end so, too
    )
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True)
    workers = [int(pid) for pid in found.stdout.split()]
    assert len(workers) == 2, found
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], cluster: slurm_cluster.Cluster) -> None:
    deadline = time.monotonic() + 180
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, cluster.ask("scontrol", "show", "job")
        time.sleep(0.02)


def section(**fields: object) -> SlurmLaunch:
    return SlurmLaunch.model_validate({"with": "slurm", "workers": 1, **fields})


def follow(run: RunDirectory, job: str) -> tuple[int, list[str]]:
    told: list[str] = []
    return slurm.follow(slurm.SlurmJob(run, job, 1, look_seconds=0.2), poll=lambda: None, tell=told.append), told


@pytest.mark.matrix
def test_a_run_is_stopped_by_its_directory_and_goes_on(tmp_path: Path, in_cluster: slurm_cluster.Cluster) -> None:
    """``tonnage stop`` waits for the job's end, which is no requeue; ``--resume`` is a new job, with the same bits."""
    write_config(tmp_path, 100, steps=LONG)
    run = RunDirectory(tmp_path / "run")
    process = started(tmp_path, in_cluster, "launch.with=slurm", f"output={run.path}")
    wait_for(lambda: len(numbers(run.path)) >= 5, process, in_cluster)
    first = slurm.job_of(run)
    said = entry.tonnage("stop", str(run.path))
    assert said.status in (None, 0), said
    assert slurm.job_of(run) is None
    saved = complete_checkpoints(run.checkpoints)[-1]
    assert f"Ended; {saved.name} is saved." in " ".join(said.out.split())
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert 5 <= numbers(run.path)[-1]["step"] == step_of(saved) < LONG

    again = started(tmp_path, in_cluster, "--resume", str(run.path), config=False)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert f"Job {first} was submitted" not in output
    local = RunDirectory(tmp_path / "local")
    write_run(local, decide(str(tmp_path / "config.yaml"), [f"output={local.path}"]))
    train((2, [local]))
    assert numbers(run.path) == numbers(local.path)
    assert len(numbers(run.path)) == LONG


@pytest.mark.matrix
def test_a_program_follows_its_job_and_stops_it(tmp_path: Path, in_cluster: slurm_cluster.Cluster) -> None:
    """Leaving the block early has the job save and end, and exports; ``resume`` is another job, with the same bits."""
    write_config(tmp_path, 100, steps=LONG)
    config = str(tmp_path / "config.yaml")
    with tonnage.start(config, launch={"with": "slurm"}, output=str(tmp_path / "run")) as running:
        for step in running:
            if step.step == 5:
                break
    run = running.run
    assert 5 <= run.steps[-1].step < LONG
    assert run.export.exists()
    assert not run.is_working
    run.resume(launch={"threads": 1})
    assert slurm.job_of(RunDirectory(run.path)) is None
    local = RunDirectory(tmp_path / "local")
    write_run(local, decide(config, [f"output={local.path}"]))
    train((2, [local]))
    assert numbers(run.path) == numbers(local.path)
    assert len(run.steps) == LONG


def test_a_job_that_waits_is_cancelled_by_stop(tmp_path: Path, in_cluster: slurm_cluster.Cluster) -> None:
    write_config(tmp_path, 20, steps=LONG)
    run = RunDirectory(tmp_path / "run")
    write_run(run, decide(str(tmp_path / "config.yaml"), [f"output={run.path}"]))
    job = slurm.submit(section(options=["--hold"]), run)
    assert "Ended before the first step" in entry.tonnage("stop", str(run.path)).out
    state = slurm.look(job)
    assert state is not None
    assert state.name == "CANCELLED"
    assert "nobody works on this run" in entry.refusal("stop", str(run.path))


def test_slurm_says_why_it_refuses(tmp_path: Path, in_cluster: slurm_cluster.Cluster) -> None:
    with pytest.raises(UserError, match="invalid partition specified: nowhere"):
        slurm.submit(section(partition="nowhere"), RunDirectory(tmp_path / "run"))


def test_a_job_that_someone_cancels(tmp_path: Path, in_cluster: slurm_cluster.Cluster) -> None:
    run = RunDirectory(tmp_path / "run")
    job = slurm.submit(section(options=["--hold"]), run)
    assert slurm.job_of(run) == job
    state = slurm.look(job)
    assert state is not None
    assert state.waiting(job).startswith(f"job {job} is pending: JobHeld")
    in_cluster.ask("scancel", job)
    with pytest.raises(WorkerFailed, match=f"job {job} was cancelled"):
        follow(run, job)


def test_a_worker_that_fails_is_not_tried_again(tmp_path: Path, in_cluster: slurm_cluster.Cluster) -> None:
    """The run directory holds no plan, so the workers refuse it."""
    run = RunDirectory(tmp_path / "run")
    job = slurm.submit(section(setup=["echo set up"]), run)
    with pytest.raises(WorkerFailed, match=f"job {job} ended with exit status 2"):
        follow(run, job)
    assert "set up" in (run.workers / "job.log").read_text()
    assert "no run" in run.worker_log(0).read_text()


def test_inside_an_allocation(tmp_path: Path, in_cluster: slurm_cluster.Cluster) -> None:
    """``srun`` passes the request to stop on to its tasks."""
    run = tmp_path / "run"
    run.mkdir()
    body = """
import os, signal, sys, time
from pathlib import Path
run, stopped = Path(sys.argv[1]), []
signal.signal(signal.SIGUSR1, lambda *_: stopped.append(1))
(run / f"ready-{os.environ['SLURM_PROCID']}").touch()
while not stopped:
    time.sleep(0.02)
sys.exit(3)
"""
    (tmp_path / "worker.py").write_text(body)
    launcher = f"""
import os, signal, sys
from pathlib import Path
from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.config import SlurmLaunch
from tonnage.launch import slurm
from tonnage.launch.local import run_workers
from tonnage.launch.watch import DONE, to_their_end
from tonnage.rundir.directory import RunDirectory, complete_checkpoints, step_of
run, sent = RunDirectory({str(run)!r}), []
def poll():
    if len(list(run.path.glob("ready-*"))) == 2 and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGINT))
launch = SlurmLaunch.model_validate({{"with": "slurm", "workers": 2}})
assert slurm.in_allocation()
command = [sys.executable, {str(tmp_path / "worker.py")!r}, str(run.path)]
sys.exit(to_their_end(slurm.started(launch, run, command=command), poll))
"""
    result = subprocess.run(
        ["salloc", "--ntasks=2", sys.executable, "-c", launcher],
        env=in_cluster.environment, capture_output=True, text=True, timeout=40, check=False,
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
