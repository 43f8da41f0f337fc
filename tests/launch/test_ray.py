"""Runs through a real Ray, on a cluster of three nodes that are lost and found; what is said when Ray has no room.

The workers are the same as everywhere, so what is looked at is what Ray adds. A run through Ray on this machine, with
the bits of local workers, is in ``tests/recipes``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tonnage
from entry import refusal
from forked import train
from tiny import alpaca_rows, byte_tokenizer, write_config, write_rows
from tonnage.config import Data, RayLaunch, Source
from tonnage.data import prepare
from tonnage.data.building import processes
from tonnage.data.sources import files as sources
from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.errors import Problem, UserError, WorkerFailed
from tonnage.files.writing import write_json
from tonnage.launch import ray as ray_launch
from tonnage.launch.local import Crew
from tonnage.launch.watch import DONE, to_their_end
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory, complete_checkpoints, step_of

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray (pip install 'tonnage[ray]')")
STEPS = 64
LONG = 250
"""Steps of a run that is stopped before its end."""
PACED = Path(__file__).parent / "paced_worker.py"


def numbers(run: RunDirectory) -> list[dict[str, Any]]:
    """What every step computed."""
    kept = ("step", "loss", "grad_norm", "lr", "tokens")
    return [{key: record[key] for key in kept} for record in run.read_metrics() if "loss" in record]


def run_of(folder: Path, name: str, *words: str) -> RunDirectory:
    """A run that is written and was not started."""
    run = RunDirectory(folder / name)
    write_run(run, decide(str(folder / "config.yaml"), [f"output={run.path}", *words]))
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    write_config(folder, 100, steps=STEPS, precision="fp32", checkpoint={"every": 10, "keep": 2})
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[dict[str, Any]]:
    """The numbers of two local workers."""
    run = run_of(folder, "local")
    train((2, [run]))
    return numbers(run)


class Cluster:
    """Three nodes of Ray with one CPU each, as processes of this machine."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster as Nodes

        node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        self._node = node
        self._nodes = Nodes(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        self._others = [self._nodes.add_node(**node) for _ in range(2)]
        self.address = str(self._nodes.address)

    def lose_a_node(self) -> None:
        """Kill the processes of a node."""
        self._nodes.remove_node(self._others.pop(), allow_graceful=False)

    def add_a_node(self) -> None:
        self._others.append(self._nodes.add_node(**self._node))

    def shut_down(self) -> None:
        self._nodes.shutdown()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_worker_niceness", "0")  # or whatever runs beside takes the cores
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_timeout_ms", "1000")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "4")
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "8")
    cluster = Cluster()
    yield cluster
    cluster.shut_down()


@pytest.mark.matrix
@needs_ray
def test_a_cluster_prepares_the_same_packs(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 2000)
    monkeypatch.setattr(processes, "SMALL_BYTES", 0)
    rows = write_rows(tmp_path / "rows.jsonl", alpaca_rows(100))
    with rows.open("a") as out:
        out.write('{"instruction": "bad"}\n')
    options = Data(train=(Source(path=str(rows)),), max_length=512, validation=0.1, on_bad_row="skip")
    found = []
    for name, where in {
        "here": None,
        "there": RayLaunch.model_validate({"with": "ray", "address": cluster.address}),
    }.items():
        cache = tmp_path / name
        prepared = prepare(options, byte_tokenizer(), cache=cache, processes=where or 2)
        assert prepared.account.total.rows_read == 101
        found.append(
            {
                str(path.relative_to(cache)): path.read_bytes()
                for path in cache.rglob("*")
                if path.is_file() and "digests" not in path.parts
            }
        )
    assert len([name for name in found[0] if "documents" in name]) > 5
    assert found[0] == found[1]


