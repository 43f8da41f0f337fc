"""What a config may not say although every single value is fine.

Each check is a function from a config to the contradictions it found, so that ``read.py`` can report them
together with everything else and add the lines. Only what can be seen without torch or transformers is
checked here; what needs the tokenizer, the model's shape or the rows is checked by those who load them.
"""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.config.check_evaluate import check_evaluate
from tonnage.config.check_launch import check_job_script, check_ray, check_slurm
from tonnage.config.contradiction import Contradiction
from tonnage.config.schema import Config, Data, RayLaunch, SlurmLaunch

MOST_COPIES = 10_000
"""Of a row in an epoch."""
ON_DISK = ("optimizer_tier", "gradient_tier", "parameter_tier")
"""Keys of ``memory`` that may say disk."""


def contradictions(config: Config) -> Iterator[Contradiction]:
    """Values that do not go together."""
    yield from _length(config)
    yield from _batch(config)
    yield from _parallel(config)
    yield from _pipeline(config)
    yield from _adapter(config)
    if isinstance(config.launch, SlurmLaunch):
        yield from check_slurm(config.launch)
        yield from check_job_script(config.launch, config.output)
    if isinstance(config.launch, RayLaunch):
        yield from check_ray(config.launch, config.parallel)
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
    prompts = config.evaluate.prompts
    if config.track_samples and not (prompts and config.track):
        key = "evaluate.prompts" if config.track else "track"
        yield Contradiction(
            ("track_samples", key),
            f"track_samples is true, but {'no prompts are asked' if config.track else 'no tracker is named'}",
            "samples, and a tracker that they are sent to",
            "set evaluate.prompts, to 8 for instance" if config.track else "name one: track=tensorboard",
        )
    yield from check_evaluate(config)


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
    if config.launch.workers == "auto":
        return
    packs, workers, together = config.packs_per_step, config.data_workers, config.parallel.together
    if packs < workers and not config.parallel.is_open:
        yield Contradiction(
            ("launch.workers", "batch.tokens", "batch.sequences"),
            f"{workers} workers and only {packs} {'pack' if packs == 1 else 'packs'} in a step"
            if together == 1
            else f"{workers} groups of {together} workers and only {packs} pack(s) in a step",
            "at least one pack for every worker" if together == 1 else "at least one pack for every group",
            f"set launch.workers={packs * together}, or enlarge the batch",
        )


def _parallel(config: Config) -> Iterator[Contradiction]:
    if config.launch.workers != "auto":
        yield from _groups(config, config.launch.workers)
    if config.memory.optimizer_tier == "device" and config.memory.optimizer_resident not in ("auto", 0):
        yield Contradiction(
            ("memory.optimizer_resident", "memory.optimizer_tier"),
            f"memory.optimizer_resident is {config.memory.optimizer_resident}, and memory.optimizer_tier is device, "
            "where all of the state is in memory",
            "a part of it to keep there only where the rest is elsewhere",
            "leave memory.optimizer_resident out, or set memory.optimizer_tier to host or disk",
        )
    yield from _without_disks(config)
    yield from _recomputed(config)
    if config.compile == "on" and config.memory.recompute == "selective":
        yield Contradiction(
            ("compile", "memory.recompute"),
            "compile is on, and memory.recompute is selective",
            "one of them: selective recompute keeps results of single operations, which a compiled block fuses",
            "set memory.recompute=full or memory.recompute=none, or leave compile out",
        )
    if config.memory.activation_tier == "host" and config.memory.recompute in ("none", "selective"):
        yield Contradiction(
            ("memory.activation_tier", "memory.recompute"),
            f"memory.activation_tier is host, and memory.recompute is {config.memory.recompute}: blocks "
            "keep more than their inputs",
            "memory.recompute of full where inputs of blocks are kept elsewhere",
            "set memory.recompute to full, or leave memory.activation_tier out",
        )
    if config.memory.parameter_tier == "host":
        yield from _on_host(config)
    if config.memory.tiles not in ("auto", 1):
        yield from _tiled(config)


def _groups(config: Config, workers: int) -> Iterator[Contradiction]:
    """What so many workers cannot divide among themselves, or do not keep where they are told to."""
    memory, parallel = config.memory, config.parallel
    replicate, together = parallel.replicate, parallel.together
    if workers % together:
        lower = workers - workers % together
        yield Contradiction(
            ("parallel.tensor", "parallel.pipeline", "launch.workers"),
            f"{workers} workers, parallel.tensor {parallel.tensor} and parallel.pipeline {parallel.pipeline}",
            f"a multiple of {together} workers",
            f"set {f'launch.workers={lower} or ' if lower else ''}launch.workers={lower + together}",
        )
        return
    if (groups := config.data_workers) % replicate:
        fitting = [n for n in range(1, groups + 1) if groups % n == 0]
        times = "" if together == 1 else f"times {together} "
        yield Contradiction(
            ("parallel.replicate", "launch.workers"),
            f"{groups} {times}workers cannot form {replicate} equal groups",
            f"parallel.replicate that divides {groups}: {', '.join(map(str, fitting))}",
            "set parallel.replicate to one of them",
        )
    elif memory.zero == 0 and replicate not in (1, groups):
        yield Contradiction(
            ("memory.zero", "parallel.replicate"),
            f"memory.zero is 0 (every worker holds everything), but parallel.replicate is {replicate}",
            "memory.zero of 1 to 3 inside the groups",
            "set memory.zero to 3, or leave parallel.replicate out",
        )
    if memory.parameter_tier in ("host", "disk") and memory.zero in (0, 1, 2) and groups > 1:
        yield Contradiction(
            ("memory.parameter_tier", "memory.zero"),
            f"memory.parameter_tier is {memory.parameter_tier}, but with memory.zero {memory.zero} every worker keeps "
            "all parameters in memory",
            "memory.zero of 3",
            "set memory.zero to 3",
        )


