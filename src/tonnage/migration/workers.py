"""On what it runs: workers, machines, and what workers share."""

from __future__ import annotations

from math import prod
from pathlib import PurePath
from typing import Any

from tonnage.migration.draft import Draft, MissingAnswer, Pick
from tonnage.migration.keys import DEEPSPEED
from tonnage.migration.memory import NEEDS_ZERO_3
from tonnage.migration.values import flag, number, text, whole
from tonnage.migration.yaml_files import read_data

AXES = ("parallel.tensor", "parallel.context", "parallel.pipeline")
OTHER_FILES = ("deepspeed_file", "accelerate_file", "fsdp_file", "arguments_file")
TRAINER_S_FSDP = ("fsdp", "fsdp_config")
"""The Trainer's switch, and what means something with it alone."""
_SHARDING = read_data("sharding")


def other_files(draft: Draft) -> None:
    """Files that the given ones name: each must be given as well."""
    draft.drop(draft.first("launcher_word", text), "launch says how workers are started.")
    for quantity in OTHER_FILES:
        for pick in draft.every(quantity, text):
            _other_file(draft, pick)


def _is_imported(draft: Draft, pick: Pick[str]) -> bool:
    return PurePath(pick.value).name in {PurePath(name).name for name in draft.files.names}


def _other_file(draft: Draft, pick: Pick[str]) -> None:
    if _is_imported(draft, pick):
        draft.drop(pick, "Imported beside this one.")
    else:
        draft.leave_open("", f"{pick.shown} is another file: give it as well", pick)


