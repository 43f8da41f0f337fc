"""Why a run does not fit, and what would."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Literal

from tonnage.config import Config
from tonnage.errors import Problem, UserError
from tonnage.planning.machine import Machine
from tonnage.planning.plan import SAFETY, Budget, Choice
from tonnage.planning.words import describe, size

KEYS = (
    "micro_batch",
    "recompute",
    "activation_tier",
    "zero",
    "optimizer_tier",
    "moments",
    "gradient_tier",
    "parameter_tier",
)
"""Of ``memory``, which the planner can choose; first those that cost least."""
TIERS = ("optimizer_tier", "gradient_tier", "parameter_tier")
"""Those of them that may say ``disk``."""
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
        return _host_refusal(config, min(on_device, key=lambda choice: choice.host_bytes), budget, fits)
    smallest = min(choices, key=lambda choice: choice.peak_bytes)
    peak = smallest.peak
    parts = sorted(peak.bytes.items(), key=lambda item: -item[1])
    held = ", ".join(
        f"{name} {size(num_bytes)}" for name, num_bytes in (*parts[:4], ("runtime", smallest.runtime_bytes))
    )
    return Problem(
        where="a worker's memory" if config.launch.workers > 1 else "memory",
        found=f"{size(smallest.peak_bytes)} at the {peak.name} ({held}), with {describe(smallest.layout)}: "
        "the least that the config allows",
        needed=f"{size(budget.usable)}: {SAFETY:.0%} of {size(budget.memory)} ({budget.what})",
        change=_remedy(config, fits),
    )


def check_tiers(config: Config, machine: Machine) -> None:
    """Refuse what rests on disk beside a GPU, unless its host updates all parameters. Raises ``UserError``."""
    on_disk = [key for key in TIERS if getattr(config.memory, key) == "disk"]
    if not on_disk or machine.kind == "cpu":
        return
    change = " ".join(f"memory.{key}={'device' if key == 'parameter_tier' else 'host'}" for key in on_disk)
    if config.launch.workers > 1:
        needed = "one worker: several keep nothing on disk beside GPUs so far"
    elif is_frozen(config):
        needed = "host or device: what an adapter, or a part of a model, keeps on disk is for CPUs so far"
    elif "parameter_tier" in on_disk and config.compile == "on":
        needed, change = "compile off: a compiled block expects its parameters where they were", "compile=off"
    elif away := [key for key in ("optimizer_tier", "gradient_tier") if getattr(config.memory, key) == "device"]:
        needed = f"memory.{away[0]} of host or disk too: the host updates what rests on disk"
        change = f"memory.{away[0]}=host"
    else:
        return
    where = " ".join(f"memory.{key}" for key in on_disk)
    raise UserError(Problem(where=where, found=f"disk, on {machine.name}", needed=needed, change=change))


def no_layout(config: Config) -> Problem:
    """Keys of ``memory`` that do not go together on this machine."""
    said = {key: tier for key in TIERS if (tier := getattr(config.memory, key)) != "auto"}
    return Problem(
        where=" ".join(f"memory.{key}" for key in said) or "memory",
        found=" and ".join(f"{key} {tier}" for key, tier in said.items()) or "no way to lay out a step",
        needed="tiers that go together: what rests on a host or on disk beside a GPU is updated there, by one worker",
        change=" ".join(f"memory.{key}=auto" for key in said) or LAST_RESORT,
    )


def is_frozen(config: Config) -> bool:
    """Whether a part of the model's own parameters is not trained."""
    return config.adapter not in ("none", "auto") or bool(config.train)


def update_tier(config: Config, machine: Machine, tiers: Mapping[str, str]) -> Literal["device", "host"] | None:
    """Where parameters are updated whose states rest in ``tiers``: by the host, where they rest there, or state or
    gradients rest on disk beside a GPU. None where that cannot be."""
    states = (tiers["optimizer_tier"], tiers["gradient_tier"])
    travels = tiers["parameter_tier"] == "host" and not is_frozen(config)
    if not travels and (machine.kind == "cpu" or "disk" not in (*states, tiers["parameter_tier"])):
        return "device"
    alone = config.launch.workers == 1
    return None if not alone or is_frozen(config) or "device" in states else "host"


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
    keys = [f"memory.{key}" for key, said in (("zero", 3), ("parameter_tier", "disk")) if getattr(memory, key) == said]
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
        + ("" if config.memory.budget.host == "auto" else " (memory.budget.host)"),
        change=_remedy(config, fits),
    )


def _remedy(config: Config, fits: Callable[[Config], bool]) -> str:
    """Words for the command line: one key left to the planner, or all that were not."""
    said = [key for key in KEYS if getattr(config.memory, key) != "auto"]
    for keys in (*([key] for key in said), said):
        memory = config.memory.model_copy(update=dict.fromkeys(keys, "auto"))
        if keys and fits(config.model_copy(update={"memory": memory})):
            return " ".join(f"memory.{key}=auto" for key in keys)
    return LAST_RESORT
