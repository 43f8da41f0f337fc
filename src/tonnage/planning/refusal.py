"""Why a run does not fit, and what would."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version

from tonnage.config import Config
from tonnage.errors import Problem, UserError
from tonnage.planning.machine import Machine
from tonnage.planning.plan import ASSUMED, SAFETY, Budget, Choice
from tonnage.planning.tiers import may_be_alone
from tonnage.planning.words import describe, needed_and_most, size

KEYS = (
    "micro_batch",
    "recompute",
    "activation_tier",
    "zero",
    "optimizer_tier",
    "moments",
    "gradient_tier",
    "parameter_tier",
    "tiles",
)
"""Of ``memory``, which the planner can choose; first those that cost least."""
LIMITS = ("disk", "host")
"""Of ``memory.budget``, which a remedy may lift where the machine has more."""
UNLOCKED = "raise the limit: ulimit -l unlimited, or for a container --ulimit memlock=-1"
"""Where memory must be locked, and may not be."""
SHARDS_PACKED = (2, 13)
"""The oldest torch of which it was shown that FSDP2 leaves weights of whole numbers as they are."""
LAST_RESORT = (
    "a smaller data.max_length, a smaller model, more memory, or more workers on other machines; --force starts all "
    "the same"
)
"""Where nothing that the planner can choose helps."""


def refusal(config: Config, choices: Sequence[Choice], budget: Budget, fits: Callable[[Config], bool]) -> Problem:
    """What the smallest of ``choices`` holds at its worst moment, and the smallest change with which the run would fit.

    ``fits`` says whether anything that another config allows does.
    """
    if on_device := [choice for choice in choices if choice.peak_bytes <= budget.usable]:
        if on_host := [choice for choice in on_device if budget.host_holds(choice)]:
            smallest = min(on_host, key=lambda choice: choice.disk_bytes + choice.packed_bytes)
            return _disk_refusal(config, smallest, budget, fits)
        smallest = min(on_device, key=lambda choice: choice.host_bytes)
        locks = min(on_device, key=lambda choice: choice.locked_bytes)
        if budget.locked is not None and locks.locked_bytes > budget.locked:
            return _lock_refusal(config, locks, budget.locked, fits)
        return _host_refusal(config, smallest, budget, fits)
    smallest = min(choices, key=lambda choice: choice.peak_bytes)
    peak = smallest.peak
    parts = sorted(peak.bytes.items(), key=lambda item: -item[1])
    held = ", ".join(
        f"{name} {size(num_bytes)}" for name, num_bytes in (*parts[:4], ("runtime", smallest.runtime_bytes))
    )
    return Problem(
        where="a worker's memory" if config.launch.num_workers > 1 else "memory",
        found=f"{size(smallest.peak_bytes)} at the {peak.name} ({held}), with {describe(smallest.layout)}: "
        "the least that the config allows",
        needed=f"{size(budget.usable)}: {SAFETY:.0%} of {size(budget.memory)} ({budget.what})",
        change=_remedy(config, fits),
    )


def shards_packed() -> bool:
    """Whether the installed torch shards weights of whole numbers. That of 2.11 casts them as it gathers them."""
    found = re.match(r"(\d+)\.(\d+)", version("torch"))
    return found is None or (int(found[1]), int(found[2])) >= SHARDS_PACKED


def packed_form(config: Config) -> str | None:
    """How a frozen base rests that is packed into 4 or 8 bits; None where none is."""
    adapter = config.adapter
    return None if isinstance(adapter, str) or adapter.quantize == "none" else adapter.quantize


def check_sharding(config: Config) -> None:
    """Refuse to share a packed base among workers where torch cannot. Raises ``UserError``."""
    memory, form = config.memory, packed_form(config)
    if form is None or config.data_workers == 1 or shards_packed():
        return
    asked = {"zero": (3,), "parameter_tier": ("host", "disk")}
    keys = [f"memory.{key}" for key, said in asked.items() if getattr(memory, key) in said]
    if keys:
        raise UserError(
            Problem(
                where=" ".join(keys),
                found=f"a base that is packed ({form}) and shared by workers, with torch "
                f"{version('torch')}, which casts it",
                needed=f"torch {'.'.join(map(str, SHARDS_PACKED))} or newer",
                change="memory.zero=2 memory.parameter_tier=device, or another torch",
            )
        )


def check_precision(config: Config, machine: Machine) -> None:
    """Refuse bf16 on devices that have none. Raises ``UserError``."""
    if config.precision != "bf16" or machine.has_bf16:
        return
    bf16, fp16 = (machine.flops[name] / 1e12 for name in ("bf16", "fp16"))
    raise UserError(
        Problem(
            where="precision",
            found=f"bf16 on {machine.name}, whose matrix units do not have it: {bf16:.3g} TFLOP/s, {fp16:.3g} in fp16",
            needed="a precision that the devices have",
            change="precision=fp16, or precision=fp32; --force starts all the same",
        )
    )


def _host_refusal(config: Config, smallest: Choice, budget: Budget, fits: Callable[[Config], bool]) -> Problem:
    """Devices have room, their host has not."""
    assert budget.host is not None
    return Problem(
        where="a worker's part of the host's memory",
        found=f"{size(smallest.host_bytes)} for what rests there, with {describe(smallest.layout)}: the least that the "
        "config allows",
        needed=f"{size(SAFETY * budget.host)}: {SAFETY:.0%} of {size(budget.host)}"
        + (f" ({budget.host_what})" if budget.host_what else ""),
        change=_remedy(config, fits),
    )


def _lock_refusal(config: Config, smallest: Choice, most: float, fits: Callable[[Config], bool]) -> Problem:
    """The host may have room, and a worker may not lock as much of it as its device needs."""
    remedy = _remedy(config, fits)
    needed, may = needed_and_most(smallest.locked_bytes, most)
    return Problem(
        where="locked memory",
        found=f"{needed} that a worker locks for its device, with {describe(smallest.layout)}: the least that the "
        "config allows",
        needed=f"{may}: what the system lets a process lock (ulimit -l), to which the driver of this GPU keeps",
        change=UNLOCKED if remedy == LAST_RESORT else f"{remedy}; or {UNLOCKED}",
    )


def _disk_refusal(config: Config, smallest: Choice, budget: Budget, fits: Callable[[Config], bool]) -> Problem:
    """Devices and hosts have room, the disks have not."""
    limit = budget.disk_limit(smallest)
    assert limit is not None
    remedy = _remedy(config, fits)
    if limit.what == "free" and remedy == LAST_RESORT:
        remedy = (
            "make room there, or name larger disks in memory.offload_dirs; otherwise a smaller model, more memory, or "
        )
        remedy += "more workers on other machines"
    needed, most = needed_and_most(limit.needed, limit.most)
    if limit.what == ASSUMED and remedy == LAST_RESORT:
        remedy = f"memory.budget.disk={math.ceil(limit.needed)}, if a machine has so much there"
    return Problem(
        where="a machine's disks",
        found=f"{needed} for what rests there, with {describe(smallest.layout)}: the least that the config allows",
        needed=f"{most} ({'free there' if limit.what == 'free' else limit.what})",
        change=remedy,
    )


def _remedy(config: Config, fits: Callable[[Config], bool]) -> str:
    """Words for the command line: one key left to the planner, or all that were not; or one worker, which has no
    buffers for what several send; or a limit that the config sets to a host or its disks, lifted."""
    said = [key for key in KEYS if getattr(config.memory, key) != "auto"]
    for keys in (*([key] for key in said), said):
        memory = config.memory.model_copy(update=dict.fromkeys(keys, "auto"))
        if keys and fits(config.model_copy(update={"memory": memory})):
            return " ".join(f"memory.{key}=auto" for key in keys)
    if may_be_alone(config) and fits(config.model_copy(update={"launch": config.launch.with_workers(1)})):
        return "launch.workers=1"
    limits = [key for key in LIMITS if getattr(config.memory.budget, key) != "auto"]
    for keys in (*([key] for key in limits), limits):
        lifted = config.memory.budget.model_copy(update=dict.fromkeys(keys, "auto"))
        memory = config.memory.model_copy(update={"budget": lifted})
        if keys and fits(config.model_copy(update={"memory": memory})):
            return " ".join(f"memory.budget.{key}=auto" for key in keys)
    return LAST_RESORT
