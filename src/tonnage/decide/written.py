"""The directory of a run as it is before its workers start, and what clears it away where they do not."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from tonnage.checkpoint.save import interrupted_saves
from tonnage.config import write_config
from tonnage.data.pictures import pictures
from tonnage.decide.decision import Decision
from tonnage.doctor.hardware import devices_and_drivers
from tonnage.errors import UserError, refusals
from tonnage.files.writing import write_json
from tonnage.rundir.directory import RunDirectory


def write_run(run: RunDirectory, decision: Decision) -> None:
    """Create the run directory with all that workers and later commands need."""
    run.path.mkdir(parents=True, exist_ok=True)
    write_json(run.data, decision.prepared.account.to_json() | {"stop_tokens": list(decision.prepared.stop_tokens)})
    write_json(run.rows, pictures(decision.prepared, decision.config.seed))
    for path, prompts in ((run.prompts, decision.prompts), (run.questions, decision.questions)):
        if prompts is None:
            path.unlink(missing_ok=True)
        else:
            write_json(path, asdict(prompts))
    commit = decision.model.files.commit
    environment = describe_environment(with_devices=decision.plan.layout.device != "cpu")
    environment |= {"workers": decision.plan.workers} | ({"model_commit": commit} if commit is not None else {})
    write_json(run.environment, environment)
    with refusals("the tokenizer could not be written", run.tokenizer):
        decision.prepared.tokenizer.save_pretrained(run.tokenizer)
    decision.plan.write(run.plan)
    shutil.rmtree(run.plans, ignore_errors=True)
    for plan in decision.others:
        plan.write(run.plan_for(plan.workers))
    if decision.others:
        decision.plan.write(run.plan_for(decision.plan.workers))
    write_config(decision.config, run.config)


def describe_environment(*, with_devices: bool = False) -> dict[str, object]:
    """Versions and hardware, from a list of what may be told; no variables, no names, no paths.

    ``with_devices``: accelerators of this machine, their drivers, and the version of CUDA that torch was built for.
    """
    devices = {}
    if with_devices:
        import torch

        devices = {"devices": devices_and_drivers(), "cuda": torch.version.cuda or ""}
    names = ("tonnage", "torch", "transformers", "datasets", "safetensors", "numba", "numpy")
    packages = dict[str, str]()
    for name in names:
        with suppress(PackageNotFoundError):  # datasets, where no hub and no table is read
            packages[name] = version(name)
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "logical_cpus": os.cpu_count(),
        "packages": packages,
        **devices,
    }


@contextmanager
def nothing_if_not_started(run: RunDirectory) -> Iterator[None]:
    """Where a new run cannot be begun, leave no part of it: the next attempt may have the directory."""
    try:
        yield
    except (UserError, OSError):
        if not run.metrics.exists():
            with suppress(OSError):
                run.config.unlink()
            for path in run.beginnings():  # of which there are none as long as the config is there
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):
                        path.unlink()
            with suppress(OSError):  # something of others is there
                run.path.rmdir()
        raise


def clear_remains(run: RunDirectory) -> None:
    """Remove what a launch that was killed at its end has left, where no worker will start that would do it."""
    for path in (*interrupted_saves(run.checkpoints), *run.staged_exports):
        shutil.rmtree(path, ignore_errors=True)
    run.clear_traces(of_work=False)
