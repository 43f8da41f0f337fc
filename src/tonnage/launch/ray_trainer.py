"""The process that speaks to Ray: ``python -m tonnage.launch.ray_trainer RUN WORKERS``, started by ``ray``.

It joins the cluster, or starts Ray on this machine; makes sure that the nodes have this code; runs Ray Train's
``TorchTrainer`` until the run is over, through as many groups of workers as it takes; and says how it went in
``workers/ray.json``. Ray's own words, which are many, go to ``workers/ray.log``.

Ray Train does what it is good at: room for the workers, one group after another when nodes are lost or found, the count
of failures. A group begins where every launch of a run begins, at the newest complete checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when ray is imported
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")

import ray
import ray.cloudpickle
import ray.exceptions
import ray.train
from ray.train.torch import TorchTrainer

from tonnage.config import RayLaunch, read_config
from tonnage.files.writing import write_json
from tonnage.host.ray_cluster import join, unreachable
from tonnage.launch.ray_workers import Rendezvous, RunRefused, train_worker
from tonnage.rundir.directory import RunDirectory, complete_checkpoints, step_of

OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes: no data goes through it."""
LOOK_SECONDS = 2.0
SNAPSHOT = "checkpoint_manager_snapshot.json"
"""What Ray Train leaves in the run's directory, and would go on from."""


def main(path: str, num_workers: str, num_gpus: str, *command: str) -> int:
    """Run the workers, of so many GPUs each, to their end; returns 0 when ``ray.json`` says how that was."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are the launcher's
    run = RunDirectory(path)
    config = read_config(run.config, [], check_files=False)
    launch = config.launch.model_copy(update={"workers": int(num_workers), "gpus_per_worker": int(num_gpus)})
    assert isinstance(launch, RayLaunch)
    if (problem := unreachable(launch.address)) is not None:
        write_json(run.ray, {"problems": [asdict(problem)]})
        return 0
    with _joined(launch):
        outcome = _fit(launch, run, list(command))
    write_json(run.ray, outcome)
    return 0


@contextmanager
def _room_noted(launch: RayLaunch, run: RunDirectory) -> Iterator[None]:
    """Within it ``ray.json`` says whether Ray has room for the workers."""
    each, over = resources_of(launch), threading.Event()

    def watch() -> None:
        while not over.is_set():
            nodes = [node for node in ray.nodes() if node["Alive"]]
            note = {
                "room": sum(fitting(node["Resources"], each) for node in nodes),
                "asked": f"{launch.fewest_workers} worker(s) with {_listed(each)} each",
                "there": ", ".join(_describe(node) for node in nodes) or "no node",
            }
            write_json(run.ray, note)
            over.wait(LOOK_SECONDS)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def resources_of(launch: RayLaunch) -> dict[str, float]:
    """What a worker reserves, in Ray's words."""
    cpus = 1 if launch.cpus_per_worker == "auto" else launch.cpus_per_worker
    return {"CPU": float(cpus)} | ({"GPU": float(launch.num_gpus)} if launch.num_gpus else {})


def fitting(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    """How many workers a node has room for when nothing else runs there."""
    return int(min(resources.get(name, 0.0) // needed for name, needed in each.items()))


def _describe(node: Mapping[str, Any]) -> str:
    resources = {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")}
    return f"{node['NodeManagerAddress']} with {_listed({n: v for n, v in resources.items() if v or n == 'CPU'})}"


def _listed(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{number:g} {name}{'s' if number != 1 else ''}" for name, number in resources.items())


@contextmanager
def _joined(launch: RayLaunch) -> Iterator[None]:
    """Be a part of the cluster, or of one on this machine that ends with this process."""
    if launch.address is None:
        # Ray would end workers for using the memory that was planned for them.
        os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray's 15 is last in the queue for a core)
        os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # nobody takes this machine away; an actor less
        # Nobody looks at its metrics either, and all of Ray's ten processes would wake up for them.
        os.environ["RAY_TRAIN_METRICS_ENABLED"] = "0"
        os.environ["RAY_enable_metrics_collection"] = "0"  # noqa: SIM112
        os.environ["RAY_event_stats"] = "0"  # noqa: SIM112
        os.environ["RAY_task_events_report_interval_ms"] = "0"  # noqa: SIM112
        each = resources_of(launch)
        ray.init(
            address="local",
            num_cpus=round(each["CPU"]) * launch.num_workers,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            runtime_env=launch.runtime_env or None,
        )
    else:
        join(launch.address, launch.runtime_env)
    try:
        yield
    finally:
        ray.shutdown()


def _fit(launch: RayLaunch, run: RunDirectory, command: list[str]) -> dict[str, Any]:
    """Train; returns the last note: ``status``, ``problems``, or what was ``lost``."""
    path = run.path.absolute()
    steps = [step_of(path) for path in complete_checkpoints(run.checkpoints)]
    (path / SNAPSHOT).unlink(missing_ok=True)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={
            "run": str(path),
            "command": command,
            "directory": str(Path.cwd()),
            "since": max(steps, default=0),
            "timeout": launch.timeout,
        },
        torch_config=Rendezvous(str(path)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=launch.num_workers if launch.least is None else (launch.least, launch.num_workers),
            use_gpu=bool(launch.num_gpus),
            resources_per_worker=resources_of(launch),
            elastic_resize_monitor_interval_s=launch.resize_seconds,
        ),
        run_config=ray.train.RunConfig(
            name=path.name,
            storage_path=str(path.parent),
            failure_config=ray.train.FailureConfig(max_failures=launch.max_failures),
        ),
    )
    try:
        with _room_noted(launch, run):
            result = trainer.fit()
    except ray.train.WorkerGroupError as error:
        lost = [  # actors, and with them their workers
            f"worker {rank}: {_first_line(failure)}"
            for rank, failure in error.worker_failures.items()
            if isinstance(failure, ray.exceptions.RayActorError)
        ]
        return {"lost": "; ".join(lost)}
    except ray.train.ControllerError as error:
        if isinstance(error.controller_failure, RunRefused):
            return {"problems": [asdict(problem) for problem in error.controller_failure.problems()]}
        return {"lost": f"Ray Train: {_first_line(error.controller_failure)}"}
    except ray.train.TrainingFailedError as error:  # preempted more often than Ray allows
        return {"lost": f"Ray Train: {_first_line(error)}"}
    return {"status": result.return_value}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1] + [line for line in lines[1:] if "node" in line.lower()][:1]) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
