"""Where it runs and how it fits: workers, what they share, recompute, tiers, compilation."""

from __future__ import annotations

from math import prod
from pathlib import PurePath
from typing import Any

from tonnage.migration.keys import DEEPSPEED
from tonnage.migration.sheet import Need, Pick, Sheet, flag, number, text, whole
from tonnage.migration.training import ranks_with_their_own_data

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


def other_files(sheet: Sheet) -> None:
    """Files that the given ones name: each must be given as well."""
    sheet.drop(sheet.first("launcher_word", text), "launch says how workers are started.")
    names = {PurePath(name).name for name in sheet.files.names}
    for quantity in OTHER_FILES:
        for pick in sheet.every(quantity, text):
            if PurePath(pick.value).name in names:
                sheet.drop(pick, "Imported beside this one.")
            else:
                sheet.leave_open(Need("", f"{pick.shown} is another file: give it as well"), pick)


def workers(sheet: Sheet) -> int | None:
    """Number of workers. Returns how many of them see different data; None if no file says."""
    nodes, count = _nodes(sheet), _workers(sheet)
    count = _degrees(sheet, count)
    if nodes is not None and nodes.value > 1 and count:
        _machines(sheet, nodes, count)
    elif nodes is not None:
        sheet.drop(nodes, "One machine." if nodes.value == 1 else "launch.workers counts the workers of all.")
    degrees = [sheet.tree[key] for key in ("parallel.tensor", "parallel.pipeline") if key in sheet.tree]
    for pick in sheet.every("ranks_per_replica", whole):
        if pick.value > 1:
            degrees.append(pick.value)
            sheet.refuse(pick)
        else:
            sheet.drop(pick, "Off.")
    sheet.copy("launch.threads", whole)
    sheet.copy("launch.timeout", number)
    _sharing(sheet, nodes.value if nodes else 1, count)
    return ranks_with_their_own_data(count, degrees)


