"""A worker without others: frozen blocks in host memory on the device ``apart``, with all their waits and without."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from device import apart
from device import apart_order as order
from tonnage.host import locked
from tonnage.kernels.streams import Stream
from tonnage.parallel import host_blocks
from tonnage.parallel.host_blocks import HostBlocks

WIDTH, NUM_BLOCKS = 8, 4


class Block(nn.Module):
    """A frozen product and a trained one."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.requires_grad_(requires_grad=False)
        self.recomputed = recomputed

    def compute(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.trained(torch.tanh(self.frozen(hidden)))
        return hidden + added

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.recomputed:
            return self.compute(hidden)
        found: Tensor = checkpoint(self.compute, hidden, use_reentrant=False)
        return found


class WithoutFollowing(Stream):
    def follow(self) -> None:
        """A wait too few."""


class WithoutJoining(Stream):
    def join(self, mark: Any) -> None:
        """A wait too few."""


def passes(recomputed: int, stream: type[Stream] | None) -> list[Tensor]:
    """Losses and gradients of some micro-batches and an evaluation, the first blocks ``recomputed``; without a
    ``stream``, with all on the device."""
    order.synchronize()
    torch.manual_seed(0)
    blocks = [Block(number < recomputed) for number in range(NUM_BLOCKS)]
    device = torch.device(apart.NAME)
    if stream is None:
        model = nn.Sequential(*blocks).to(device)
    else:
        with mock.patch.object(host_blocks, "Stream", stream):
            there = HostBlocks(nn.ModuleList(blocks), blocks, device, recomputed=recomputed)
        host = iter(there.parameters)
        model = nn.Sequential(*blocks)
        for block, fresh in zip(blocks, _twins(recomputed), strict=True):
            for name in ("weight", "bias"):
                next(host).data.copy_(getattr(fresh.frozen, name).detach())
            block.trained.to(device)
        there.begin()
    found = []
    for number in range(3):
        hidden = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
        loss = model(hidden).square().sum()
        loss.backward()
        found.append(loss.detach())
    with torch.no_grad():
        found += [model(hidden).sum() for _ in range(2)]
    order.synchronize()
    return [one.cpu() for one in [*found, *(block.trained.weight.grad for block in blocks)] if one is not None]


def _twins(recomputed: int) -> list[Block]:
    torch.manual_seed(0)
    return [Block(number < recomputed) for number in range(NUM_BLOCKS)]


def main(told: list[str]) -> None:
    """Print what was found: how many tensors have the same bits, and which waits are missed."""
    apart.register()
    taken = locked.host_memory
    locked.host_memory = lambda num_bytes: apart.locked(taken(num_bytes))
    found: dict[str, Any] = {}
    for recomputed in (0, 1, NUM_BLOCKS):
        resident = passes(recomputed, None)
        for late in (False, True):
            apart.streams_run_late = late
            ours = passes(recomputed, Stream)
            same = all(one.equal(other) for one, other in zip(ours, resident, strict=True))
            found[f"{recomputed} {late}"] = same
        for stream in (WithoutFollowing, WithoutJoining):
            try:
                passes(recomputed, stream)
            except order.Race as race:
                found[f"{recomputed} {stream.__name__}"] = str(race)
    print(json.dumps(found))
