"""On what it runs: workers, machines, and what workers share."""

from __future__ import annotations

from math import prod
from pathlib import PurePath
from typing import Any

from tonnage.migration.draft import Draft, Need, Pick
from tonnage.migration.keys import DEEPSPEED
from tonnage.migration.memory import NEEDS_ZERO_3
from tonnage.migration.training import ranks_with_their_own_data
from tonnage.migration.values import flag, number, text, whole

TRL_CONFIGS = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp1": 3, "fsdp2": 3, "multi_gpu": 0, "single_gpu": 0}
"""Configurations that TRL brings along, by name: the ZeRO stage."""
TRL_PROCESSES = {"single_gpu": 1}
"""Their processes, which are 8 in all others. ``single_gpu`` has the same 8 beside ``distributed_type: NO``, which is
one."""
OTHER_FILES = ("deepspeed_file", "accelerate_file", "fsdp_file", "arguments_file")
STRATEGIES = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
    "_hybrid_shard_zero2": 2,
    "1": 3,
    "2": 2,
    "3": 0,
    "4": 3,
    "5": 2,
    "true": 3,
    "false": 2,
}
"""FSDP's sharding strategies and their numbers, and FSDP2's ``reshard_after_forward``: the ZeRO stage."""
HYBRID = ("hybrid_shard", "hybrid_shard_zero2", "_hybrid_shard_zero2", "4", "5")


def other_files(draft: Draft) -> None:
    """Files that the given ones name: each must be given as well."""
    draft.drop(draft.first("launcher_word", text), "launch says how workers are started.")
    names = {PurePath(name).name for name in draft.files.names}
    for quantity in OTHER_FILES:
        for pick in draft.every(quantity, text):
            if PurePath(pick.value).name in names:
                draft.drop(pick, "Imported beside this one.")
            else:
                draft.leave_open(Need("", f"{pick.shown} is another file: give it as well"), pick)


def workers(draft: Draft) -> int | None:
    """Number of workers. Returns how many of them see different data; None if no file says."""
    nodes = draft.first("nodes", whole)
    count = _degrees(draft, _workers(draft))
    if nodes is not None and nodes.value > 1 and count:
        _machines(draft, nodes, count)
    elif nodes is not None:
        draft.drop(nodes, "One machine." if nodes.value == 1 else "launch.workers counts the workers of all.")
    degrees = [draft.tree[key] for key in ("parallel.tensor", "parallel.pipeline") if key in draft.tree]
    for pick in draft.every("ranks_per_replica", whole):
        if pick.value > 1:
            degrees.append(pick.value)
            draft.refuse(pick)
        else:
            draft.drop(pick, "Off.")
    draft.copy("launch.threads", whole)
    draft.copy("launch.timeout", number)
    _sharing(draft, nodes.value if nodes else 1, count)
    return ranks_with_their_own_data(count, degrees)