def _machines(sheet: Sheet, nodes: Pick[int], count: int) -> None:
    """Several machines: a job of Slurm, with an equal part of the workers on each, each with a GPU."""
    sheet.put("launch.workers", count, nodes)
    if count % nodes.value:
        need = Need("launch.nodes", f"{count} workers on {nodes.value} machines: an equal part on each", "1")
        sheet.leave_open(need, nodes)
        return
    sheet.put("launch.with", "slurm", nodes, note="Several machines: a job of Slurm; with Ray write launch.with: ray.")
    sheet.put("launch.nodes", nodes.value, nodes)
    sheet.put("launch.gpus_per_node", count // nodes.value, nodes)


def _degrees(sheet: Sheet, count: int | None) -> int | None:
    """Sizes of the axes; and workers, where no launcher says how many, as those make them, as Ray is told, or as was
    said beside the files."""
    sizes: dict[str, int] = {}
    for quantity, key in (("parallel.tensor", "parallel.tensor"), ("parallel.pipeline", "parallel.pipeline")):
        size = sheet.first(quantity, whole)
        if size is not None and size.value > 1:
            sizes[key] = size.value
            sheet.put(key, size.value, size)
        elif size is not None:
            sheet.drop(size, "Off.")
    shards = [pick for pick in sheet.every("shard_workers", whole) if pick.value > 0]
    groups = next((pick.value for pick in sheet.every("parallel.replicate", whole)), 1)
    axes = prod([*sizes.values(), groups, *(pick.value for pick in shards)])
    if count is None and not _of_ray(sheet):
        _from_elsewhere(sheet, axes, shards)
    for quantity in ("ray", "ray_workers", "shard_workers"):
        for pick in sheet.every(quantity, lambda value: value):
            sheet.drop(pick, "Other keys say how many workers there are.")
    found = sheet.tree.get("launch.workers")
    return found if isinstance(found, int) else None


def _of_ray(sheet: Sheet) -> bool:
    """Workers of Ray, if it starts them."""
    is_on, workers = sheet.first("ray", flag), sheet.first("ray_workers", whole)
    if workers is None or (is_on is not None and not is_on.value):
        return False
    sheet.put("launch.with", "ray", is_on, workers)
    sheet.put("launch.workers", workers.value, workers)
    return True


def _from_elsewhere(sheet: Sheet, axes: int, shards: list[Pick[int]]) -> None:
    """Workers where no launcher and no Ray says how many."""
    if sheet.is_open("launch.workers"):
        return
    if sheet.files.workers is not None:
        sheet.imply("launch.workers", sheet.files.workers, "as said with --workers")
    elif axes > 1 and shards:
        sheet.put("launch.workers", axes, *shards)
    elif axes > 1:
        sheet.imply("launch.workers", axes, "as many as the axes need")
    elif not sheet.program.counts_workers:
        sheet.imply("launch.workers", 1, f"{sheet.program.name} takes all GPUs that it finds: say --workers N")
        sheet.notes.append(
            f"The file does not say how many workers there are: {sheet.program.name} takes every GPU that it finds. "
            "One is written; with --workers N the batch and launch.workers are those of N."
        )


def _nodes(sheet: Sheet) -> Pick[int] | None:
    return sheet.first("nodes", whole)


def _workers(sheet: Sheet) -> int | None:
    total = sheet.first("launch.workers", whole)
    each = sheet.first("processes_per_node", _processes)
    devices, tasks = sheet.first("devices", _devices), sheet.first("slurm_tasks", flag)
    nodes = next((pick.value for pick in sheet.every("nodes", whole)), 1)
    launcher = sheet.files.launchers[0] if sheet.files.launchers else ""
    if total is not None and total.value > 0:
        sheet.put("launch.workers", total.value, total)
    elif sheet.is_open("launch.workers"):
        pass
    elif each is not None and each.value:
        sheet.put("launch.workers", each.value * nodes, each)
    elif devices is not None and devices.value and launcher == "python":
        note = (
            "" if devices.value == 1 else "One process then drove them all, each with rows of its own (DataParallel)."
        )
        sheet.put("launch.workers", devices.value, devices, note=note)
    elif devices is not None and devices.value and launcher != "torchrun":
        sheet.put("launch.workers", devices.value * nodes, devices)
    elif own := next((name for name in map(str, sheet.raw("accelerate_config")) if name in TRL_CONFIGS), ""):
        number_of = TRL_PROCESSES.get(own, 8)
        sheet.imply("launch.workers", number_of, f"TRL's {own}.yaml is for {number_of}")
    elif launcher == "torchrun" and each is None:
        sheet.imply("launch.workers", nodes, "torchrun starts one process a node by default")
    elif tasks is not None and sheet.files.workers is None:
        sentence = "the number of workers: srun starts as many as the job has tasks (say --workers N)"
        sheet.leave_open(Need("launch.workers", sentence, "1"), tasks)
    elif tasks is not None:
        sheet.put("launch.workers", sheet.files.workers, tasks)
    elif launcher == "python" and not sheet.has("distributed_type"):
        sheet.imply("launch.workers", 1, "python starts one process")
    elif any(pick.value == "NO" for pick in sheet.every("distributed_type", _kind)):
        sheet.imply("launch.workers", 1, "distributed_type NO is one process")
    for pick in (total, each, devices, tasks):
        if pick is None:
            continue
        if "launch.workers" not in sheet.tree:
            sheet.leave_open(Need("launch.workers", f"the number of workers: {pick.shown} does not say it", "1"), pick)
        else:
            sheet.drop(pick, f"Other keys say it: {sheet.tree['launch.workers']}.")
    found = sheet.tree.get("launch.workers")
    return found if isinstance(found, int) else None


def _processes(value: Any) -> int:
    """Processes of a node; 0 for the words by which torchrun counts devices itself."""
    return 0 if str(value).lower() in ("auto", "gpu", "cpu", "xpu") else whole(value)


def _devices(value: Any) -> int:
    """Devices in ``0,1,2``, or in ``localhost:0,1`` of the deepspeed launcher; 0 for all."""
    listed = str(value).rpartition(":")[2]
    return 0 if listed in ("", "all", "True") else len([part for part in listed.split(",") if part.strip()])


def _kind(value: Any) -> str:
    return "NO" if value in (False, None) else text(value).upper().rpartition(".")[2]


_WHOLE = "Parameters of several workers rest in the host's memory with ZeRO 3 alone."


def _sharing(sheet: Sheet, nodes: int, count: int | None) -> None:
    """ZeRO stage and groups of workers."""
    stage = sheet.first("memory.zero", _stage)
    _engine(sheet)
    sharding = sheet.first("sharding", _sharding)
    own = sheet.first("accelerate_config", text)
    kinds = sheet.every("distributed_type", _kind)
    if own is not None:
        _trl_config(sheet, own)
    if stage is not None:
        sheet.put("memory.zero", stage.value, stage)
        sheet.drop(sharding, f"{stage.shown} counts.")
    elif sharding is not None and sharding.value is None:
        sheet.drop(sharding, "FSDP is off.")
    elif sharding is not None and sharding.value is not None:
        zero, is_hybrid, is_offloaded = sharding.value
        if is_offloaded:
            sheet.put("memory.zero", zero)
            sheet.origins["memory.zero"] = [sharding.givens[0].shown]
            if zero == 3:
                sheet.put("memory.parameter_tier", "host", sharding)
            else:
                sheet.refuse(sharding, f"memory.zero is {zero}: {_WHOLE}")
        else:
            sheet.put("memory.zero", zero, sharding)
        if is_hybrid and nodes > 1:
            picks = [] if is_offloaded else [sharding]
            sheet.put("parallel.replicate", nodes, *picks, note="Shards inside a node, replicates across.")
        elif is_hybrid:
            sheet.needs.append(Need("parallel.replicate", "the number of nodes, which no file says", "2"))
    for kind in kinds:
        _distributed(sheet, kind)
    named_elsewhere = any(sheet.has(name) for name in OTHER_FILES[:3]) or sheet.files.has(DEEPSPEED)
    if stage is None and sheet.files.has(DEEPSPEED) and not sheet.has("memory.zero"):
        sheet.imply("memory.zero", 0, "DeepSpeed shards nothing without zero_optimization")
    if sheet.files.launchers and count and count > 1 and not kinds and not named_elsewhere and own is None:
        sheet.imply("memory.zero", 0, "several processes without FSDP or DeepSpeed hold everything each (DDP)")
    sheet.copy("parallel.replicate", whole)
    size = sheet.first("shard_size", whole)
    if size is not None and size.value > 0 and count and count % size.value == 0:
        sheet.put("parallel.replicate", count // size.value, size)
    elif size is not None and size.value > 0:
        sheet.leave_open(Need("parallel.replicate", f"workers divided by {size.value}", "1"), size)
    elif size is not None:
        sheet.drop(size, "Off.")


def _engine(sheet: Sheet) -> None:
    """What divides the states in LLaMA-Factory 1."""
    engine = sheet.first("engine", text)
    if engine is None:
        return
    if engine.value == "fsdp2":
        sheet.put("memory.zero", 3, engine)
    elif engine.value == "deepspeed":
        sheet.drop(engine, "DeepSpeed's own file says it.")
    else:
        sheet.refuse(engine, f"fsdp2 or deepspeed, not {engine.value}.")


def _stage(value: Any) -> int:
    return int(value) if isinstance(value, bool) else whole(value)


def _sharding(value: Any) -> tuple[int, bool, bool] | None:
    """ZeRO stage, whether groups replicate, whether parameters are offloaded; None if FSDP is off."""
    words = [str(item).lower() for item in value] if isinstance(value, list) else str(value).lower().split()
    words = [word.rpartition(".")[2] for word in words]
    if not words or words == ["none"] or words == [""]:
        return None
    found = [word for word in words if word in STRATEGIES]
    if not found and "auto_wrap" not in words and "offload" not in words:
        raise ValueError("is no sharding strategy")
    strategy = found[0] if found else "full_shard"
    return STRATEGIES[strategy], strategy in HYBRID, "offload" in words


def _distributed(sheet: Sheet, kind: Pick[str]) -> None:
    match kind.value:
        case "NO":
            sheet.drop(kind, "One process.")
        case "MULTI_GPU" | "MULTI_CPU" if sheet.tree.get("memory.zero", 0) != 0:
            sheet.drop(kind, "Other keys say what workers share.")
        case "MULTI_GPU" | "MULTI_CPU":
            sheet.put("memory.zero", 0, kind)
        case "FSDP" if "memory.zero" in sheet.tree:
            sheet.put("memory.zero", sheet.tree["memory.zero"], kind)
        case "FSDP":
            sheet.put("memory.zero", 3, kind, note="FULL_SHARD by default.")
        case "DEEPSPEED" if "memory.zero" in sheet.tree:
            sheet.put("memory.zero", sheet.tree["memory.zero"], kind)
        case "DEEPSPEED" if sheet.has("deepspeed_file"):
            sheet.leave_open(Need("memory.zero", "the ZeRO stage, which DeepSpeed's own file says", "3"), kind)
        case "DEEPSPEED":
            sheet.put("memory.zero", 2, kind, note="Stage 2 by default in Accelerate.")
        case _:
            sheet.refuse(kind, f"DDP, FSDP or DeepSpeed, not {kind.value}.")


def _trl_config(sheet: Sheet, own: Pick[str]) -> None:
    if PurePath(own.value).name in {PurePath(name).name for name in sheet.files.names}:
        sheet.drop(own, "Imported beside this one.")
    elif own.value not in TRL_CONFIGS:
        sheet.leave_open(Need("", f"{own.shown} is another file: give it as well"), own)
    else:
        sheet.put("memory.zero", TRL_CONFIGS[own.value], own)


def memory(sheet: Sheet) -> None:
    """Recompute, tiers and compilation."""
    _recompute(sheet)
    _inputs(sheet)
    _tier(sheet, "memory.optimizer_tier", "memory.optimizer_tier")
    _tier(sheet, "memory.parameter_tier", "memory.parameter_tier")
    _directories(sheet)
    _compile(sheet)


def _recompute(sheet: Sheet) -> None:
    places = sheet.every("checkpointing", _checkpointing)
    for place in places:
        if place.value == "host":
            sheet.put("memory.activation_tier", "host", place)
    picks = [
        *sheet.every("memory.recompute", flag),
        *(Pick(not pick.value, pick.givens) for pick in sheet.every("kept", flag)),
        *(Pick(pick.value != "none", pick.givens) for pick in places),
    ]
    asked = [pick for pick in picks if pick.value]
    if asked:
        sheet.put("memory.recompute", "full", *asked)
        for pick in picks:
            if not pick.value:
                sheet.drop(pick, f"{asked[0].shown} counts.")
    elif picks:
        sheet.put("memory.recompute", "none", *picks)
    elif sheet.default("memory.recompute"):
        sheet.imply_default("memory.recompute")


def _checkpointing(value: Any) -> str:
    """Axolotl's ``gradient_checkpointing``: a flag, or where inputs of blocks go."""
    word = str(value).lower()
    return "host" if word in ("offload", "unsloth", "offload_disk") else "full" if flag(value) else "none"


def _is_elsewhere(value: Any) -> bool:
    return str(value).lower() in ("legacy", "disk", "hidden_states") or flag(value)


def _inputs(sheet: Sheet) -> None:
    _offloaded(sheet)
    asked = sheet.first("memory.activation_tier", _is_elsewhere)
    if asked is None:
        return
    if not asked.value:
        sheet.drop(asked, "Nothing is offloaded.")
    elif sheet.tree.get("memory.recompute") == "none":
        sheet.refuse(asked, "Inputs of blocks go to the host's memory only where all else is recomputed.")
    else:
        sheet.put("memory.activation_tier", "host", asked)
        sheet.imply("memory.recompute", "full", f"{asked.shown}: inputs of blocks go, all else is recomputed")


def _offloaded(sheet: Sheet) -> None:
    """FSDP's offloading of everything, where the optimizer's state is what there is a place for."""
    pick = sheet.first("offload_all", flag)
    if pick is not None and pick.value:
        note = "Parameters rest where the plan says."
        sheet.put("memory.optimizer_tier", "host", pick, note=note)
    elif pick is not None:
        sheet.drop(pick, "Nothing is offloaded.")


def _tier(sheet: Sheet, quantity: str, key: str) -> None:
    device = sheet.first(quantity, _device)
    if device is None:
        return
    match device.value:
        case "nvme":
            sheet.put(key, "disk", device)
        case "cpu" if "optimizer" in key or sheet.tree.get("launch.workers") == 1 or sheet.tree.get("memory.zero") == 3:
            sheet.put(key, "host", device)
        case "cpu":
            sheet.refuse(device, _WHOLE)
        case "none":
            sheet.drop(device, "Nothing is offloaded.")
        case _:
            sheet.refuse(device, f"none, cpu or nvme, not {device.value}.")


def _device(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "cpu" if value else "none"
    return text(value).lower()


def _directories(sheet: Sheet) -> None:
    picks = sheet.every("memory.offload_dirs", lambda value: "" if value in (None, "none") else text(value))
    uses_disk = "disk" in (sheet.tree.get("memory.optimizer_tier"), sheet.tree.get("memory.parameter_tier"))
    named = [pick for pick in picks if pick.value and uses_disk]
    if named:
        sheet.put("memory.offload_dirs", list(dict.fromkeys(pick.value for pick in named)), *named)
    for pick in picks:
        if pick not in named:
            sheet.drop(pick, "Nothing rests on disk.")


def _compile(sheet: Sheet) -> None:
    flags: list[Pick[Any]] = list(sheet.every("compile", flag))
    backends: list[Pick[Any]] = list(sheet.every("compile_backend", _backend))
    asked: list[Pick[Any]] = [pick for pick in flags if pick.value]
    asked += [pick for pick in backends if pick.value not in ("no", "none")]
    if asked:
        sheet.put("compile", "on", *asked)
    for pick in [*flags, *backends]:
        sheet.drop(pick, "Off.")


def _backend(value: Any) -> str:
    return "no" if value in (False, None) else text(value).lower()
