"""What the launchers of clusters would refuse, or would do in another way than meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tonnage.config import sbatch
from tonnage.config.contradiction import Contradiction
from tonnage.config.schema import Parallel, RayLaunch, SlurmLaunch

SLURM_TIME = re.compile(r"\d+(:\d+(:\d+)?)?|\d+-\d+(:\d+(:\d+)?)?", re.ASCII)
"""The forms that sbatch documents, from minutes to days-hours:minutes:seconds."""
SLURM_EARLY_SECONDS = 60
"""By how much sbatch's manual says that its signals may be too early."""
SLURM_KEYS = {
    "nodes": "launch.nodes",
    "N": "launch.nodes",
    "ntasks": "launch.workers",
    "n": "launch.workers",
    "ntasks-per-node": "launch.workers",
    "cpus-per-task": "launch.cpus_per_worker",
    "c": "launch.cpus_per_worker",
    "partition": "launch.partition",
    "p": "launch.partition",
    "account": "launch.account",
    "A": "launch.account",
    "qos": "launch.qos",
    "q": "launch.qos",
    "time": "launch.time",
    "t": "launch.time",
    "signal": "launch.save_seconds",
    "output": "nothing: it is workers/job.log of the run",
    "o": "nothing: it is workers/job.log of the run",
    "array": "nothing: one run is one job",
    "a": "nothing: one run is one job",
    "wrap": "launch.setup",
}
"""Options of sbatch that are not the user's to write, and what says the same."""


def check_slurm(launch: SlurmLaunch) -> Iterator[Contradiction]:
    """What Slurm would refuse, or would do in another way than meant."""
    if launch.workers != "auto":
        yield from _nodes(launch, launch.workers)
    yield from _threads(launch.threads, launch.cpus_per_worker)
    if launch.time is not None and not SLURM_TIME.fullmatch(launch.time):
        yield Contradiction(
            ("launch.time",),
            f"launch.time is {launch.time!r}",
            "minutes, H:MM:SS, D-HH or D-HH:MM:SS",
            'write "1:30:00" for an hour and a half',
        )
    elif launch.time is not None and _seconds(launch.time) <= launch.save_seconds + SLURM_EARLY_SECONDS:
        yield Contradiction(
            ("launch.time", "launch.save_seconds"),
            f"a time limit of {_seconds(launch.time)} s, and {launch.save_seconds} s before it to save",
            f"more than {launch.save_seconds + SLURM_EARLY_SECONDS} s, since Slurm may be a minute early",
            "raise launch.time, or lower launch.save_seconds",
        )
    for option in launch.options:
        yield from _option(option)


def _nodes(launch: SlurmLaunch, workers: int) -> Iterator[Contradiction]:
    """Workers that nodes cannot share out equally, or that are not as many as their GPUs."""
    if workers % (nodes := launch.nodes):
        lower = workers - workers % nodes
        yield Contradiction(
            ("launch.workers", "launch.nodes"),
            f"{workers} workers on {nodes} nodes",
            "as many workers on every node",
            f"set launch.workers to {f'{lower} or ' if lower else ''}{lower + nodes}, or change launch.nodes",
        )
    elif 0 < launch.gpus_per_node != workers // nodes:
        yield Contradiction(
            ("launch.gpus_per_node", "launch.workers", "launch.nodes"),
            f"{workers // nodes} workers and {launch.gpus_per_node} GPUs on a node",
            "one GPU for every worker",
            f"set launch.workers to {launch.gpus_per_node * nodes}, or leave it out",
        )


