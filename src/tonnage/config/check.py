"""What a config may not say although every single value is fine, and files that are not there.

Each check is a function from a config to the contradictions it found, so that ``read.py`` can report them
together with everything else and add the lines. Only what can be seen without torch or transformers is
checked here; what needs the tokenizer, the model's shape or the rows is checked by those who load them.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tonnage.config import sbatch
from tonnage.config.schema import Config, Data, Parallel, RayLaunch, SlurmLaunch, Source
from tonnage.errors import Problem, UserError
from tonnage.files.paths import literal_variable
from tonnage.rundir.directory import RunDirectory

DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".arrow", ".txt")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
MOST_COPIES = 10_000
"""Of a row in an epoch."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
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
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Contradiction:
    """A problem, and the dotted keys it comes from."""

    keys: tuple[str, ...]
    found: str
    needed: str
    change: str = ""


def contradictions(config: Config) -> Iterator[Contradiction]:
    """Values that do not go together."""
    yield from _length(config)
    yield from _batch(config)
    yield from _parallel(config)
    yield from _pipeline(config)
    if isinstance(config.launch, SlurmLaunch):
        yield from _slurm(config.launch)
        yield from _job_script(config.launch, config.output)
    if isinstance(config.launch, RayLaunch):
        yield from _ray(config.launch, config.parallel)
    optimizer = config.optimizer
    if optimizer.warmup >= 1 and optimizer.warmup != int(optimizer.warmup):
        yield Contradiction(
            ("optimizer.warmup",),
            f"optimizer.warmup is {optimizer.warmup!r}",
            "a fraction of all steps below 1, or a whole number of steps",
        )
    if config.steps is not None and optimizer.warmup > config.steps:
        yield Contradiction(
            ("optimizer.warmup", "steps"),
            f"a warm-up of {optimizer.warmup:g} steps in a run of {config.steps}",
            f"at most {config.steps}",
            "lower optimizer.warmup, or write it as a fraction",
        )
    if config.data.mixture == "rows":
        yield from _weights(config.data)
    if config.evaluate.every and config.data.validation == 0:
        yield Contradiction(
            ("evaluate.every", "data.validation"),
            f"evaluate.every is {config.evaluate.every}, but there are no validation rows",
            "rows to evaluate on",
            "set data.validation, to 0.02 for instance, or leave evaluate.every out",
        )


def _weights(data: Data) -> Iterator[Contradiction]:
    """Weights so large that they cannot be meant as how often a row is seen: an epoch has every copy of it."""
    for index, source in enumerate(data.train):
        if source.weight > MOST_COPIES:
            key = f"data.train.{index}.weight"
            yield Contradiction(
                (key,),
                f"{key} is {source.weight:g}: an epoch would see each row of {source.path} so often",
                f"at most {MOST_COPIES:,}",
                "use epochs to see rows more often, or data.mixture: tokens where weights are shares",
            )


def _length(config: Config) -> Iterator[Contradiction]:
    if config.steps is not None and config.epochs is not None:
        found = f"both epochs ({config.epochs:g}) and steps ({config.steps})"
        yield Contradiction(("epochs", "steps"), found, "one of them", "remove epochs or steps")
    if config.steps is None and config.epochs is None:
        yield Contradiction(("epochs", "steps"), "neither epochs nor steps", "one of them", "write epochs: 3")