def _without_disks(config: Config) -> Iterator[Contradiction]:
    """What must rest on disk where nothing may."""
    memory = config.memory
    if memory.budget.disk != 0:
        return
    if keys := [f"memory.{key}" for key in ON_DISK if getattr(memory, key) == "disk"]:
        yield Contradiction(
            ("memory.budget.disk", *keys),
            f"memory.budget.disk is 0, and {' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} disk",
            "room on the disks of a machine for what must rest there",
            f"memory.budget.disk=auto, or {' '.join(f'{key}=auto' for key in keys)}",
        )


def _recomputed(config: Config) -> Iterator[Contradiction]:
    """Some blocks are recomputed whole, and not in a pipeline so far: its first stages would need it more."""
    memory, pipeline = config.memory, config.parallel.pipeline
    if memory.recompute_blocks == "auto":
        return
    said = f"memory.recompute_blocks is {memory.recompute_blocks}"
    if memory.recompute in ("none", "selective"):
        yield Contradiction(
            ("memory.recompute_blocks", "memory.recompute"),
            f"{said}, and memory.recompute is {memory.recompute}",
            "memory.recompute of full where some blocks are recomputed whole",
            "set memory.recompute to full, or leave memory.recompute_blocks out",
        )
    if pipeline != 1:
        yield Contradiction(
            ("memory.recompute_blocks", "parallel.pipeline"),
            f"{said}, and parallel.pipeline is {pipeline}: first stages hold more activations than last ones",
            "all blocks recomputed, or none, in a pipeline so far",
            "leave memory.recompute_blocks out, or set parallel.pipeline to 1",
        )


def _tiled(config: Config) -> Iterator[Contradiction]:
    """What does not go together with weights that come in tiles."""
    memory, parallel = config.memory, config.parallel
    said = f"memory.tiles is {memory.tiles}"
    others = {
        "parallel.tensor": (parallel.tensor, 1, "workers divide matrices along it already"),
        "parallel.pipeline": (parallel.pipeline, 1, "stages have them whole"),
        "compile": (config.compile == "on", False, "a compiled block has its weights whole"),
        "adapter": (config.adapter, "none", "what is frozen is not computed in tiles so far"),
        "train": (config.train, (), "what is frozen is not computed in tiles so far"),
    }
    for key, (value, ordinary, why) in others.items():
        if value != ordinary and (value != "auto" or key == "adapter"):
            shown = "on" if value is True else value if isinstance(value, int) else "given"
            yield Contradiction(
                ("memory.tiles", key),
                f"{said}, and {key} is {shown}: {why}",
                f"one of memory.tiles and {key}",
                f"set memory.tiles=1, or leave {key} out",
            )
    if memory.zero in (0, 1, 2) and memory.parameter_tier not in ("host", "disk"):
        yield Contradiction(
            ("memory.tiles", "memory.zero"),
            f"{said}, and with memory.zero {memory.zero} every worker keeps all parameters",
            "memory.zero of 3, where they are gathered",
            "set memory.zero to 3, or memory.tiles=1",
        )


def _on_host(config: Config) -> Iterator[Contradiction]:
    """Parameters that are trained are updated where they rest; a compiled block expects its own on the device."""
    if config.adapter == "none" and not config.train:
        for key in ("optimizer_tier", "gradient_tier"):
            if getattr(config.memory, key) == "device":
                yield Contradiction(
                    ("memory.parameter_tier", f"memory.{key}"),
                    f"memory.parameter_tier is host, where parameters are updated, and memory.{key} is device",
                    f"memory.{key} of host or disk",
                    f"set memory.{key} to host, or leave memory.parameter_tier out",
                )
    if config.compile == "on":
        yield Contradiction(
            ("memory.parameter_tier", "compile"),
            "memory.parameter_tier is host, and compile is on: a compiled block expects its parameters where they were",
            "one of them",
            "set compile to off, or leave memory.parameter_tier out",
        )


def _adapter(config: Config) -> Iterator[Contradiction]:
    """Two answers to what is trained, or a part of what nobody has."""
    if config.train and config.init == "random":
        yield Contradiction(
            ("train", "init"),
            "init is random, and train names a part of the parameters: the others would stay random",
            "a model's own weights, for what is not trained",
            "leave train out, or write init: pretrained",
        )
    if config.adapter == "none" or not config.train:
        return
    said = "auto" if config.adapter == "auto" else "additions to the model's layers"
    yield Contradiction(
        ("train", "adapter"),
        f"train names parameters ({', '.join(config.train)}), and adapter is {said}",
        "one of them: adapter trains additions, and leaves the model's own weights as they are",
        "leave train out, and name what is trained whole beside the additions in adapter.also; or set adapter to none",
    )


def _pipeline(config: Config) -> Iterator[Contradiction]:
    """What does not go through a pipeline."""
    memory, parallel = config.memory, config.parallel
    if parallel.pipeline in (1, "auto"):
        return
    if memory.activation_tier == "host":
        yield Contradiction(
            ("parallel.pipeline", "memory.activation_tier"),
            f"parallel.pipeline is {parallel.pipeline}, and memory.activation_tier is host: inputs of one micro-batch "
            "have room there, and a stage has several under way",
            "device; state, gradients and parameters may be in host memory or on disk",
            "leave memory.activation_tier out, or set parallel.pipeline to 1",
        )
    if parallel.schedule != "zero_bubble":
        return
    groups = 1 if config.launch.workers == "auto" else config.data_workers
    shared = [
        f"{groups} groups of workers shard the parameters" if groups > 1 else "",
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