def workers(draft: Draft) -> int | None:
    """Number of workers. Returns how many of them see different data; None if no file says."""
    nodes = draft.first("nodes", whole)
    _workers(draft)
    _degrees(draft)
    count: int | None = draft.tree.get("launch.workers")
    if nodes is not None and nodes.value > 1 and count:
        _machines(draft, nodes, count)
    elif nodes is not None:
        draft.drop(nodes, "One machine." if nodes.value == 1 else "launch.workers counts the workers of all.")
    degrees = [draft.tree[key] for key in AXES if key in draft.tree]
    for pick in draft.every("ranks_per_replica", whole):
        if pick.value > 1:
            degrees.append(pick.value)
            draft.refuse(pick)
        draft.drop(pick, "Off.")
    draft.copy("launch.threads", whole)
    draft.copy("launch.timeout", number)
    _sharing(draft, nodes.value if nodes else 1, count)
    return None if count is None else max(1, count // prod(degrees))  # degrees share one copy of the model


def _machines(draft: Draft, nodes: Pick[int], count: int) -> None:
    """Several machines: a job of Slurm, with an equal part of the workers on each, each with a GPU."""
    draft.put("launch.workers", count, nodes)
    if count % nodes.value:
        sentence = f"{count} workers on {nodes.value} machines: an equal part on each"
        draft.leave_open("launch.nodes", sentence, nodes, example="1")
        return
    draft.put("launch.with", "slurm", nodes, note="Several machines: a job of Slurm; with Ray write launch.with: ray.")
    draft.put("launch.nodes", nodes.value, nodes)
    draft.put("launch.gpus_per_node", count // nodes.value, nodes)


def _degrees(draft: Draft) -> None:
    """Sizes of the axes; and workers, where no launcher says how many, as those make them, as Ray is told, or as was
    said beside the files."""
    sizes = []
    for axis in AXES:
        size = draft.first(axis, whole)
        if size is not None and size.value > 1:
            sizes.append(size.value)
            draft.put(axis, size.value, size)
        draft.drop(size, "Off.")
    shards = [pick for pick in draft.every("shard_workers", whole) if pick.value > 0]
    groups = next((pick.value for pick in draft.every("parallel.replicate", whole)), 1)
    axes = prod([*sizes, groups, *(pick.value for pick in shards)])
    if "launch.workers" not in draft.tree and not _of_ray(draft):
        _from_elsewhere(draft, axes, shards)
    draft.drop_every("Other keys say how many workers there are.", "ray", "ray_workers", "shard_workers")


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
        draft.note("workers not counted", program=draft.program.name)


def _workers(draft: Draft) -> None:
    total = draft.first("launch.workers", whole)
    each = draft.first("processes_per_node", _processes)
    devices, tasks = draft.first("devices", _devices), draft.first("slurm_tasks", flag)
    nodes, hosts = next((pick.value for pick in draft.every("nodes", whole)), 1), draft.first("hosts", str)
    launcher = draft.files.launchers[0] if draft.files.launchers else ""
    named = [str(setting.value) for setting in draft.settings("accelerate_config")]
    if total is not None and total.value > 0:
        draft.put("launch.workers", total.value, total)
    elif draft.is_open("launch.workers"):
        pass
    elif each is not None and each.value and hosts is not None and not draft.has("nodes"):
        _as_said(draft, f"{each.value} on each machine of {hosts.shown}", each, hosts)
    elif each is not None and each.value:
        draft.put("launch.workers", each.value * nodes, each)
    elif devices is not None and devices.value and launcher == "python":
        note = "One process then drove them all, each with rows of its own (DataParallel)."
        draft.put("launch.workers", devices.value, devices, note=note if devices.value > 1 else "")
    elif devices is not None and devices.value and launcher != "torchrun":
        draft.put("launch.workers", devices.value * nodes, devices)
    elif own := next((name for name in named if name in _SHARDING["trl"]), ""):
        num_processes = _SHARDING["trl"][own]["processes"]
        draft.imply("launch.workers", num_processes, f"TRL's {own}.yaml is for {num_processes}")
    elif launcher == "torchrun" and each is None:
        draft.imply("launch.workers", nodes, "torchrun starts one process a node by default")
    elif tasks is not None:
        _as_said(draft, "srun starts as many as the job has tasks", tasks)
    elif launcher == "python" and not draft.has("distributed_type"):
        draft.imply("launch.workers", 1, "python starts one process")
    elif any(pick.value == "NO" for pick in draft.every("distributed_type", _kind)):
        draft.imply("launch.workers", 1, "distributed_type NO is one process")
    for pick in (total, each, devices, tasks):
        if pick is None:
            continue
        if "launch.workers" not in draft.tree:
            sentence = f"the number of workers: {pick.shown} does not say it"
            draft.leave_open("launch.workers", sentence, pick, example="1")
        else:
            draft.drop(pick, f"Other keys say it: {draft.tree['launch.workers']}.")
    draft.drop(hosts, "Which machines is the launcher's affair.")


def _as_said(draft: Draft, why: str, *picks: Pick[Any]) -> None:
    """As many workers as the user says beside the files, which leave that open."""
    if draft.files.workers is None:
        draft.leave_open("launch.workers", f"the number of workers: {why} (say --workers N)", *picks, example="1")
    else:
        draft.put("launch.workers", draft.files.workers, *picks)


def _processes(value: Any) -> int:
    """Processes of a node; 0 for the words by which torchrun counts devices itself."""
    return 0 if str(value).lower() in ("auto", "gpu", "cpu", "xpu") else whole(value)


def _devices(value: Any) -> int:
    """Devices in ``0,1,2``, or in ``host:0,1@other:0,1`` of the deepspeed launcher; 0 for all."""
    hosts = str(value).split("@")
    listed = [host.rpartition(":")[2] for host in hosts]
    some_are_whole = len(hosts) > 1 and any(":" not in host for host in hosts)
    if some_are_whole or {*listed} & {"", "all", "True"}:
        return 0
    return len([part for devices in listed for part in devices.split(",") if part.strip()])


def _kind(value: Any) -> str:
    return "NO" if value in (False, None) else text(value).upper().rpartition(".")[2]


def _sharing(draft: Draft, nodes: int, count: int | None) -> None:
    """ZeRO stage and groups of workers."""
    stage = draft.first("memory.zero", _stage)
    draft.follow("engine")
    switched = [setting for setting in draft.settings("sharding") if setting.name.partition(".")[0] in TRAINER_S_FSDP]
    if any(setting.name == "fsdp" and str(setting.value).lower() == "false" for setting in switched):
        draft.drop(Pick(None, tuple(switched)), "FSDP is off.")
    sharding = draft.first("sharding", _sharding)
    own = draft.first("accelerate_config", text)
    kinds = draft.every("distributed_type", _kind)
    if own is not None and own.value in _SHARDING["trl"] and not _is_imported(draft, own):
        draft.put("memory.zero", _SHARDING["trl"][own.value]["stage"], own)
    elif own is not None:
        _other_file(draft, own)
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
            draft.needs.append(MissingAnswer("parallel.replicate", "the number of nodes, which no file says", "2"))
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
        draft.leave_open("parallel.replicate", f"workers divided by {size.value}", size, example="1")
    draft.drop(size, "Off.")


def _stage(value: Any) -> int:
    return int(value) if isinstance(value, bool) else whole(value)


def _sharding(value: Any) -> tuple[int, bool, bool] | None:
    """ZeRO stage, whether groups replicate, whether parameters are offloaded; None if FSDP is off."""
    words = [str(part).lower() for part in value] if isinstance(value, list) else str(value).lower().split()
    words = [word.rpartition(".")[2] for word in words]
    if not words or words == ["none"] or words == [""]:
        return None
    strategies = [word for word in words if word in _SHARDING["strategies"]]
    if not strategies and "auto_wrap" not in words and "offload" not in words:
        raise ValueError("is no sharding strategy")
    strategy = strategies[0] if strategies else "full_shard"
    return _SHARDING["strategies"][strategy], strategy in _SHARDING["hybrid"], "offload" in words


def _distributed(draft: Draft, kind: Pick[str]) -> None:
    zero = draft.tree.get("memory.zero")
    match kind.value:
        case "NO":
            draft.drop(kind, "One process.")
        case "MULTI_GPU" | "MULTI_CPU" if zero:
            draft.drop(kind, "Other keys say what workers share.")
        case "MULTI_GPU" | "MULTI_CPU":
            draft.put("memory.zero", 0, kind)
        case "FSDP" | "DEEPSPEED" if zero is not None:
            draft.put("memory.zero", zero, kind)
        case "FSDP":
            draft.put("memory.zero", 3, kind, note="FULL_SHARD by default.")
        case "DEEPSPEED" if draft.has("deepspeed_file"):
            sentence = "the ZeRO stage, which DeepSpeed's own file says"
            draft.leave_open("memory.zero", sentence, kind, example="3")
        case "DEEPSPEED":
            draft.put("memory.zero", 2, kind, note="Stage 2 by default in Accelerate.")
        case _:
            draft.refuse(kind, f"DDP, FSDP or DeepSpeed, not {kind.value}.")