def _batch(config: Config) -> Iterator[Contradiction]:
    batch, keys = config.batch, ("batch.tokens", "batch.sequences")
    if batch == "auto":
        return
    if batch.tokens is not None and batch.sequences is not None:
        found = f"both batch.tokens ({batch.tokens}) and batch.sequences ({batch.sequences})"
        yield Contradiction(keys, found, "one of them", "remove batch.tokens or batch.sequences")
        return
    if batch.tokens is None and batch.sequences is None:
        change = "write batch: auto, or batch: {tokens: 65536}"
        yield Contradiction(keys, "neither batch.tokens nor batch.sequences", "one of them", change)
        return
    if batch.tokens is not None and not config.data.pack:
        yield Contradiction(
            ("batch.tokens", "data.pack"),
            f"batch.tokens is {batch.tokens} without packing (data.pack is false)",
            "a batch counted in conversations, because their lengths differ",
            "write batch: {sequences: 32} instead, or data.pack: true",
        )
        return
    if batch.tokens is not None and batch.tokens < config.data.max_length:
        yield Contradiction(
            ("batch.tokens", "data.max_length"),
            f"batch.tokens is {batch.tokens}, less than a pack of {config.data.max_length} (data.max_length)",
            "room for at least one pack in a step",
            f"raise batch.tokens to a multiple of {config.data.max_length}, or lower data.max_length",
        )
        return
    packs, workers, together = config.packs_per_step, config.data_workers, config.parallel.together
    if packs < workers and not config.parallel.is_open:
        yield Contradiction(
            ("launch.workers", "batch.tokens", "batch.sequences"),
            f"{workers} workers and only {packs} {'pack' if packs == 1 else 'packs'} in a step"
            if together == 1
            else f"{workers} groups of {together} workers and only {packs} pack(s) in a step",
            "at least one pack for every worker" if together == 1 else "at least one pack for every group",
            f"lower launch.workers to {packs * together}, or enlarge the batch",
        )


def _parallel(config: Config) -> Iterator[Contradiction]:
    parallel, workers = config.parallel, config.launch.workers
    replicate, together = parallel.replicate, parallel.together
    if parallel.tensor != 1:
        yield from _tensor(config)
    if workers % together:
        lower = workers - workers % together
        yield Contradiction(
            ("parallel.tensor", "parallel.pipeline", "launch.workers"),
            f"{workers} workers, parallel.tensor {parallel.tensor} and parallel.pipeline {parallel.pipeline}",
            f"a multiple of {together} workers",
            f"set launch.workers to {f'{lower} or ' if lower else ''}{lower + together}",
        )
        return
    if (workers := config.data_workers) % replicate:
        fitting = [n for n in range(1, workers + 1) if workers % n == 0]
        each = "" if together == 1 else f" of {together}"
        yield Contradiction(
            ("parallel.replicate", "launch.workers"),
            f"{workers} {f'times {together} ' if each else ''}workers cannot form {replicate} equal groups",
            f"parallel.replicate that divides {workers}: {', '.join(map(str, fitting))}",
            "set parallel.replicate to one of them",
        )
    elif config.memory.zero == 0 and replicate not in (1, workers):
        yield Contradiction(
            ("memory.zero", "parallel.replicate"),
            f"memory.zero is 0 (every worker holds everything), but parallel.replicate is {replicate}",
            "memory.zero of 1 to 3 inside the groups",
            "set memory.zero to 3, or leave parallel.replicate out",
        )
    if config.memory.optimizer_tier == "device" and config.memory.optimizer_resident not in ("auto", 0):
        yield Contradiction(
            ("memory.optimizer_resident", "memory.optimizer_tier"),
            f"memory.optimizer_resident is {config.memory.optimizer_resident}, and memory.optimizer_tier is device, "
            "where all of the state is in memory",
            "a part of it to keep there only where the rest is elsewhere",
            "leave memory.optimizer_resident out, or set memory.optimizer_tier to host or disk",
        )
    if config.memory.activation_tier == "host" and config.memory.recompute in ("none", "selective"):
        yield Contradiction(
            ("memory.activation_tier", "memory.recompute"),
            f"memory.activation_tier is host, and memory.recompute is {config.memory.recompute}: blocks "
            "keep more than their inputs",
            "memory.recompute of full where inputs of blocks are kept elsewhere",
            "set memory.recompute to full, or leave memory.activation_tier out",
        )
    if config.memory.parameter_tier == "disk" and config.memory.zero in (0, 1, 2) and workers > 1:
        yield Contradiction(
            ("memory.parameter_tier", "memory.zero"),
            f"memory.parameter_tier is disk, but with memory.zero {config.memory.zero} every worker keeps all "
            "parameters in memory",
            "memory.zero of 3",
            "set memory.zero to 3",
        )


