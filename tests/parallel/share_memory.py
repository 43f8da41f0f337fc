"""A worker that exchanges through shared memory; it is told what is looked at: ``sums``, ``end`` or ``apart``."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from tonnage.parallel import shared_memory
from tonnage.parallel.shared_memory import SLOT_BYTES, share_memory
from tonnage.parallel.world import World, join_world


def main(told: list[str]) -> None:
    with join_world() as world:
        {"sums": sums, "end": end, "apart": apart}[told[0]](world)


def sums(world: World) -> None:
    shared = share_memory(world.mesh["shard"].get_group())
    assert shared is not None
    torch.manual_seed(world.rank)
    pieces = SLOT_BYTES // 4
    for length in (1, 7, pieces - 1, pieces, 3 * pieces + 5):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randint(-8, 8, (length * world.size,)).to(dtype)  # sums are exact, in whatever order
            ours, theirs = values.clone(), values.clone()
            shared.all_reduce(ours)
            dist.all_reduce(theirs)
            assert torch.equal(ours, theirs), ("all_reduce", length, dtype)
            part = torch.empty(length, dtype=dtype)
            shared.reduce_scatter(part, values)
            assert torch.equal(part, theirs.view(world.size, -1)[world.rank]), ("reduce_scatter", length, dtype)
            gathered = torch.empty(length * world.size, dtype=dtype)
            own = gathered.view(world.size, -1)[world.rank].copy_(part)
            shared.all_gather(gathered, own)
            assert torch.equal(gathered, theirs), ("all_gather", length, dtype)
    noise = torch.randn(100_003)
    shared.all_reduce(noise)
    bits = noise.view(torch.int32)
    of_all = [torch.empty_like(bits) for _ in range(world.size)]
    dist.all_gather(of_all, bits)
    assert all(torch.equal(others, bits) for others in of_all)


def end(world: World) -> None:
    shared = share_memory(world.mesh["shard"].get_group())
    assert shared is not None
    values = torch.ones(1000)
    shared.all_reduce(values)
    if world.rank == 1:
        return  # its memory and pipes go
    try:
        for _ in range(10):
            shared.all_reduce(values)
    except RuntimeError as error:
        print(json.dumps(str(error)))


def apart(world: World) -> None:
    shared_memory.machine_within = lambda namespace: f"{namespace} of {world.rank}"  # type: ignore[attr-defined]
    assert share_memory(world.mesh["shard"].get_group()) is None
    before = num_open()
    assert share_memory(world.mesh["shard"].get_group()) is None
    assert num_open() == before


def num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
