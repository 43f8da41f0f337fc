"""How many workers a run has where its config leaves that open (``launch.workers: auto``).

The one rule, for the plan of hardware that is named as for a run that starts: a worker for each GPU, and one for each
machine that has none or is not asked for any. Whoever plans decides it before anything else, by ``decided``; plans and
launchers have the number, and the config of a run keeps ``auto``.
"""

from __future__ import annotations

from tonnage.config import AnyLaunch, Config, LocalLaunch, RayLaunch, SlurmLaunch
from tonnage.config.check import contradictions
from tonnage.errors import Problem, UserError, user_error
from tonnage.planning.machine import Machine, parse_hardware


def decided(config: Config, machine: Machine) -> Config:
    """The config with its number of workers written out, and what each reserves, as it is on a machine, or on a cluster
    of such.

    Raises:
        UserError: what the config says does not go together with so many.
    """
    config = config.model_copy(update={"launch": config.launch.on(machine.kind)})
    if config.launch.workers != "auto":
        return config
    return with_workers(config, workers_on(config.launch, machine))


def with_workers(config: Config, number: int) -> Config:
    """A config that leaves its number of workers open, with this one. Raises ``UserError`` as ``decided``."""
    counted = config.with_keys("launch", {"workers": number})
    where = f"launch.workers (auto: {number})"
    if problems := [Problem(one.found, one.needed, one.change, where) for one in contradictions(counted)]:
        raise UserError(*problems)
    return counted


def decided_for_pods(config: Config) -> Config:
    """As ``decided``, for machines of which nothing is known but what the config says. Raises ``UserError``."""
    launch, hardware = config.launch, config.launch.node_hardware
    if launch.workers == "auto" and isinstance(launch, RayLaunch) and launch.gpus_per_worker == 1 and hardware is None:
        raise user_error(
            found="launch.workers is auto, and launch.hardware does not say how many GPUs a node has",
            needed="a number of workers, or a node's hardware",
            change="launch.hardware=8xH100, for instance",
            where="launch.workers",
        )
    return decided(config, parse_hardware(hardware or "cpu:1c:1GB"))


def workers_on(launch: AnyLaunch, machine: Machine) -> int:
    """As many as there are GPUs for: those that a job of Slurm asks for, those of the nodes of Ray unless its workers
    reserve none, or all that this process may see."""
    match launch:
        case SlurmLaunch(gpus_per_node=asked):
            return launch.nodes * max(1, asked)
        case RayLaunch(gpus_per_worker=asked):
            return launch.nodes * (machine.devices_per_node if asked else 1)
        case LocalLaunch():
            return machine.num_devices
