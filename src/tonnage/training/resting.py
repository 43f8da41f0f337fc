"""Where the optimizer's state and the gradients of a job rest, and when each parameter must be there again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from tonnage.errors import Problem, UserError
from tonnage.kernels.moments import Codec
from tonnage.model.anatomy import undecayed
from tonnage.offload.pages import Pages
from tonnage.optim import gradients
from tonnage.optim.adamw import AdamW
from tonnage.optim.on_disk import OnDisk
from tonnage.optim.on_host import OnHost
from tonnage.optim.tiers import InMemory, Tier, Trained
from tonnage.parallel.host_masters import HostMasters
from tonnage.parallel.tensor import copies_of
from tonnage.parallel.tiled import TiledWeight
from tonnage.parallel.world import World
from tonnage.planning.layout import Layout
from tonnage.training.loss import LossModel
from tonnage.training.setting import Setting


def check_tiers(layout: Layout, world: World) -> None:
    """Refuse states on disk that this device would update: they do not go there so far."""
    on_disk = [key for key in layout.tiers_on_disk if key != "memory.parameter_tier"]
    if on_disk and world.device.type != "cpu" and layout.update_tier == "device":
        raise UserError(
            Problem(
                where=", ".join(on_disk),
                found=f"disk, with parameters on {world.device.type}",
                needed="parameters that are updated on the CPU, where the disk tier works",
                change=" ".join(f"{key}=device" for key in on_disk),
            )
        )


def optimizer_of(
    setting: Setting,
    parameters: Mapping[str, nn.Parameter],
    stages: Sequence[LossModel],
    *,
    shared: Collection[str] = (),
    pages: Pages | None = None,
    masters: Sequence[HostMasters] = (),
    tiled: Sequence[TiledWeight] = (),
) -> AdamW:
    """The optimizer of ``parameters``, with its state and their gradients where the plan lets them rest.

    ``shared`` are names of those that are in another rank's stage too, ``pages`` what the blocks rest in on disk,
    ``masters`` what rests in the host's memory beside a device, of each of the ``stages`` if of any, ``tiled`` what
    comes in tiles; ``stages`` are the model, or its stages that this rank has.
    """
    layout, settings = setting.layout, setting.config.optimizer
    copies = {name: one for stage in masters for name, one in stage.copies.items()}
    if layout.micro_batches > 1:
        accumulate_in_fp32((dict(parameters) | copies).values())
    divided = copies_of(parameters)
    away = layout.optimizer_tier != "device"
    optimizer = AdamW(
        parameters,
        betas=settings.betas,
        eps=settings.eps,
        decay=settings.weight_decay,
        undecayed=set[str]().union(*(undecayed(stage.model) for stage in stages)),
        moments=layout.moments,
        tier=_tier(setting),
        gradients=_gradients(setting),
        pages=pages,
        turns=turns_of(stages) if away else None,
        copies={name: divided.get(name, 1) * (2 if name in shared else 1) for name in parameters},
        device_copies=copies,
        seed=setting.config.seed,
    )
    if masters:
        turns = accumulate((1 + len(stage.anatomy.blocks) for stage in stages), initial=0)
        for stage, first in zip(masters, turns, strict=False):
            stage.follow(lambda: optimizer.num_steps, optimizer.wait_for, first)
    if away:
        wait_for_turns(stages, optimizer)
    if layout.gradient_tier != "device" and layout.micro_batches > 1:
        settle_before_loss(stages, optimizer.gradients)
    names = {id(one): name for name, one in parameters.items()}
    for one in tiled:
        optimizer.divide(names[id(one.parameter)], one.part_numel)
        one.begin(optimizer.gradients.add_part)
    return optimizer


def _tier(setting: Setting) -> Callable[[Sequence[Trained], Codec], Tier]:
    """Where the optimizer's state rests."""
    layout, resident = setting.layout, setting.layout.optimizer_resident
    match layout.optimizer_tier:
        case "device":
            return InMemory
        case "host" if layout.update_tier == "host":
            return InMemory
        case "host":
            return partial(OnHost, device=setting.world.device, log=setting.log, resident_bytes=resident)
        case "disk":
            return partial(OnDisk, directories=setting.directories, log=setting.log, resident_bytes=resident)


def _gradients(setting: Setting) -> Callable[[Sequence[Trained]], gradients.Gradients]:
    """Where gradients rest."""
    layout, device = setting.layout, setting.world.device
    on_host = layout.update_tier == "host"
    match layout.gradient_tier:
        case "device":
            return gradients.InMemory
        case "host":
            return partial(gradients.OnHost, device=device, log=setting.log, used_there=on_host)
        case "disk" if on_host:
            return partial(gradients.FromDevice, directories=setting.directories, device=device)
        case "disk":
            return partial(gradients.OnDisk, directories=setting.directories)


def turns_of(stages: Sequence[LossModel]) -> dict[str, int]:
    """In which order forward passes need the parameters: in each stage those outside the blocks, then block after
    block. What several blocks have, the first of them needs."""
    turn_of: dict[int, int] = {}
    blocks_first = sorted(enumerate(_waiting(stages)), key=lambda one: isinstance(one[1], LossModel))
    for turn, module in blocks_first:  # what is left then is outside of them
        for parameter in module.parameters():
            turn_of.setdefault(id(parameter), turn)
    return {name: turn_of[id(one)] for stage in stages for name, one in stage.model.named_parameters()}


def wait_for_turns(stages: Sequence[LossModel], optimizer: AdamW) -> None:
    """Let every block, and before them its stage, wait until its parameters are updated; before they are gathered."""
    for turn, module in enumerate(_waiting(stages)):
        module.register_forward_pre_hook(lambda *_, turn=turn: optimizer.wait_for(turn), prepend=True)


def settle_before_loss(stages: Sequence[LossModel], leaving: gradients.Gradients) -> None:
    """Let the gradients that left last in a micro-batch, of the embedding among them, be gone when the next one is
    through its blocks: the head and its loss take the most memory of all. Blocks that are recomputed wait for none."""
    in_forward = set[int]()

    def end(stage: int) -> None:
        if stage in in_forward:
            in_forward.remove(stage)
            leaving.settle()

    for number, stage in enumerate(stages):
        stage.register_forward_pre_hook(lambda *_, number=number: in_forward.add(number))
        stage.anatomy.blocks[-1].register_forward_hook(lambda *_, number=number: end(number))


def _waiting(stages: Sequence[LossModel]) -> list[nn.Module]:
    """What waits for parameters, in the order of forward passes: a stage, which has all of its own, and its blocks."""
    return [module for stage in stages for module in (stage, *stage.anatomy.blocks)]


def accumulate_in_fp32(parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of several micro-batches add up in fp32 (sharded parameters are fp32 already)."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.grad_dtype = torch.float32
