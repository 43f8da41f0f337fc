"""Two workers that share a model on the device ``apart``: their shards in host memory or on disk, with all their waits
and without."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from device import apart, apart_runs
from device import apart_order as order
from device.apart_blocks import WithoutFollowing, WithoutJoining
from device.apart_host import watched
from tonnage.host import locked
from tonnage.kernels.regions import region_of
from tonnage.kernels.streams import Stream
from tonnage.kernels.switches import KERNELS, switch_off
from tonnage.optim import gradients
from tonnage.optim.on_disk import StateOnDisk
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.tiers import StateInMemory
from tonnage.parallel import homes, host_blocks
from tonnage.parallel.homes import FileHome
from tonnage.parallel.host_blocks import HostShards
from tonnage.parallel.host_masters import HostMasters
from tonnage.parallel.parallelize import Precision, Transforms, before_micro_batch, shard_parameters
from tonnage.parallel.world import World

WIDTH, NUM_BLOCKS = 7, 4
"""A width that two workers do not divide evenly."""
STEPS, MICRO_BATCHES = 2, 2


class Passed:
    """Instead of a mark, which one would wait for."""

    def synchronize(self) -> None:
        """A wait too few."""


class Unfinished(Stream):
    def mark(self) -> Any:
        """For somebody who does not wait."""
        return Passed()


class Model(nn.Module):
    """Something outside blocks, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.outside(hidden)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.float().square().sum()


def fill(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, one in parameters.items():
        memory, region = region_of(one)
        whole = torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name))) / 2
        memory.copy_(whole[region])


def passes(
    world: World,
    zero: int,
    rests: str,
    folder: Path | None = None,
    stream: type[Stream] = Stream,
    of_gradients: type[Stream] = Stream,
) -> list[Tensor]:
    """Losses of some steps, an evaluation after each, and all weights of this rank; with all on the device, or with
    what is trained in the host's memory, the blocks' too where they come and go. The streams are those of blocks and of
    gradients that go to disk."""
    order.synchronize()
    with torch.device("meta"):
        model = Model()
    blocks = list(model.blocks)
    shard_parameters(model, blocks, world.mesh, Precision(torch.bfloat16, torch.float32), Transforms(zero=zero))
    directories: Sequence[Path] = [] if folder is None else [folder / f"{rests} {zero} {world.rank}"]
    if rests == "device":
        model.to_empty(device=world.device)
        parameters = dict(model.named_parameters())
        fill(parameters)
        optimizer = adamw(parameters)
    else:
        shards = None
        if rests == "blocks":
            with mock.patch.object(host_blocks, "Stream", stream):
                shards = HostShards(model, blocks, world.device, directories=directories)
        masters = HostMasters(model, world.device, shards)
        if shards is not None:
            shards.rest()
        masters.rest()
        parameters = masters.parameters
        fill(parameters)
        masters.begin(model, blocks)
        where: dict[str, Any] = {"gradients": partial(gradients.GradientsOnHost, device=world.device, used_there=True)}
        if directories:
            disk = partial(gradients.FromDevice, device=world.device, directories=directories)
            where = {"gradients": disk}
            where["tier"] = partial(StateOnDisk, directories=directories)
        turns = {name: int(name.split(".")[1]) + 1 if "blocks" in name else 0 for name in parameters}
        where["pages"] = shards.home.pages if shards is not None and isinstance(shards.home, FileHome) else None
        with mock.patch.object(gradients, "Stream", of_gradients):
            optimizer = adamw(parameters, device_copies=masters.copies, turns=turns, **where)
        masters.follow(lambda: optimizer.num_steps, optimizer.wait_for)
        for turn, module in enumerate((model, *blocks)):
            module.register_forward_pre_hook(lambda *_, turn=turn: optimizer.wait_for(turn), prepend=True)
    found = []
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            before_micro_batch(model, zero=zero, last=number == MICRO_BATCHES - 1)
            loss = model(_drawn(world, step, number))
            optimizer.finish()
            loss.backward()
            found.append(loss.detach())
        optimizer.gradients.squared_norm()
        optimizer.step(0.05)
        optimizer.gradients.clear()
        with torch.no_grad():
            found.append(model(_drawn(world, step, -1)))
    optimizer.finish()
    order.synchronize()
    return [one.cpu() for one in [*found, *(region_of(one)[0] for one in parameters.values())]]


def adamw(
    parameters: Mapping[str, nn.Parameter], tier: Callable[..., Any] = StateInMemory, **named: Any
) -> ShardedOptimizer:
    return ShardedOptimizer(parameters, betas=(0.9, 0.95), eps=1e-8, decay=0.1, tier=tier, **named)


def _drawn(world: World, step: int, number: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * number + world.rank)
    return torch.randn(3, WIDTH, generator=draw).to(world.device, torch.bfloat16)


def main(told: list[str]) -> None:
    """Print what was found: which ways have the bits of what has all on the device, and which waits are missed."""
    found: dict[str, Any] = {}
    switch_off(KERNELS)
    gradients.NORM_ELEMENTS, gradients.SENT_ELEMENTS = 8, 16  # several pieces of a gradient, and more than buffers
    with apart_runs.joined() as world, watched():
        taken = locked.host_memory
        locked.host_memory = lambda num_bytes: apart.locked(taken(num_bytes))
        for zero, rests, folder, late in (
            (3, "blocks", None, False),
            (3, "blocks", None, True),
            (3, "blocks", Path(told[0]), True),
            (1, "outside", Path(told[0]), True),
        ):
            apart.streams_run_late = False
            resident = passes(world, zero, "device")
            apart.streams_run_late = late
            ours = passes(world, zero, rests, folder)
            same = all(one.equal(other) for one, other in zip(ours, resident, strict=True))
            found[f"{zero} {rests} {'disk' if folder else 'host'} {late}"] = same
        apart.streams_run_late = False
        for stream in (WithoutFollowing, WithoutJoining):
            try:
                passes(world, 3, "blocks", stream=stream)
            except order.Race as race:
                found[stream.__name__] = str(race)
        for missing in (WithoutFollowing, Unfinished):
            try:
                passes(world, 3, "blocks", Path(told[0]), of_gradients=missing)
            except order.Race as race:
                found[f"gradients {missing.__name__}"] = str(race)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(homes.Staging, "sent", lambda staging, mark: None)
            try:
                passes(world, 3, "blocks", Path(told[0]))
            except order.Race as race:
                found["sent"] = str(race)
        if world.rank == 0:
            print(json.dumps(found))