def _tensor(config: Config) -> Iterator[Contradiction]:
    """What does not go together with matrices that are divided."""
    memory, degree = config.memory, config.parallel.tensor
    if degree == "auto":
        return
    for key in ("optimizer_tier", "gradient_tier", "parameter_tier"):
        if (tier := getattr(memory, key)) in ("host", "disk"):
            yield Contradiction(
                (f"memory.{key}", "parallel.tensor"),
                f"memory.{key} is {tier}, and parallel.tensor is {degree}",
                f"memory.{key} of device where workers divide matrices",
                f"leave memory.{key} out, or parallel.tensor",
            )
    if memory.moments == "int8":
        yield Contradiction(
            ("memory.moments", "parallel.tensor"),
            f"memory.moments is int8, and parallel.tensor is {degree}",
            "fp32 or bf16 moments where workers divide matrices: int8 ones share scales along whole rows",
            "set memory.moments to bf16, or leave parallel.tensor out",
        )


def _pipeline(config: Config) -> Iterator[Contradiction]:
    """What does not go through a pipeline."""
    memory, parallel = config.memory, config.parallel
    if parallel.pipeline in (1, "auto"):
        return
    tiers = ("activation_tier", "optimizer_tier", "gradient_tier", "parameter_tier")
    for key in (key for key in tiers if getattr(memory, key) in ("host", "disk")):
        yield Contradiction(
            ("parallel.pipeline", f"memory.{key}"),
            f"parallel.pipeline is {parallel.pipeline}, and memory.{key} is {getattr(memory, key)}",
            "device: a stage does not wait for what comes from elsewhere",
            f"leave memory.{key} out, or set parallel.pipeline to 1",
        )
    if parallel.schedule != "zero_bubble":
        return
    shared = [
        f"{config.data_workers} groups of workers shard the parameters" if config.data_workers > 1 else "",
        f"parallel.tensor is {parallel.tensor}" if parallel.tensor != 1 else "",
        "precision is fp16" if config.precision == "fp16" else "",
    ]
    if any(shared):
        yield Contradiction(
            ("parallel.schedule", "launch.workers", "parallel.tensor", "precision"),
            f"parallel.schedule is zero_bubble, and {' and '.join(filter(None, shared))}",
            f"{parallel.pipeline} workers, which hold the weights of their stages as they are computed with: their "
            "gradients come later than those of a shard",
            "set parallel.schedule to 1f1b",
        )
    if config.compile == "on":
        yield Contradiction(
            ("parallel.schedule", "compile"),
            "parallel.schedule is zero_bubble, and compile is on: what is compiled has its backward pass in one piece",
            "one of them",
            "set parallel.schedule to 1f1b, or compile to off",
        )


def _slurm(launch: SlurmLaunch) -> Iterator[Contradiction]:
    """What Slurm would refuse, or would do in another way than meant."""
    workers, nodes = launch.workers, launch.nodes
    if workers % nodes:
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
            f"set launch.workers to {launch.gpus_per_node * nodes}",
        )
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


def _option(option: str) -> Iterator[Contradiction]:
    """What is wrong with one item of ``launch.options``, which may hold several options and their values."""
    keys, found = ("launch.options",), f"{option!r} in launch.options"
    try:
        words = sbatch.words(option) if sbatch.fits_on_a_line(option) else []
    except ValueError as error:
        yield Contradiction(keys, f"{found} has {error}", "an option of sbatch", "close it, or write \\ before it")
        return
    if not words or not words[0].startswith("-") or not words[0].strip("-"):
        change = f"write --{words[0]}" if words else "write one option on one line, or leave it out"
        yield Contradiction(keys, found, "an option of sbatch", change)
        return
    takes_value = False
    for word in words:
        if not word.startswith("-"):
            if not takes_value:
                needed = f"one value for an option: {word!r} belongs to none"
                yield Contradiction(keys, found, needed, f"write quotes around all of the value: {words[0]!r} ...")
                return
            takes_value = False
            continue
        name, equals, _ = word.lstrip("-").partition("=")
        takes_value = not equals
        if not word.startswith("--"):
            name, takes_value = word[1:2], len(word) == 2
        for known in SLURM_KEYS:  # sbatch takes the beginning of a name for the name
            if name == known or (len(name) > 1 and known.startswith(name)):
                yield Contradiction(keys, f"{option} in launch.options", "another option", f"use {SLURM_KEYS[known]}")
                return


