"""The machine that a plan is made for: another one, a node of a cluster, or this one as it is now."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from tonnage.config import Config, LocalLaunch, RayLaunch, SlurmLaunch
from tonnage.data import Progress
from tonnage.decide.models import check_family
from tonnage.errors import UserError, user_error
from tonnage.planning.machine import Machine, parse_hardware
from tonnage.planning.workers import decided

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Where:
    """What a plan is made for."""

    machine: Machine
    how: str = ""
    """In which way it was measured just now, if it was."""
    here: bool = True
    """Whether what is free on this machine counts, and what it has."""


def counted(config: Config, machine: Machine | None = None) -> Config:
    """The config with its number of workers written out, as it is on the machine that is asked for, on nodes of the
    cluster that the config describes, or here. Nothing is measured.

    Raises ``UserError`` where the config describes no hardware that is known, wants other devices than it has, or says
    what does not go together with as many workers as it has devices.
    """
    from tonnage.doctor.cache import describe_here

    found = machine or _node_of(config) or describe_here(config.output)
    _check_asked(config, found)
    config = decided(config, found)
    _check_devices(config, found, named=machine is not None)
    return config


def where(config: Config, machine: Machine | None, progress: Progress) -> Where:
    """The machine that is asked for, or a node of the cluster that the config describes, or this one: measured if it
    never was, for which nobody waits more than two seconds.

    Raises ``UserError`` where the config describes no hardware that is known.
    """
    from tonnage.doctor.cache import describe_here, load_machine
    from tonnage.doctor.measure import glance

    if machine is not None:
        return Where(machine, here=False)
    if (machine_on_record := _node_of(config) or load_machine(config.output)) is not None:
        return Where(machine_on_record)
    if (glanced := glance(Path(config.output), progress=progress)) is not None:
        return Where(glanced.machine, str(glanced))
    return Where(describe_here(config.output))


def _check_asked(config: Config, machine: Machine) -> None:
    """Refuse a Slurm job that asks for no GPUs on nodes that have some. Raises ``UserError``."""
    launch = config.launch
    if not isinstance(launch, SlurmLaunch) or launch.hardware is None or launch.workers != "auto":
        return
    if machine.kind == "cuda" and not launch.gpus_per_node:
        raise user_error(
            found=f"launch.hardware has {machine.devices_per_node} GPUs a node, of which the job asks for none",
            needed="as many GPUs as it should have on a node",
            change=f"launch.gpus_per_node={machine.devices_per_node}",
            where="launch.gpus_per_node",
        )


def _check_devices(config: Config, machine: Machine, *, named: bool) -> None:
    """Refuse more workers than devices, and workers that reserve GPUs on nodes without, or none on nodes with GPUs.
    Raises ``UserError``."""
    launch = config.launch
    match launch:
        case LocalLaunch():
            key, reserved = "", 0
        case SlurmLaunch():
            key, reserved = "gpus_per_node", launch.gpus_per_node
        case RayLaunch():
            key, reserved = "gpus_per_worker", launch.num_gpus
        case _:
            assert_never(launch)
    nodes = max(launch.num_nodes, machine.nodes)
    per_node, present = math.ceil(launch.num_workers / nodes), machine.devices_per_node
    if machine.kind == "cuda" and per_node > present:
        does_not_divide = present * nodes % config.parallel.together != 0
        sizes = config.parallel.model_dump(include={"tensor", "context", "pipeline"})
        axes = [f"parallel.{axis}=1" for axis, size in sizes.items() if does_not_divide and size not in ("auto", 1)]
        change = " ".join([*axes, f"launch.workers={present * nodes}"])
        if key == "gpus_per_node" and reserved and launch.node_hardware is None and not named:
            change = f"say what a node has, as launch.hardware={per_node}x{machine.name}"
        elif key == "gpus_per_node" and reserved:
            change = f"launch.gpus_per_node={present}"
        elif nodes > 1:
            change += ", or more in launch.nodes"
        raise user_error(
            found=f"{per_node} workers on a machine with {present} GPU{'s' * (present > 1)}",
            needed="a GPU for each worker",
            change=change,
            where="launch.workers",
        )
    if machine.kind == "cuda" and key == "gpus_per_worker" and not reserved:
        raise user_error(
            found=f"launch.gpus_per_worker is 0, and a plan for {machine.name}: Ray hides GPUs from workers that "
            "reserve none",
            needed="a GPU for each worker, or a plan for nodes without",
            change=f"launch.gpus_per_worker=1, or {'--hardware ' if named else 'launch.hardware='}"
            f"cpu:{machine.cores}c:{machine.host_bytes / 1e9:.0f}GB to train on processors",
            where="launch.gpus_per_worker",
        )
    if machine.kind == "cpu" and reserved:
        raise user_error(
            found=f"launch.{key} is {reserved}, and a plan for {machine.name}, which has no GPU",
            needed="a plan for the hardware of a node",
            change=f"say what a node has, as launch.hardware={per_node}xH100",
            where="launch.hardware",
        )


def _node_of(config: Config) -> Machine | None:
    """A node of the cluster, if the config describes one. Raises ``UserError`` for hardware that is not known."""
    return None if (hardware := config.launch.node_hardware) is None else parse_hardware(hardware)


def free_now(config: Config, machine: Machine) -> float | None:
    """Bytes that this machine's workers may use on a CPU, or each on its device; None where nobody knows."""
    from tonnage.doctor.hardware import free_device_memory
    from tonnage.host.control_groups import free_memory

    if machine.kind == "cpu":
        return free_memory()
    return min(free_device_memory()[: config.launch.num_workers], default=None)


def degrees(config: Config, model_config: PreTrainedConfig, machine: Machine) -> list[int]:
    """Sizes of the tensor axis to weigh the model for: whole, and what the config says, or what divides a node."""
    tensor = config.parallel.tensor
    if tensor != "auto":
        return sorted({1, tensor})
    from tonnage.model.tensor_plan import fitting_degrees

    with suppress(UserError):
        check_family(model_config)
        per_node = machine.workers_on_node(config.launch.num_workers)
        return [degree for degree in fitting_degrees(model_config, per_node) if per_node % degree == 0]
    return [1]
