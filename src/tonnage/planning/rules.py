"""What does not go together on a machine, with a model or its data; and where what rests somewhere is updated.

To the rules of ``config.rules`` come those that know the machine. Both are asked twice: by ``check``, which refuses a
config in the words of the first rule that it breaks, and by the search (``planning.axes``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Literal

from tonnage.config import Config
from tonnage.config.rules import TIER_KEYS, WITHIN, Rule, Setting, broken
from tonnage.errors import Problem, user_error
from tonnage.host.moments import BLOCK
from tonnage.planning.catalogue import DEVICES
from tonnage.planning.context import divides
from tonnage.planning.machine import Machine
from tonnage.planning.plan import DataProfile
from tonnage.planning.profile import ModelProfile

SHARDS_PACKED = (2, 13)
"""The oldest torch of which it was shown that FSDP2 leaves weights of whole numbers as they are."""


def shards_packed() -> bool:
    """Whether the installed torch shards weights of whole numbers. That of 2.11 casts them as it gathers them."""
    number = re.match(r"(\d+)\.(\d+)", version_of_torch())
    return number is None or (int(number[1]), int(number[2])) >= SHARDS_PACKED


@cache
def version_of_torch() -> str:
    """As it is installed."""
    return version("torch")


def _keys(keys: list[str]) -> tuple[str, ...]:
    return tuple(f"memory.{key}" for key in keys)


def _on_device(at: Setting) -> list[str]:
    """What rests on a GPU beside which its host would update what is on disk; nothing where nobody updates that."""
    if at.device == "cpu" or not at.on_disk or (not at.trains_all and at.on_disk == ["parameter_tier"]):
        return []
    return [key for key in ("optimizer_tier", "gradient_tier") if getattr(at, key) == "device"]


def _away(at: Setting) -> list[str]:
    """The keys of what is not on the devices of several GPUs."""
    on_host = ["parameter_tier"] if at.parameter_tier == "host" else []
    return list(dict.fromkeys([*on_host, *at.on_disk]))


def _resting(at: Setting) -> list[str]:
    """The keys of what a GPU's host updates where it rests."""
    on_host = ["parameter_tier"] if at.trains_all and at.parameter_tier == "host" else []
    return list(dict.fromkeys([*on_host, *at.on_disk]))


def _divided_packed(at: Setting) -> list[str]:
    """What would share a packed base among workers."""
    if at.adapter in ("none", "auto", "unpacked") or at.groups == 1:
        return []
    asked = {"zero": (3,), "parameter_tier": ("host", "disk")}
    return [key for key, values in asked.items() if getattr(at, key) in values]


def _is_brought(at: Setting) -> bool:
    """Whether weights are gathered from several workers, or come from elsewhere to one."""
    return at.groups > at.replicate or (at.parameter_tier != "device" and (at.device == "cpu" or at.groups == 1))


def _elsewhere(at: Setting) -> str:
    tier = "disk" if at.device == "cpu" else "host"
    only = at.groups == 1 or at.device == "cpu"
    return f"memory.parameter_tier={tier}, or memory.tiles=1" if only else "memory.tiles=1"