def _job_script(launch: SlurmLaunch, output: str) -> Iterator[Contradiction]:
    """What cannot be written into the script of a job."""
    texts = {f"launch.{name}": getattr(launch, name) for name in ("partition", "account", "qos")}
    texts["output"] = output
    for key, text in texts.items():
        if text is not None and not sbatch.fits_on_a_line(text):
            found = f"{key} is {text!r}, with a line break or a control character"
            yield Contradiction(
                (key,), found, "text on one line: it stands on one of the job's script", "write another"
            )
    if "\\" in output:
        found = f"output is {output!r}, with a backslash"
        yield Contradiction(("output",), found, "a path that Slurm writes logs to: it reads backslashes as its own")
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


def _ray(launch: RayLaunch, parallel: Parallel) -> Iterator[Contradiction]:
    """What Ray would refuse, and sizes of a run between which it could not change."""
    least, most, keys = launch.fewest_workers, launch.workers, ("launch.workers", "launch.least")
    if least > most:
        found = f"at least {least} workers and at most {most}"
        yield Contradiction(keys, found, "the smaller number first", f"write launch.workers: [{most}, {least}]")
    elif least < most and launch.address is None:
        yield Contradiction(
            (*keys, "launch.address"),
            f"{least} to {most} workers on this machine alone",
            "a cluster, whose nodes come and go",
            f"set launch.address, or launch.workers to {most}",
        )
    elif least < most:
        for axis in ("replicate", "tensor", "pipeline"):
            if (number := getattr(parallel, axis)) != 1:
                yield Contradiction(
                    (*keys, f"parallel.{axis}"),
                    f"{least} to {most} workers, and parallel.{axis} is {number}",
                    "groups that every number of workers can form",
                    f"leave parallel.{axis} out",
                )
    if launch.address is None and launch.nodes > 1:
        found = f"launch.nodes is {launch.nodes} without launch.address"
        yield Contradiction(("launch.nodes", "launch.address"), found, "a cluster", "set launch.address to its head")
    if launch.address is not None and "://" in launch.address:
        yield Contradiction(
            ("launch.address",),
            f"launch.address is {launch.address}",
            "auto or HOST:PORT: the run is started on a node of the cluster",
            "log in to a node, or use `ray job submit -- tonnage train ...` with launch.address=auto",
        )
    yield from _threads(launch.threads, launch.cpus_per_worker)


