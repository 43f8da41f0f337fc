"""Which tiers go together on a machine, and where what rests in them is updated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tonnage.config import Config
from tonnage.errors import Problem, UserError
from tonnage.planning.machine import Machine

TIERS = ("optimizer_tier", "gradient_tier", "parameter_tier")
"""Those of them that may say ``disk``."""


def check_tiers(config: Config, machine: Machine) -> None:
    """Refuse what rests on disk beside a GPU, unless its host updates what is trained, or it is frozen. Raises
    ``UserError``."""
    on_disk = [key for key in TIERS if getattr(config.memory, key) == "disk"]
    if not on_disk or machine.kind == "cpu":
        return
    change = " ".join(f"memory.{key}={'device' if key == 'parameter_tier' else 'host'}" for key in on_disk)
    if "parameter_tier" in on_disk and config.compile == "on":
        needed, change = "compile off: a compiled block expects its parameters where they were", "compile=off"
    elif is_frozen(config) and on_disk == ["parameter_tier"]:  # which nobody updates
        return
    elif away := [key for key in ("optimizer_tier", "gradient_tier") if getattr(config.memory, key) == "device"]:
        needed = f"memory.{away[0]} of host or disk too: the host updates what rests on disk"
        change = f"memory.{away[0]}=host"
    else:
        return
    where = " ".join(f"memory.{key}" for key in on_disk)
    raise UserError(Problem(where=where, found=f"disk, on {machine.name}", needed=needed, change=change))


def check_tiles(config: Config, machine: Machine) -> None:
    """Refuse tiles of what is neither gathered nor brought from elsewhere, or both. Raises ``UserError``."""
    memory, gathers, is_cpu = config.memory, config.data_workers > config.parallel.replicate, machine.kind == "cpu"
    if memory.tiles in ("auto", 1):
        return
    away = [f"memory.{key}" for key in TIERS if getattr(memory, key) == "disk"]
    if memory.parameter_tier == "host":
        away = list(dict.fromkeys(["memory.parameter_tier", *away]))
    if away and not is_cpu and config.data_workers > 1:
        raise UserError(
            Problem(
                where=" ".join(("memory.tiles", *away)),
                found=f"{memory.tiles} tiles, and host or disk, on {machine.name} of which there are several",
                needed="tiles that the GPUs gather and update: beside several what rests elsewhere is updated by hosts",
                change=f"memory.tiles=1, or {' '.join(f'{key}=auto' for key in away)}",
            )
        )
    if is_cpu and memory.parameter_tier == "host":
        raise UserError(
            Problem(
                where="memory.tiles memory.parameter_tier",
                found=f"{memory.tiles} tiles, and host, on {machine.name}, where that is the same memory",
                needed="weights that are gathered from several workers or, on a CPU, come from disk",
                change="memory.parameter_tier=disk, or memory.tiles=1",
            )
        )
    if gathers or (memory.parameter_tier != "device" and (is_cpu or config.data_workers == 1)):
        return
    change = "memory.tiles=1"
    if config.data_workers == 1 or is_cpu:
        change = f"memory.parameter_tier={'disk' if is_cpu else 'host'}, or {change}"
    where = "memory.tiles" + (" memory.parameter_tier" if memory.parameter_tier == "device" else "")
    found = f"{memory.tiles} tiles of weights that every worker ({machine.name}) has in memory"
    needed = "weights that are gathered from several workers or come from " + (
        "disk, on a CPU" if is_cpu else "the host's memory or disk, beside one GPU"
    )
    raise UserError(Problem(where=where, found=found, needed=needed, change=change))


def may_be_tiled(config: Config, machine: Machine, zero: int, parameter_tier: str, update: str) -> bool:
    """Whether weights are gathered, come from disk on a CPU, or come to one GPU from where its host updates them, so
    that they can do so in tiles."""
    parallel, workers = config.parallel, config.data_workers
    if is_frozen(config) or parallel.tensor != 1 or parallel.pipeline != 1:
        return False
    if update == "host":
        return machine.kind != "cpu" and workers == 1 and parameter_tier != "device"
    return parameter_tier == "disk" or (zero == 3 and workers > parallel.replicate)


def may_be_alone(config: Config) -> bool:
    """Whether a run of several workers may do with one, by that word alone: on this machine, where they only shard."""
    parallel, launch = config.parallel, config.launch
    return launch.launcher == "local" and launch.num_workers > 1 and parallel.together == parallel.replicate == 1


def no_layout(config: Config) -> Problem:
    """Keys of ``memory`` that do not go together on this machine."""
    said = {key: tier for key in TIERS if (tier := getattr(config.memory, key)) != "auto"}
    return Problem(
        where=" ".join(f"memory.{key}" for key in said) or "memory",
        found=" and ".join(f"{key} {tier}" for key, tier in said.items()) or "no way to lay out a step",
        needed="tiers that go together: what rests on a host or on disk beside a GPU is updated there, and all of it "
        "that is trained rests away from the GPU then",
        change=" ".join(f"memory.{key}=auto" for key in said) or "another memory.recompute, or parallel.tensor=1",
    )


def is_frozen(config: Config) -> bool:
    """Whether a part of the model's own parameters is not trained."""
    return config.adapter not in ("none", "auto") or bool(config.train)


def update_tier(config: Config, machine: Machine, tiers: Mapping[str, str]) -> Literal["device", "host"] | None:
    """Where parameters are updated whose states rest in ``tiers``: by the host, where they rest there, or state or
    gradients rest on disk beside a GPU. None where that cannot be."""
    states, parameters = (tiers["optimizer_tier"], tiers["gradient_tier"]), tiers["parameter_tier"]
    moves = [] if is_frozen(config) else [parameters]  # what is frozen comes and goes by itself
    if "host" not in moves and (machine.kind == "cpu" or "disk" not in (*states, *moves)):
        return "device"
    return None if "device" in states else "host"


def open_tiers(config: Config, machine: Machine) -> tuple[list[str], list[str]]:
    """Where state and gradients, and where parameters may rest, if the config leaves it to the planner."""
    on_host = config.memory.parameter_tier == "host" and not is_frozen(config)  # where they are updated, on any machine
    disk = ["disk"] if config.memory.budget.disk != 0 else []
    if machine.kind == "cpu" and not on_host:
        return ["device", *disk], ["device", *disk]
    parameters = ["host", *disk] if config.compile != "on" else []
    return ["device", "host", *disk], ["device", *parameters]