OF_MACHINE: tuple[Rule, ...] = (
    Rule(
        lambda at: ("optimizer.kind", *_keys([*at.on_disk, *(["parameter_tier"] if not at.on_disk else [])])),
        lambda at: at.optimizer == "muon" and at.device != "cpu" and update_tier(at) == "host",
        "muon, and parameters that the host of {at.machine} updates, where they rest or their state does",
        "matrices that the device updates: the products of an orthogonal update take a processor too long",
        lambda at: (
            " ".join(f"memory.{key}={'device' if key == 'parameter_tier' else 'host'}" for key in _resting(at))
            + ", or optimizer.kind=adamw"
        ),
    ),
    Rule(
        lambda at: _keys(at.on_disk),
        lambda at: at.device != "cpu" and at.parameter_tier == "disk" and at.compile == "on",
        "disk, on {at.machine}",
        "compile off: a compiled block expects its parameters where they were",
        "compile=off",
    ),
    Rule(
        lambda at: _keys(at.on_disk),
        lambda at: bool(_on_device(at)),
        "disk, on {at.machine}",
        lambda at: f"memory.{_on_device(at)[0]} of host or disk too: the host updates what rests on disk",
        lambda at: f"memory.{_on_device(at)[0]}=host",
    ),
    Rule(
        lambda at: ("memory.tiles", *_keys(_away(at))),
        lambda at: at.tiled and at.device != "cpu" and at.groups > 1 and bool(_away(at)),
        "{at.tiles} tiles, and host or disk, on {at.machine} of which there are several",
        "tiles that the GPUs gather and update: beside several what rests elsewhere is updated by hosts",
        lambda at: f"memory.tiles=1, or {' '.join(f'memory.{key}=auto' for key in _away(at))}",
    ),
    Rule(
        ("memory.tiles", "memory.parameter_tier"),
        lambda at: at.tiled and at.device == "cpu" and at.parameter_tier == "host",
        "{at.tiles} tiles, and host, on {at.machine}, where that is the same memory",
        "weights that are gathered from several workers or, on a CPU, come from disk",
        "memory.parameter_tier=disk, or memory.tiles=1",
    ),
    Rule(
        lambda at: ("memory.tiles", *(["memory.parameter_tier"] if at.parameter_tier == "device" else [])),
        lambda at: at.tiled and not _is_brought(at),
        "{at.tiles} tiles of weights that every worker ({at.machine}) has in memory",
        lambda at: (
            "weights that are gathered from several workers or come from "
            + ("disk, on a CPU" if at.device == "cpu" else "the host's memory or disk, beside one GPU")
        ),
        _elsewhere,
    ),
    Rule(
        lambda at: _keys(_divided_packed(at)),
        lambda at: bool(_divided_packed(at)) and not shards_packed(),
        lambda at: (
            f"a base that is packed ({at.adapter}) and shared by workers, with torch "
            f"{version_of_torch()}, which casts it"
        ),
        f"torch {'.'.join(map(str, SHARDS_PACKED))} or newer",
        "memory.zero=2 memory.parameter_tier=device, or another torch",
    ),
)
SEARCHED = tuple(rule for rule in (*WITHIN, *OF_MACHINE) if rule.searched)
"""Those that keep the search of what memory holds to what can be."""


def setting_of(config: Config, machine: Machine) -> Setting:
    """What a config says on a machine."""
    return Setting.of(config, machine.kind, machine.name)


def check(config: Config, model: ModelProfile, data: DataProfile, machine: Machine, *, force: bool = False) -> None:
    """Refuse what cannot be on this machine, with this model and data.

    Raises:
        UserError: in the words of the first rule that is broken. With ``force`` devices need not have the precision.
    """
    _check_workers(config, data)
    _check_stages(config, model)
    _check_recomputed(config, model)
    _check_row_tiles(config, model, data)
    for said in broken(OF_MACHINE, setting_of(config, machine)):
        raise user_error(said.found, said.needed, said.change, " ".join(said.keys))
    if not force:
        check_precision(config, machine)


def check_precision(config: Config, machine: Machine) -> None:
    """Refuse bf16 on devices that have none. Raises ``UserError``."""
    if config.precision != "bf16" or machine.has_bf16:
        return
    bf16, fp16 = (machine.flops[name] / 1e12 for name in ("bf16", "fp16"))
    raise user_error(
        where="precision",
        found=f"bf16 on {machine.name}, whose matrix units do not have it: {bf16:.3g} TFLOP/s, {fp16:.3g} in fp16",
        needed="a precision that the devices have",
        change="precision=fp16, or precision=fp32; --force starts all the same",
    )


def check_fp8(config: Config, machine: Machine) -> None:
    """Refuse fp8 on devices that are known to have none; of others a worker asks. Raises ``UserError``."""
    listed = any(device.name == machine.name for device in DEVICES)
    if config.precision != "fp8" or machine.fp8_flops is not None or (machine.kind != "cpu" and not listed):
        return
    raise user_error(
        where="precision",
        found=f"fp8 on {'a CPU' if machine.kind == 'cpu' else machine.name}, whose matrix units do not have it",
        needed="a card of NVIDIA's of compute capability 8.9 or newer (Ada, Hopper, Blackwell)",
        change="precision=bf16; for a test, precision=fp8-emulated has the same numbers by slower products in fp32",
    )


def _check_workers(config: Config, data: DataProfile) -> None:
    workers, together = config.pack_groups, config.parallel.together
    if data.num_packs < workers and not config.parallel.is_open:
        groups = "workers" if together == 1 else f"groups of {together} workers"
        raise user_error(
            where="launch.workers",
            found=f"{workers} {groups}, {data.num_packs} packs of training data",
            needed=f"at least one pack for each {'worker' if together == 1 else 'group'}",
            change=f"launch.workers={data.num_packs * together}, or a smaller data.max_length",
        )


