"""A worker that trains with blocks gathered ahead, and without, and prints in which order they were gathered and run,
and whether all bits are alike."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tiny import mixture_config
from tonnage.kernels.regions import region_of
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly, on_meta
from tonnage.model.kept import kept_in_fp32
from tonnage.parallel.parallelize import Precision, Transforms, before_micro_batch, parallelize
from tonnage.parallel.units import UnitInFp32
from tonnage.parallel.world import World, join_world
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel


class Noting:
    """How FSDP2 gathers by itself, but for a note."""

    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.note()
        return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def named(root: LossModel, blocks: list[nn.Module]) -> dict[str, nn.Module]:
    """All units, by the names under which they are noted."""
    found: dict[str, nn.Module] = {"rest": root, **{str(number): block for number, block in enumerate(blocks)}}
    for one in root.modules():
        if isinstance(one, UnitInFp32):
            (number,) = (number for number, block in enumerate(blocks) if one.owners[0] in {*block.modules()})
            found[f"{number} in fp32"] = one
    return found


def trained(world: World, zero: int, ahead: int, few_learn: bool) -> tuple[list[Tensor], list[str]]:
    """Losses and gradients of two steps, and what was gathered and run in the last micro-batch."""
    config = mixture_config("ernie4_5_moe", num_hidden_layers=6)
    precision = Precision(torch.bfloat16, torch.float32)
    model = build_on_meta(config, precision.storage)
    in_fp32 = kept_in_fp32(model, on_meta(config, precision.compute))
    anatomy = dissect(model)
    blocks = list(anatomy.blocks)
    root = LossModel(model, anatomy)
    if few_learn:
        for one in model.parameters():
            one.requires_grad_(one in {*blocks[-2].parameters()})
    transforms = Transforms(zero=zero, in_fp32=in_fp32, blocks_ahead=ahead)
    parallelize(root, blocks, world.mesh, precision, transforms)
    allocate(model, world.device)
    initialise_randomly(model, 0)
    order = list[str]()
    for name, unit in named(root, blocks).items():
        assert isinstance(unit, FSDPModule)
        unit.set_custom_all_gather(cast(Any, Noting(partial(order.append, f"gather {name}"))))
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: order.append(f"forward {number}"))

        def after(_: Any, __: Any, output: Tensor, number: int = number) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: order.append(f"backward {number}"))

        block.register_forward_hook(after)
    ids = torch.arange(20).unsqueeze(0) + world.rank
    batch = MicroBatch(ids, (20,), torch.arange(19), ids[0, 1:], torch.ones(19))
    found = list[Tensor]()
    for step in range(2):
        for number in range(2):
            order.clear()
            before_micro_batch(root, zero=zero, last=number == 1)
            loss = root(batch, 19.0)
            loss.backward()
            found.append(loss.detach().clone())
        for one in model.parameters():
            if one.grad is not None:
                found.append(region_of(one.grad)[0].clone())
                with torch.no_grad():
                    one.sub_(one.grad, alpha=0.1 * (step + 1))
                one.grad = None
    return found, list(order)


def main(told: list[str]) -> None:
    with join_world() as world:
        found = dict[str, Any]()
        for zero, few_learn in ((3, False), (2, False), (3, True)):
            ours, order = trained(world, zero, 2, few_learn)
            theirs, default = trained(world, zero, 1, few_learn)
            same = len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
            name = f"ZeRO {zero}" + ", some learn" * few_learn
            found[name] = {"same": same, "order": order, "default": default}
        if world.rank == 0:
            print(json.dumps(found))