def until(what: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.matrix
@needs_ray
def test_a_run_shrinks_with_its_cluster_and_grows_again(
    folder: Path, expected: list[dict[str, Any]], cluster: Cluster
) -> None:
    words = ["launch.with=ray", f"launch.address={cluster.address}", "launch.workers=[1, 3]", "launch.nodes=3"]
    run = run_of(folder, "elastic", *words, "launch.resize_seconds=2")
    (run.path / "pace").touch()
    launch = decide(str(folder / "config.yaml"), [*words, "launch.resize_seconds=2"]).launch
    assert isinstance(launch, RayLaunch)
    ended: list[int | BaseException] = []
    told: list[str] = []

    def work() -> None:
        try:
            command = (sys.executable, str(PACED), str(run.path))
            ended.append(to_their_end(ray_launch.started(launch, run, command=command), tell=told.append))
        except BaseException as error:
            ended.append(error)

    def sizes() -> list[int]:
        """Numbers of workers that took steps, in the order of starts."""
        found: list[int] = []
        for line in run.log.read_text().splitlines() if run.log.exists() else ():
            if "worker(s) on cpu" in line:
                found.append(int(line.split()[2]))
        return found

    def at(size: int, step: int) -> bool:
        assert not ended, ended
        return sizes()[-1:] == [size] and bool(numbers(run)) and numbers(run)[-1]["step"] >= step

    thread = threading.Thread(target=work)
    thread.start()
    try:
        until(lambda: at(3, 13))
        cluster.lose_a_node()
        until(lambda: at(2, 15))
        cluster.add_a_node()
        until(lambda: at(3, 15) and len(sizes()) > 2)
        grown = numbers(run)[0]["step"]
    finally:
        (run.path / "pace").unlink()
        thread.join(100)
    assert ended == [DONE]
    assert grown == 1
    assert Plan.read(run.plan).workers == 3
    found = numbers(run)
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["tokens"] == theirs["tokens"]  # the same packs
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-5)


@pytest.mark.matrix
@needs_ray
def test_a_run_on_ray_is_stopped_by_its_directory_and_goes_on(folder: Path) -> None:
    """``Run.stop`` waits for the end of Ray's work; the run goes on with the bits of local workers."""
    words = [f"steps={LONG}", "launch.with=ray"]
    run = RunDirectory(folder / "stopped")
    command = [sys.executable, "-m", "tonnage", "train"]
    config = [str(folder / "config.yaml"), *words, f"output={run.path}"]
    process = subprocess.Popen([*command, *config], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: process.poll() is not None or (run.metrics.exists() and len(numbers(run)) >= 5))
    assert process.poll() is None, process.communicate()
    tonnage.open_run(run.path).stop()
    assert not ray_launch.is_working(run)
    saved = step_of(complete_checkpoints(run.checkpoints)[-1])
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert "Stopped as asked (tonnage stop), and saved." in " ".join(said.split())
    assert 5 <= numbers(run)[-1]["step"] == saved < LONG

    again = tonnage.open_run(run.path).resume()
    assert again.export.exists()
    assert again.path.joinpath("report.html").exists()
    local = run_of(folder, "long", f"steps={LONG}")
    train((2, [local]))
    assert numbers(run) == numbers(local)
    assert len(numbers(run)) == LONG


@pytest.mark.matrix
@needs_ray
def test_a_run_that_waits_for_room_is_stopped_by_its_directory(folder: Path, cluster: Cluster) -> None:
    words = ["launch.with=ray", f"launch.address={cluster.address}", "launch.workers=4", "launch.nodes=4"]
    run = run_of(folder, "crowded", *words)
    launch = decide(str(folder / "config.yaml"), words).launch
    assert isinstance(launch, RayLaunch)
    told: list[str] = []

    def poll() -> None:
        if any("room for 3" in one for one in told) and not run.stop_asked.exists():
            run.stop_asked.write_text("tonnage stop")

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        to_their_end(ray_launch.started(launch, run), poll, told.append)
    assert time.monotonic() - began < 100
    assert not ray_launch.is_working(run)


def waiting(tmp_path: Path, note: dict[str, Any], **keys: Any) -> ray_launch.RayWorkers:
    run = RunDirectory(tmp_path)
    write_json(run.ray, note)
    launch = RayLaunch.model_validate({"with": "ray", "workers": 2, **keys})
    return ray_launch.RayWorkers(launch, run, Crew(run, 1))


NOTE = {"room": 1, "asked": "2 worker(s) with 1 CPU and 1 GPU each", "there": "10.0.0.1 with 8 CPUs and 1 GPU"}