def _check_stages(config: Config, model: ModelProfile) -> None:
    pipeline = config.parallel.pipeline
    if not isinstance(pipeline, int) or pipeline == 1:
        return
    num_stages = pipeline * config.stages_per_worker
    if num_stages > model.num_blocks:
        most = model.num_blocks // config.stages_per_worker
        raise user_error(
            where="parallel.pipeline",
            found=f"{num_stages} stages, {model.num_blocks} blocks in the model",
            needed="at least one block for each stage",
            change=f"parallel.pipeline={most}" if most else "parallel.schedule=1f1b",
        )


def _check_recomputed(config: Config, model: ModelProfile) -> None:
    num_recomputed = config.memory.recompute_blocks
    if num_recomputed != "auto" and num_recomputed > model.num_blocks:
        raise user_error(
            where="memory.recompute_blocks",
            found=f"{num_recomputed} blocks to recompute, {model.num_blocks} blocks in the model",
            needed=f"{model.num_blocks} blocks at most",
            change="memory.recompute_blocks=auto memory.recompute=full for all of them",
        )


def _check_row_tiles(config: Config, model: ModelProfile, data: DataProfile) -> None:
    number = config.memory.sequence_tiles
    if number == "auto" or number == 1:
        return
    if not model.tokenwise_blocks:
        raise user_error(
            where="memory.sequence_tiles",
            found=f"{number} tiles, and no block of model type {model.model_type} has an MLP that takes hidden "
            "states alone and makes of each token what no other token changes: experts and their routers do not",
            needed="a family whose MLPs are modules of their own, as llama, qwen3, gemma3, mistral or gpt_neox",
            change="memory.sequence_tiles=1",
        )
    if number > data.max_length:
        raise user_error(
            where="memory.sequence_tiles",
            found=f"{number} tiles of packs of {data.max_length} tokens",
            needed="at least one token in each tile",
            change="memory.sequence_tiles=auto",
        )


def check_blocks(config: Config, models: Mapping[int, ModelProfile]) -> None:
    """Refuse 8-bit moments of which workers would cut blocks. Raises ``UserError``."""
    tensor = config.parallel.tensor
    if config.memory.moments != "int8" or tensor == "auto" or models[tensor].keeps_blocks:
        return
    raise user_error(
        where="memory.moments, parallel.tensor",
        found=f"int8, and rows of matrices that {tensor} workers would cut through blocks of numbers that share a "
        "scale",
        needed=f"rows of a multiple of {tensor * BLOCK} numbers in the layers that are divided by inputs",
        change="memory.moments=bf16, or parallel.tensor=1",
    )


def check_slices(config: Config, models: Mapping[int, ModelProfile]) -> None:
    """Refuse workers that cannot divide the heads of attention among themselves, as they must to divide rows. Raises
    ``UserError``."""
    context, tensor = config.parallel.context, config.parallel.tensor
    degrees = list(models) if tensor == "auto" else [tensor]
    if context == "auto" or any(divides(models[degree], context) for degree in degrees):
        return
    heads = [one.queries for degree in degrees for one in models[degree].heads]
    fitting = [size for size in range(1, context) if any(divides(models[degree], size) for degree in degrees)]
    of_each = " for each worker of parallel.tensor" if tensor not in ("auto", 1) else ""
    raise user_error(
        where="parallel.context",
        found=f"{context}, and attention of {' and '.join(map(str, dict.fromkeys(heads)))} heads{of_each}",
        needed="heads that the workers which divide a row can divide evenly: each computes some for all tokens",
        change=f"parallel.context={fitting[-1]}",
    )


def no_layout(config: Config) -> Problem:
    """Keys of ``memory`` that do not go together on this machine."""
    said = {key: tier for key in TIER_KEYS if (tier := getattr(config.memory, key)) != "auto"}
    return Problem(
        where=" ".join(f"memory.{key}" for key in said) or "memory",
        found=" and ".join(f"{key} {tier}" for key, tier in said.items()) or "no way to lay out a step",
        needed="tiers that go together: what rests on a host or on disk beside a GPU is updated there, and all of it "
        "that is trained rests away from the GPU then",
        change=" ".join(f"memory.{key}=auto" for key in said) or "another memory.recompute, or parallel.tensor=1",
    )


def update_tier(at: Setting) -> Literal["device", "host"]:
    """Where parameters are updated: by the host, where they rest there, or state or gradients rest on disk beside a
    GPU. What is frozen comes and goes by itself."""
    if at.trains_all and at.parameter_tier == "host":
        return "host"
    kept = [key for key in at.on_disk if at.trains_all or key != "parameter_tier"]
    return "host" if kept and at.device != "cpu" else "device"