def _option(option: str) -> Iterator[Contradiction]:
    """What is wrong with one item of ``launch.options``, which may hold several options and their values."""
    keys, observed = ("launch.options",), f"{option!r} in launch.options"
    try:
        words = sbatch.words(option) if sbatch.fits_on_a_line(option) else []
    except ValueError as error:
        yield Contradiction(keys, f"{observed} has {error}", "an option of sbatch", "close it, or write \\ before it")
        return
    if not words or not words[0].startswith("-") or not words[0].strip("-"):
        change = f"write --{words[0]}" if words else "write one option on one line, or leave it out"
        yield Contradiction(keys, observed, "an option of sbatch", change)
        return
    takes_value = False
    for word in words:
        if not word.startswith("-"):
            if not takes_value:
                needed = f"one value for an option: {word!r} belongs to none"
                yield Contradiction(keys, observed, needed, f"write quotes around all of the value: {words[0]!r} ...")
                return
            takes_value = False
            continue
        name, equals, _ = word.lstrip("-").partition("=")
        takes_value = not equals
        if not word.startswith("--"):
            name, takes_value = word[1:2], len(word) == 2
        for long, key in SLURM_KEYS.items():  # sbatch takes the beginning of a name for the name
            if name == long or (len(name) > 1 and long.startswith(name)):
                yield Contradiction(keys, f"{option} in launch.options", "another option", f"use {key}")
                return


def check_job_script(launch: SlurmLaunch, output: str) -> Iterator[Contradiction]:
    """What cannot be written into the script of a job."""
    texts = {f"launch.{name}": getattr(launch, name) for name in ("partition", "account", "qos")}
    texts["output"] = output
    for key, text in texts.items():
        if text is not None and not sbatch.fits_on_a_line(text):
            observed = f"{key} is {text!r}, with a line break or a control character"
            needed = "text on one line: it stands on one of the job's script"
            yield Contradiction((key,), observed, needed, "write another")
    if "\\" in output:
        observed = f"output is {output!r}, with a backslash"
        yield Contradiction(("output",), observed, "a path that Slurm writes logs to: it reads backslashes as its own")
    for key, lines in (("launch.setup", launch.setup), ("launch.python", (launch.python or "",))):
        if any("\0" in line for line in lines):
            yield Contradiction((key,), f"{key} has a character of value 0", "text that a shell can read")


def _threads(threads: int | str, cpus_per_worker: int | str) -> Iterator[Contradiction]:
    """More threads than a worker has CPUs of its own."""
    if isinstance(threads, int) and isinstance(cpus_per_worker, int) and threads > cpus_per_worker:
        yield Contradiction(
            ("launch.threads", "launch.cpus_per_worker"),
            f"{threads} threads on {cpus_per_worker} CPU(s) of a worker",
            "a CPU for every thread",
            f"set launch.cpus_per_worker to {threads}, or leave launch.threads out",
        )


def check_ray(launch: RayLaunch, parallel: Parallel) -> Iterator[Contradiction]:
    """What Ray would refuse, and sizes of a run between which it could not change."""
    if launch.workers != "auto":
        yield from _sizes(launch, parallel)
    if launch.address is None and launch.nodes > 1:
        observed = f"launch.nodes is {launch.nodes} without launch.address"
        yield Contradiction(("launch.nodes", "launch.address"), observed, "a cluster", "set launch.address to its head")
    if launch.address is not None and "://" in launch.address:
        yield Contradiction(
            ("launch.address",),
            f"launch.address is {launch.address}",
            "auto or HOST:PORT: the run is started on a node of the cluster",
            "log in to a node, or use `ray job submit -- tonnage train ...` with launch.address=auto",
        )
    yield from _threads(launch.threads, launch.cpus_per_worker)


def _sizes(launch: RayLaunch, parallel: Parallel) -> Iterator[Contradiction]:
    """Numbers of workers between which a run could not change."""
    least, most, keys = launch.fewest_workers, launch.num_workers, ("launch.workers", "launch.least")
    if least > most:
        observed = f"at least {least} workers and at most {most}"
        yield Contradiction(keys, observed, "the smaller number first", f"write launch.workers: [{most}, {least}]")
    elif least < most and launch.address is None:
        yield Contradiction(
            (*keys, "launch.address"),
            f"{least} to {most} workers on this machine alone",
            "a cluster, whose nodes come and go",
            f"set launch.address, or launch.workers to {most}",
        )
    elif least < most:
        for axis in ("replicate", "tensor", "context", "pipeline"):
            if (number := getattr(parallel, axis)) != 1:
                yield Contradiction(
                    (*keys, f"parallel.{axis}"),
                    f"{least} to {most} workers, and parallel.{axis} is {number}",
                    "groups that every number of workers can form",
                    f"leave parallel.{axis} out",
                )


def _seconds(time: str) -> int:
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # hours first
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes first
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