def _machines(draft: Draft, nodes: Pick[int], count: int) -> None:
    """Several machines: a job of Slurm, with an equal part of the workers on each, each with a GPU."""
    draft.put("launch.workers", count, nodes)
    if count % nodes.value:
        need = Need("launch.nodes", f"{count} workers on {nodes.value} machines: an equal part on each", "1")
        draft.leave_open(need, nodes)
        return
    draft.put("launch.with", "slurm", nodes, note="Several machines: a job of Slurm; with Ray write launch.with: ray.")
    draft.put("launch.nodes", nodes.value, nodes)
    draft.put("launch.gpus_per_node", count // nodes.value, nodes)


def _degrees(draft: Draft, count: int | None) -> int | None:
    """Sizes of the axes; and workers, where no launcher says how many, as those make them, as Ray is told, or as was
    said beside the files."""
    sizes: dict[str, int] = {}
    for key in ("parallel.tensor", "parallel.pipeline"):
        size = draft.first(key, whole)
        if size is not None and size.value > 1:
            sizes[key] = size.value
            draft.put(key, size.value, size)
        elif size is not None:
            draft.drop(size, "Off.")
    shards = [pick for pick in draft.every("shard_workers", whole) if pick.value > 0]
    groups = next((pick.value for pick in draft.every("parallel.replicate", whole)), 1)
    axes = prod([*sizes.values(), groups, *(pick.value for pick in shards)])
    if count is None and not _of_ray(draft):
        _from_elsewhere(draft, axes, shards)
    draft.drop_every("Other keys say how many workers there are.", "ray", "ray_workers", "shard_workers")
    workers = draft.tree.get("launch.workers")
    return workers if isinstance(workers, int) else None


def _of_ray(draft: Draft) -> bool:
    """Workers of Ray, if it starts them."""
    is_on, workers = draft.first("ray", flag), draft.first("ray_workers", whole)
    if workers is None or (is_on is not None and not is_on.value):
        return False
    draft.put("launch.with", "ray", is_on, workers)
    draft.put("launch.workers", workers.value, workers)
    return True


def _from_elsewhere(draft: Draft, axes: int, shards: list[Pick[int]]) -> None:
    """Workers where no launcher and no Ray says how many."""
    if draft.is_open("launch.workers"):
        return
    if draft.files.workers is not None:
        draft.imply("launch.workers", draft.files.workers, "as said with --workers")
    elif axes > 1 and shards:
        draft.put("launch.workers", axes, *shards)
    elif axes > 1:
        draft.imply("launch.workers", axes, "as many as the axes need")
    elif not draft.program.counts_workers:
        draft.imply("launch.workers", 1, f"{draft.program.name} takes all GPUs that it finds: say --workers N")
        draft.notes.append(
            f"The file does not say how many workers there are: {draft.program.name} takes every GPU that it finds. "
            "One is written; with --workers N the batch and launch.workers are those of N."
        )


def _workers(draft: Draft) -> int | None:
    total = draft.first("launch.workers", whole)
    each = draft.first("processes_per_node", _processes)
    devices, tasks = draft.first("devices", _devices), draft.first("slurm_tasks", flag)
    nodes = next((pick.value for pick in draft.every("nodes", whole)), 1)
    launcher = draft.files.launchers[0] if draft.files.launchers else ""
    if total is not None and total.value > 0:
        draft.put("launch.workers", total.value, total)
    elif draft.is_open("launch.workers"):
        pass
    elif each is not None and each.value:
        draft.put("launch.workers", each.value * nodes, each)
    elif devices is not None and devices.value and launcher == "python":
        note = (
            "" if devices.value == 1 else "One process then drove them all, each with rows of its own (DataParallel)."
        )
        draft.put("launch.workers", devices.value, devices, note=note)
    elif devices is not None and devices.value and launcher != "torchrun":
        draft.put("launch.workers", devices.value * nodes, devices)
    elif own := _own_config(draft):
        number_of = TRL_PROCESSES.get(own, 8)
        draft.imply("launch.workers", number_of, f"TRL's {own}.yaml is for {number_of}")
    elif launcher == "torchrun" and each is None:
        draft.imply("launch.workers", nodes, "torchrun starts one process a node by default")
    elif tasks is not None and draft.files.workers is None:
        sentence = "the number of workers: srun starts as many as the job has tasks (say --workers N)"
        draft.leave_open(Need("launch.workers", sentence, "1"), tasks)
    elif tasks is not None:
        draft.put("launch.workers", draft.files.workers, tasks)
    elif launcher == "python" and not draft.has("distributed_type"):
        draft.imply("launch.workers", 1, "python starts one process")
    elif any(pick.value == "NO" for pick in draft.every("distributed_type", _kind)):
        draft.imply("launch.workers", 1, "distributed_type NO is one process")
    for pick in (total, each, devices, tasks):
        if pick is None:
            continue
        if "launch.workers" not in draft.tree:
            draft.leave_open(Need("launch.workers", f"the number of workers: {pick.shown} does not say it", "1"), pick)
        else:
            draft.drop(pick, f"Other keys say it: {draft.tree['launch.workers']}.")
    workers = draft.tree.get("launch.workers")
    return workers if isinstance(workers, int) else None


def _own_config(draft: Draft) -> str:
    """The configuration that TRL brings along, by its name; empty if none is named."""
    names = [str(setting.value) for setting in draft.settings("accelerate_config")]
    return next((name for name in names if name in TRL_CONFIGS), "")


def _processes(value: Any) -> int:
    """Processes of a node; 0 for the words by which torchrun counts devices itself."""
    return 0 if str(value).lower() in ("auto", "gpu", "cpu", "xpu") else whole(value)


def _devices(value: Any) -> int:
    """Devices in ``0,1,2``, or in ``localhost:0,1`` of the deepspeed launcher; 0 for all."""
    listed = str(value).rpartition(":")[2]
    return 0 if listed in ("", "all", "True") else len([part for part in listed.split(",") if part.strip()])


def _kind(value: Any) -> str:
    return "NO" if value in (False, None) else text(value).upper().rpartition(".")[2]


def _sharing(draft: Draft, nodes: int, count: int | None) -> None:
    """ZeRO stage and groups of workers."""
    stage = draft.first("memory.zero", _stage)
    _engine(draft)
    sharding = draft.first("sharding", _sharding)
    own = draft.first("accelerate_config", text)
    kinds = draft.every("distributed_type", _kind)
    if own is not None:
        _trl_config(draft, own)
    if stage is not None:
        draft.put("memory.zero", stage.value, stage)
        draft.drop(sharding, f"{stage.shown} counts.")
    elif sharding is not None and sharding.value is None:
        draft.drop(sharding, "FSDP is off.")
    elif sharding is not None and sharding.value is not None:
        zero, is_hybrid, is_offloaded = sharding.value
        if is_offloaded:
            draft.put("memory.zero", zero)
            draft.origins["memory.zero"] = [sharding.settings[0].shown]
            if zero == 3:
                draft.put("memory.parameter_tier", "host", sharding)
            else:
                draft.refuse(sharding, f"memory.zero is {zero}: {NEEDS_ZERO_3}")
        else:
            draft.put("memory.zero", zero, sharding)
        if is_hybrid and nodes > 1:
            picks = [] if is_offloaded else [sharding]
            draft.put("parallel.replicate", nodes, *picks, note="Shards inside a node, replicates across.")
        elif is_hybrid:
            draft.needs.append(Need("parallel.replicate", "the number of nodes, which no file says", "2"))
    for kind in kinds:
        _distributed(draft, kind)
    named_elsewhere = any(draft.has(name) for name in OTHER_FILES[:3]) or draft.files.has(DEEPSPEED)
    if stage is None and draft.files.has(DEEPSPEED) and not draft.has("memory.zero"):
        draft.imply("memory.zero", 0, "DeepSpeed shards nothing without zero_optimization")
    if draft.files.launchers and count and count > 1 and not kinds and not named_elsewhere and own is None:
        draft.imply("memory.zero", 0, "several processes without FSDP or DeepSpeed hold everything each (DDP)")
    draft.copy("parallel.replicate", whole)
    size = draft.first("shard_size", whole)
    if size is not None and size.value > 0 and count and count % size.value == 0:
        draft.put("parallel.replicate", count // size.value, size)
    elif size is not None and size.value > 0:
        draft.leave_open(Need("parallel.replicate", f"workers divided by {size.value}", "1"), size)
    elif size is not None:
        draft.drop(size, "Off.")


def _engine(draft: Draft) -> None:
    """What divides the states in LLaMA-Factory 1."""
    engine = draft.first("engine", text)
    if engine is None:
        return
    if engine.value == "fsdp2":
        draft.put("memory.zero", 3, engine)
    elif engine.value == "deepspeed":
        draft.drop(engine, "DeepSpeed's own file says it.")
    else:
        draft.refuse(engine, f"fsdp2 or deepspeed, not {engine.value}.")


def _stage(value: Any) -> int:
    return int(value) if isinstance(value, bool) else whole(value)


def _sharding(value: Any) -> tuple[int, bool, bool] | None:
    """ZeRO stage, whether groups replicate, whether parameters are offloaded; None if FSDP is off."""
    words = [str(item).lower() for item in value] if isinstance(value, list) else str(value).lower().split()
    words = [word.rpartition(".")[2] for word in words]
    if not words or words == ["none"] or words == [""]:
        return None
    strategies = [word for word in words if word in STRATEGIES]
    if not strategies and "auto_wrap" not in words and "offload" not in words:
        raise ValueError("is no sharding strategy")
    strategy = strategies[0] if strategies else "full_shard"
    return STRATEGIES[strategy], strategy in HYBRID, "offload" in words


def _distributed(draft: Draft, kind: Pick[str]) -> None:
    match kind.value:
        case "NO":
            draft.drop(kind, "One process.")
        case "MULTI_GPU" | "MULTI_CPU" if draft.tree.get("memory.zero", 0) != 0:
            draft.drop(kind, "Other keys say what workers share.")
        case "MULTI_GPU" | "MULTI_CPU":
            draft.put("memory.zero", 0, kind)
        case "FSDP" if "memory.zero" in draft.tree:
            draft.put("memory.zero", draft.tree["memory.zero"], kind)
        case "FSDP":
            draft.put("memory.zero", 3, kind, note="FULL_SHARD by default.")
        case "DEEPSPEED" if "memory.zero" in draft.tree:
            draft.put("memory.zero", draft.tree["memory.zero"], kind)
        case "DEEPSPEED" if draft.has("deepspeed_file"):
            draft.leave_open(Need("memory.zero", "the ZeRO stage, which DeepSpeed's own file says", "3"), kind)
        case "DEEPSPEED":
            draft.put("memory.zero", 2, kind, note="Stage 2 by default in Accelerate.")
        case _:
            draft.refuse(kind, f"DDP, FSDP or DeepSpeed, not {kind.value}.")


def _trl_config(draft: Draft, own: Pick[str]) -> None:
    if PurePath(own.value).name in {PurePath(name).name for name in draft.files.names}:
        draft.drop(own, "Imported beside this one.")
    elif own.value not in TRL_CONFIGS:
        draft.leave_open(Need("", f"{own.shown} is another file: give it as well"), own)
    else:
        draft.put("memory.zero", TRL_CONFIGS[own.value], own)
