"""A worker without others: weights in tiles that its host updates, on the device ``apart``, with all their waits and
without."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from tonnage.kernels.streams import Stream
from tonnage.kernels.switches import KERNELS, switch_off
from tonnage.optim import gradients
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.parallel import homes, host_masters
from tonnage.parallel.homes import FileHome
from tonnage.parallel.host_blocks import HostBlocks
from tonnage.parallel.host_masters import HostMasters
from tonnage.parallel.tiled import TiledWeight
from tonnage.parallel.world import World
from tonnage.training import tiled_linear

WIDTH, NUM_BLOCKS, TILES = 6, 2, 4
STEPS, MICRO_BATCHES = 2, 2


class Model(nn.Module):
    """Blocks with something large and something small."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.float().square().sum()


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    for number, one in enumerate(parameters.values()):
        one.data.copy_(drawn(number, *one.shape) / 2)
    return parameters


def passes(world: World, folder: Path | None, stream: type[Stream] | None = Stream) -> list[Tensor]:
    """Losses of some steps, an evaluation after each, and the weights then; with all on the device without a
    ``stream``."""
    order.synchronize()
    with torch.device("meta"):
        model = Model()
    blocks = list(model.blocks)
    if stream is None:
        model.to_empty(device=world.device)
        parameters = filled(dict(model.named_parameters()))
        optimizer = ShardedOptimizer(parameters, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
    else:
        tiled = []
        for block in blocks:
            layer = next(one for one in block.modules() if isinstance(one, nn.Linear))
            tiled.append(TiledWeight([(layer, "weight")], TILES, torch.float32, world.mesh["replicate", "shard"]))
            tiled_linear.use_tiles(layer, tiled[-1])
        directories: Sequence[Path] = [] if folder is None else [folder]
        there = HostBlocks(model, blocks, world.device, recomputed=0, trains=True, directories=directories, tiled=tiled)
        masters = HostMasters(model, world.device, there, tiled)
        parameters = filled(masters.parameters)
        with mock.patch.object(host_masters, "Stream", stream):
            masters.begin(model, blocks)
        rest: Any = partial(gradients.GradientsOnHost, device=world.device, used_there=True)
        if folder is not None:
            rest = partial(gradients.FromDevice, device=world.device, directories=directories)
        turns = {name: int(name.split(".")[1]) + 1 for name in parameters}
        optimizer = ShardedOptimizer(
            parameters,
            betas=(0.9, 0.95),
            eps=1e-8,
            decay=0.1,
            gradients=rest,
            pages=there.home.pages if isinstance(there.home, FileHome) else None,
            turns=turns,
            device_copies=masters.copies,
        )
        masters.follow(lambda: optimizer.num_steps, optimizer.wait_for)
        for turn, module in enumerate((model, *blocks)):
            module.register_forward_pre_hook(lambda *_, turn=turn: optimizer.wait_for(turn), prepend=True)
        names = {id(one): name for name, one in parameters.items()}
        for weight in tiled:
            optimizer.divide(names[id(weight.parameter)], weight.part_numel)
            weight.begin(optimizer.gradients.add_part)
    found = []
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            loss = model(drawn(10 * step + number, 3, WIDTH).to(world.device))
            optimizer.finish()
            loss.backward()
            found.append(loss.detach())
        found.append(optimizer.gradients.squared_norm().sqrt())
        optimizer.step(0.05)
        optimizer.gradients.clear()
        with torch.no_grad():
            found.append(model(drawn(10 * step + 9, 3, WIDTH).to(world.device)))
    optimizer.finish()
    order.synchronize()
    return [one.detach().float().cpu().clone() for one in [*found, *parameters.values()]]


def missed(world: World, folder: Path, stream: type[Stream] = Stream) -> str:
    try:
        passes(world, folder, stream)
    except order.Race as race:
        return str(race)
    return ""


def main(told: list[str]) -> None:
    """Print what was found: which ways have the numbers of whole weights, and which waits are missed."""
    found: dict[str, Any] = {}
    switch_off(KERNELS)
    folder = Path(told[0])
    with apart_runs.joined() as world, watched():
        taken = locked.host_memory
        locked.host_memory = lambda num_bytes: apart.locked(taken(num_bytes))
        whole = passes(world, None, None)
        for late in (False, True):
            apart.streams_run_late = late
            on_host, on_disk = passes(world, None), passes(world, folder)
            found[f"same bits {late}"] = all(one.equal(other) for one, other in zip(on_host, on_disk, strict=True))
            for one, other in zip(on_host, whole, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        apart.streams_run_late = False
        found |= {stream.__name__: missed(world, folder, stream) for stream in (WithoutFollowing, WithoutJoining)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(homes.Staging, "sent", lambda staging, mark: None)
            found["left"] = missed(world, folder)
    print(json.dumps(found))