def test_what_ray_has_no_room_for_is_said_and_given_up(tmp_path: Path) -> None:
    workers = waiting(tmp_path, NOTE, wait_seconds=0.05)
    assert workers._has_no_room()
    assert workers.waits_for == (
        "waiting for Ray: 2 worker(s) with 1 CPU and 1 GPU each asked for, room for 1 (10.0.0.1 with 8 CPUs and 1 GPU)"
    )
    time.sleep(ray_launch.READ_SECONDS + 0.1)
    with pytest.raises(UserError, match=r"room for 1 worker.*10\.0\.0\.1 with 8 CPUs and 1 GPU") as raised:
        workers._has_no_room()
    assert "lower launch.workers" in str(raised.value)


def test_fewer_workers_are_enough_for_a_run_that_can_shrink(tmp_path: Path) -> None:
    workers = waiting(tmp_path, NOTE, workers=[1, 2])
    assert not workers._has_no_room()
    assert not workers.waits_for


@pytest.mark.slow
def test_a_run_that_ray_works_on_is_not_begun_again(folder: Path) -> None:
    run = run_of(folder, "busy")
    write_json(run.ray, NOTE)
    assert ray_launch.is_working(run)
    assert "Ray works on this run" in refusal("train", "--resume", str(run.path))
    os.utime(run.ray, (0, 0))  # its trainer was killed
    assert not ray_launch.is_working(run)
    write_json(run.ray, {"status": 0})
    assert not ray_launch.is_working(run)


def test_how_a_run_ended_is_one_error(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(WorkerFailed, match="the process that speaks to Ray ended with exit status 1"):
        ray_launch._outcome(run, 2, 1)
    write_json(run.ray, {"lost": ""})
    run.write_error(1, ZeroDivisionError("the cause"), 1, seconds=1.0)
    run.write_error(0, RuntimeError("connection closed"), 1, seconds=2.0)
    with pytest.raises(WorkerFailed, match=r"worker 1 \(of 2\) failed: ZeroDivisionError: the cause"):
        ray_launch._outcome(run, 2, 0)
    write_json(run.ray, {"lost": "worker 1: The actor died because its node has died."})
    with pytest.raises(WorkerFailed, match=r"(?s)Ray lost what the run needs: worker 1: .*node has died.*--resume"):
        ray_launch._outcome(run, 2, 0)
    mistake = UserError(Problem("torch differs between machines", "the same torch everywhere"))
    run.write_error(0, mistake, 2, seconds=3.0)
    write_json(run.ray, {"status": 2})
    with pytest.raises(UserError, match="torch differs between machines"):
        ray_launch._outcome(run, 2, 0)


@pytest.mark.slow
@needs_ray
def test_an_address_where_nobody_listens_is_said_at_once(folder: Path) -> None:
    with socket.socket() as taken:  # and does not listen
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = RunDirectory(folder / "nowhere")
        words = [f"output={run.path}", "launch.with=ray", f"launch.address={address}"]
        assert f"no Ray cluster at {address}" in refusal("train", str(folder / "config.yaml"), *words)
    assert not run.is_run()


@pytest.mark.parametrize("more", [[], ["launch.address=head:6379"]], ids=["here", "cluster"])
def test_no_ray_is_said_before_anything_is_written(
    more: list[str], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    words = [f"output={tmp_path / 'run'}", "launch.with=ray", *more]
    assert "pip install 'tonnage[ray]'" in refusal("train", str(folder / "config.yaml"), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_elastic_run_has_a_plan_for_every_size(folder: Path) -> None:
    run = run_of(folder, "planned", "launch.with=ray", "launch.address=auto", "launch.workers=[1, 3]")
    plans = [Plan.read(run.plan_for(workers)) for workers in (1, 2, 3)]
    assert [plan.workers for plan in plans] == [1, 2, 3]
    assert {(plan.num_steps, plan.packs_per_step) for plan in plans} == {(STEPS, 4)}
    assert json.loads(run.plan.read_text()) == json.loads(run.plan_for(3).read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.workers=[3, 1]", "launch.address=auto"], "the smaller number first"),
        (["launch.workers=[1, 2]"], "a cluster, whose nodes come and go"),
        (["launch.address=ray://head:10001"], "auto or HOST:PORT"),
        (["launch.nodes=2"], "launch.nodes is 2 without launch.address"),
        (["launch.max_failures=-1"], "launch.max_failures is -1"),
    ],
)
def test_what_ray_cannot_do_is_refused(folder: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("[", r"\[")):
        decide(str(folder / "config.yaml"), ["launch.with=ray", *words])
