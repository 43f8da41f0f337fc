"""Runs that torchrun and mpirun start: the numbers of local workers, to the bit; one launch at a time; going on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forked import train
from tiny import write_config
from tonnage.decide.decision import Decision, decide
from tonnage.decide.written import write_run
from tonnage.errors import UserError
from tonnage.files.reading import read_json
from tonnage.files.writing import write_json
from tonnage.host.nodes import Node, describe_node, leave_token
from tonnage.launch.watch import DONE, STOPPED
from tonnage.parallel.place import Place
from tonnage.rundir.directory import LAUNCHER, RunDirectory
from tonnage.training import external
from tonnage.training.external import admitted, go_on

WORKER = [sys.executable, "-m", "tonnage.training.worker"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
STEPS = 40


@pytest.fixture(scope="module")
def decision(tmp_path_factory: pytest.TempPathFactory) -> Decision:
    folder = tmp_path_factory.mktemp("external")
    path = write_config(
        folder, 100, steps=STEPS, checkpoint={"every": 15}, launch={"workers": 2, "threads": 1, "timeout": 60}
    )
    return decide(str(path), [f"output={folder / 'run'}"])


@pytest.fixture
def run(tmp_path: Path, decision: Decision) -> RunDirectory:
    """A run that is written and was not started."""
    run = RunDirectory(tmp_path / "run")
    write_run(run, decision)
    return run


def numbers(run: RunDirectory) -> list[dict[str, Any]]:
    """What every step computed."""
    if not run.metrics.exists():
        return []
    records = [json.loads(line) for line in run.metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = ("step", "loss", "grad_norm", "lr", "tokens")
    return [{key: record[key] for key in kept} for record in records if "loss" in record]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, decision: Decision) -> list[dict[str, Any]]:
    """The numbers of two local workers."""
    run = RunDirectory(tmp_path_factory.mktemp("local") / "run")
    write_run(run, decision)
    train((2, [run]))
    assert len(numbers(run)) == STEPS
    return numbers(run)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (LAUNCHER, "MASTER_ADDR")}


def refusals(run: RunDirectory, decision: Decision, *places: Place) -> list[str]:
    """The error of each place when all ask to be admitted at once."""
    said = [""] * len(places)
    all_there = threading.Barrier(len(places))

    def ask(index: int) -> None:
        try:
            with admitted(run, places[index], decision.config, decision.plan):
                all_there.wait(20)
        except UserError as error:
            said[index] = str(error)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


TWO = (Place(0, 2, 0), Place(1, 2, 1))


def test_another_number_of_workers_is_refused_by_each_of_them(run: RunDirectory, decision: Decision) -> None:
    for said in refusals(run, decision, *(Place(rank, 3, rank) for rank in range(3))):
        assert "3 worker(s) were started, and the run is planned for 2" in said
        assert "--prepare launch.workers=3" in said
    assert not run.workers.exists()


def test_a_directory_in_use_is_refused_by_each_and_left_alone(run: RunDirectory, decision: Decision) -> None:
    run.workers.mkdir()
    run.worker_position(0).write_text("of the other launch")
    with run.locked():
        for said in refusals(run, decision, *TWO):
            assert f"another run works in this directory (process {os.getpid()} on {socket.gethostname()})" in said
    assert run.worker_position(0).read_text() == "of the other launch"
    assert refusals(run, decision, *TWO) == ["", ""]
    assert not run.worker_position(0).exists()
    assert not run.is_locked()


def test_machines_that_differ_are_refused_by_each(
    run: RunDirectory, decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = describe_node

    def other(paths: Mapping[str, str | None], offset_seconds: float = 0.0) -> Node:
        node = described(paths, offset_seconds)
        is_first = offset_seconds == 0.0
        return node if is_first else replace(node, host="other", versions={**node.versions, "torch": "1.0"})

    monkeypatch.setattr(external, "describe_node", other)
    for said in refusals(run, decision, *TWO):
        assert "torch differs between machines" in said
        assert "1.0: other (worker 1)" in said
    monkeypatch.undo()
    moved = replace(decision, plan=replace(decision.plan, data=replace(decision.plan.data, train_path="/no/data")))
    for said in refusals(run, moved, *TWO):
        assert f"no prepared data at /no/data: {socket.gethostname()} (workers 0, 1)" in said
    assert list(run.workers.glob("seen-*")) == []
    assert not run.is_locked()


def test_a_directory_that_is_not_shared_is_refused(
    run: RunDirectory, decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = leave_token
    monkeypatch.setattr(external, "SEE_SECONDS", 0.2)
    monkeypatch.setattr(external, "leave_token", lambda where, name: None)  # what one writes, no other sees
    for said in refusals(run, decision, *TWO):
        assert "what worker 0 writes into the run's directory is not there" in said
        assert "(worker 1)" in said
    monkeypatch.setattr(
        external, "leave_token", lambda where, name: real(where, name) if name.count("-") == 1 else None
    )
    for said in refusals(run, decision, *TWO):
        assert "what is written into the run's directory is not seen by worker 0" in said


def test_another_number_of_workers_takes_its_own_plan(run: RunDirectory, decision: Decision) -> None:
    layout = replace(decision.plan.layout, workers=1)
    replace(decision.plan, choice=replace(decision.plan.choice, layout=layout)).write(run.plan_for(1))
    assert refusals(run, decision, Place()) == [""]
    assert read_json(run.plan)["choice"]["layout"]["workers"] == 1


def test_a_run_without_checkpoints_starts_over(run: RunDirectory) -> None:
    write_json(run.resume, {"checkpoint": "step-00000005"})
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n')
    go_on(run)
    assert run.checkpoint_to_resume() is None
    assert run.metrics.read_text() == ""
    assert len(run.cut_metrics.read_text().splitlines()) == 1


def test_a_directory_without_a_run_is_told_on_the_console(tmp_path: Path) -> None:
    result = subprocess.run(
        [*WORKER, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert "worker 0: error:" in result.stderr
    assert "--prepare" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (openmpi-bin)")
def test_mpirun_is_stopped_and_goes_on(run: RunDirectory, expected: list[dict[str, Any]]) -> None:
    command = [*MPIRUN, *WORKER, str(run.path)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    while len(numbers(run)) < 8:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)  # mpirun passes it on
    output, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, output
    stopped = len(numbers(run))
    assert stopped < STEPS
    assert run.report.exists()
    assert not run.is_locked()

    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == DONE, result.stderr
    assert f"going on from step-{stopped:08d}" in run.log.read_text()
    assert numbers(run) == expected
    assert f"<h1>{run.path.name}" in run.report.read_text()


@pytest.mark.matrix
@pytest.mark.parametrize(("bound", "status"), [("<= 0.01", 4), ("<= 100", 0)])
def test_the_first_worker_ends_as_its_gate_says(tmp_path: Path, bound: str, status: int) -> None:
    keys = {"data.validation": 0.2, "evaluate.gate": {"eval_loss": bound}}
    path = write_config(tmp_path, 60, steps=2, launch={"workers": 1, "threads": 1})
    words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    run = RunDirectory(tmp_path / "run")
    write_run(run, decide(str(path), [*words, f"output={run.path}"]))
    result = subprocess.run(
        [*WORKER, str(run.path)], env=environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert result.returncode == status, result.stderr
    assert ("eval_loss" in result.stdout) == (status == 4)


@pytest.mark.slow
def test_torchrun_on_two_nodes(run: RunDirectory, expected: list[dict[str, Any]]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    nodes = [
        subprocess.Popen(
            [*torchrun, str(node), *WORKER[1:], str(run.path)],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    for node in nodes:
        output, _ = node.communicate(timeout=90)
        assert node.returncode == DONE, output
    assert numbers(run) == expected
    assert run.report.exists()