def _seconds(time: str) -> int:
    """A time limit of Slurm in seconds."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # hours first
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes first
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def missing_files(config: Config) -> Iterator[Contradiction]:
    """Local files and directories that the config names and that are not there, or are of no use."""
    data, validation = config.data, config.data.validation
    yield from _looked_at("model", config.model, _model(config))
    for side, sources in (("train", data.train), ("validation", validation if isinstance(validation, tuple) else ())):
        for index, source in enumerate(sources):
            key = f"data.{side}.{index}.path"
            yield from _looked_at(key, source.path, _source(key, source))
    yield from _looked_at("data.template", data.template, _template(data.template))
    here = str(Path.cwd())
    if isinstance(config.launch, SlurmLaunch) and ("\\" in here or not sbatch.fits_on_a_line(here)):
        found = f"the working directory {here!r}, with a line break, a control character or a backslash"
        needed = "one that can stand in the script of a job, which begins there"
        yield Contradiction(("launch.with",), found, needed, "start from another directory")
    places = [("output", config.output), ("data.cache", data.cache)]
    for key, path in (*places, *(("memory.offload_dirs", path) for path in config.memory.offload_dirs)):
        if path is not None:
            yield from _looked_at(key, path, _directory(key, path))


def _looked_at(key: str, path: str, found: Iterator[Contradiction]) -> Iterator[Contradiction]:
    """What was found wrong with a path, or that it cannot be looked at."""
    try:
        yield from found
    except OSError as error:
        yield Contradiction((key,), f"{key} {path} cannot be looked at: {error.strerror}", "a path that this user sees")


def _template(name: str) -> Iterator[Contradiction]:
    if not (name.endswith((".jinja", ".jinja2", ".j2")) or "/" in name):
        return
    path, keys = Path(name), ("data.template",)
    if not path.is_file():
        near = "" if path.exists() else _near(name)
        yield Contradiction(keys, f"data.template: no file {name}", "a Jinja file", near)
        return
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        yield Contradiction(
            keys, f"data.template {name} is not UTF-8 (byte {error.start})", "a Jinja file, which is text"
        )


def _directory(key: str, name: str) -> Iterator[Contradiction]:
    """A directory that need not exist yet, but can be made."""
    if variable := literal_variable(name):
        yield Contradiction(
            (key,),
            f"{key} is {name}, and there is no {variable} anywhere: it would be the name of a directory",
            "the path itself",
            f"write it out, or give {key}=... on the command line, where the shell puts in {variable}",
        )
        return
    there = Path(name).absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        what = name if there == Path(name).absolute() else f"{there}, in which {name} would be,"
        yield Contradiction((key,), f"{key} {what} is a file", "a directory, which need not exist yet")


def _model(config: Config) -> Iterator[Contradiction]:
    path, keys = Path(config.model), ("model",)
    if path.is_dir():
        missing = []
        if not (path / "config.json").is_file():
            missing.append("config.json")
        if config.init == "pretrained" and not any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES):
            missing.append("weights (*.safetensors)")
        if missing:
            change = ""
            if missing == ["weights (*.safetensors)"]:
                change = "name a directory with weights, or write init: random to train from random ones"
            needed = "a Hugging Face model directory"
            yield Contradiction(keys, f"model directory {path} has no {' and no '.join(missing)}", needed, change)
    elif path.exists():
        yield Contradiction(keys, f"model {path} is a file", "a model directory or a hub id", f"name {path.parent}")
    elif not HUB_ID.fullmatch(config.model):
        yield Contradiction(keys, f"no model directory {path}", "a model directory or a hub id", _near(config.model))


def _source(key: str, source: Source) -> Iterator[Contradiction]:
    path, keys = Path(source.path), (key,)
    needed = "a file, glob, directory or hub id"
    if any(letter in source.path for letter in "*?[") and not path.exists():
        anchor = Path(path.anchor) if path.is_absolute() else Path()
        pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else source.path
        try:
            found = next(anchor.glob(pattern), None)
        except ValueError as error:
            yield Contradiction(keys, f"{source.path[:200]} is no pattern: {error}", needed)
        else:
            if found is None:
                yield Contradiction(keys, f"no file matches {source.path}", needed)
    elif path.is_dir():
        if not any(looks_like_data(item) for item in path.rglob("*")):
            yield Contradiction(
                keys, f"{path} holds no data file", f"a file ending in one of {', '.join(DATA_SUFFIXES)}"
            )
    elif path.is_file():
        if path.stat().st_size == 0:
            yield Contradiction(keys, f"{path} is empty (0 bytes)", "a file with rows in it")
        elif not os.access(path, os.R_OK):
            yield Contradiction(keys, f"{path} cannot be read by this user", "a readable file")
    elif path.exists():
        yield Contradiction(keys, f"{path} is neither a file nor a directory", needed)
    elif not HUB_ID.fullmatch(source.path) or looks_like_data(path):
        yield Contradiction(keys, f"no such file: {source.path}", needed, _near(source.path))


def looks_like_data(path: Path) -> bool:
    """Whether a name ends like a data file's."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(DATA_SUFFIXES)


def _near(text: str) -> str:
    """A hint: names spelt alike in the deepest directory of a path that exists."""
    path = Path(text)
    if variable := literal_variable(text):
        return f"{variable} is not put in here: write the path out, or give it on the command line, where a shell does"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    names = sorted(item.name for item in path.parent.iterdir())
    return did_you_mean(str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=2))


def did_you_mean(names: Iterable[str]) -> str:
    """A hint that offers names, empty if there are none."""
    listed = " or ".join(names)
    return f"did you mean {listed}?" if listed else ""


def check_trackers(config: Config) -> None:
    """Refuse trackers whose package is not installed where the run starts.

    Raises:
        UserError: one is missing.
    """
    missing = [name for name in config.track if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            Problem(
                found=f"track: {', '.join(missing)}, which is not installed",
                needed="the packages of the trackers that are named",
                change=f"pip install 'tonnage[{','.join(missing)}]', or leave track out: metrics.jsonl has everything",
                where="track",
            )
        )


def check_output(config: Config) -> None:
    """Refuse an output directory that already holds a run. Raises ``UserError``."""
    run = RunDirectory(config.output)
    if run.is_run():
        raise UserError(
            Problem(
                f"output {config.output} already holds a run",
                "a directory of its own for every run",
                f"write output=... with another name, or remove {config.output}",
                "output",
            )
        )
