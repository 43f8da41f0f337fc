"""Where the optimizer's state and the gradients of a job rest, and when each parameter must be there again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from tonnage.config.schema import Optimizer
from tonnage.errors import user_error
from tonnage.kernels.moments import Codec
from tonnage.kernels.muon import Muon
from tonnage.model.anatomy import undecayed
from tonnage.optim import gradients
from tonnage.optim.on_disk import StateOnDisk
from tonnage.optim.on_host import StateOnHost
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.tiers import Group, StateInMemory, StateTier, TrainedParameter
from tonnage.parallel.tensor import copies_of
from tonnage.parallel.world import World
from tonnage.planning.layout import Layout
from tonnage.training.building import Stages
from tonnage.training.loss import LossModel
from tonnage.training.setting import WorkerSetting


def check_tiers(layout: Layout, world: World) -> None:
    """Refuse states on disk that this device would update: they do not go there so far."""
    on_disk = [key for key in layout.tiers_on_disk if key != "memory.parameter_tier"]
    if on_disk and world.device.type != "cpu" and layout.update_tier == "device":
        needed = "parameters that are updated on the CPU, where the disk tier works"
        change, where = " ".join(f"{key}=device" for key in on_disk), ", ".join(on_disk)
        raise user_error(f"disk, with parameters on {world.device.type}", needed, change, where)


def optimizer_of(setting: WorkerSetting, stages: Stages) -> ShardedOptimizer:
    """The optimizer of a rank's parameters, with its state and their gradients where the plan lets them rest."""
    layout, settings = setting.layout, setting.config.optimizer
    parameters, loss_models = stages.parameters, stages.loss_models
    copies = {name: copy for masters in stages.masters for name, copy in masters.copies.items()}
    if layout.micro_batches > 1:
        accumulate_in_fp32((dict(parameters) | copies).values())
    divided = copies_of(parameters)
    away = layout.optimizer_tier != "device"
    # Muon's matrices are put together over ranks, which no thread does beside what a forward pass exchanges.
    exchanges = settings.kind == "muon" and (layout.shards > 1 or layout.tensor > 1)
    optimizer = ShardedOptimizer(
        parameters,
        betas=settings.betas,
        eps=settings.eps,
        decay=settings.weight_decay,
        groups=_groups(settings, stages),
        moments=layout.moments,
        tier=_tier(setting),
        gradients=_gradients(setting),
        pages=stages.pages,
        turns=turns_of(loss_models) if away and not exchanges else None,
        copies={name: divided.get(name, 1) * (2 if name in stages.shared else 1) for name in parameters},
        device_copies=copies,
        seed=setting.config.seed,
    )
    turns = accumulate((1 + len(stage.anatomy.blocks) for stage in loss_models), initial=0)
    for masters, first in zip(stages.masters, turns, strict=False):
        masters.follow(lambda: optimizer.num_steps, optimizer.wait_for, first)
    if away:
        wait_for_turns(loss_models, optimizer)
    if layout.gradient_tier != "device" and layout.micro_batches > 1:
        settle_before_loss(loss_models, optimizer.gradients)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for weight in stages.first.tiled:
        optimizer.divide(names[id(weight.parameter)], weight.part_numel)
        weight.begin(optimizer.gradients.add_part)
    return optimizer


def _groups(settings: Optimizer, stages: Stages) -> dict[str, Group]:
    """How each parameter is updated: as its group in the config says, and as it is a matrix or not."""
    vectors = set[str]().union(*(undecayed(stage.model) for stage in stages.loss_models))
    muon = Muon(settings.momentum, settings.adjust_lr) if settings.kind == "muon" else None
    groups = {}
    for name in stages.parameters:
        rule = muon if name in stages.first.matrices else None
        number = stages.first.groups.get(name)
        own = None if number is None else settings.groups[number]
        usual = settings.lr if rule is not None or settings.adamw_lr is None else settings.adamw_lr
        peak = usual if own is None or own.lr is None else own.lr
        decay = settings.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        groups[name] = Group(0.0 if name in vectors else decay, peak / settings.lr, rule)
    return groups


def _tier(setting: WorkerSetting) -> Callable[[Sequence[TrainedParameter], Codec], StateTier]:
    layout, resident = setting.layout, setting.layout.optimizer_resident
    match layout.optimizer_tier:
        case "device":
            return StateInMemory
        case "host" if layout.update_tier == "host":
            return StateInMemory
        case "host":
            return partial(StateOnHost, device=setting.world.device, log=setting.log, resident_bytes=resident)
        case "disk":
            return partial(StateOnDisk, directories=setting.directories, log=setting.log, resident_bytes=resident)


def _gradients(setting: WorkerSetting) -> Callable[[Sequence[TrainedParameter]], gradients.Gradients]:
    layout, device = setting.layout, setting.world.device
    on_host = layout.update_tier == "host"
    match layout.gradient_tier:
        case "device":
            return gradients.GradientsInMemory
        case "host":
            return partial(gradients.GradientsOnHost, device=device, log=setting.log, used_there=on_host)
        case "disk" if on_host:
            return partial(gradients.FromDevice, directories=setting.directories, device=device)
        case "disk":
            return partial(gradients.GradientsOnDisk, directories=setting.directories)


def turns_of(stages: Sequence[LossModel]) -> dict[str, int]:
    """In which order forward passes need the parameters: in each stage those outside the blocks, then block after
    block. What several blocks have, the first of them needs."""
    turn_of: dict[int, int] = {}
    blocks_first = sorted(enumerate(_waiting(stages)), key=lambda pair: isinstance(pair[1], LossModel))
    for turn, module in blocks_first:  # what is left then is outside of them
        for parameter in module.parameters():
            turn_of.setdefault(id(parameter), turn)
    named = (pair for stage in stages for pair in stage.model.named_parameters())
    return {name: turn_of[id(parameter)] for name, parameter in named}


def wait_for_turns(stages: Sequence[LossModel], optimizer: ShardedOptimizer) -> None:
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
