"""Collectives of ranks on one machine, through memory that all of them read.

gloo sends through sockets even between processes of one machine. That takes three to ten times as long, on cores that
should compute. Here each rank copies a piece of its tensor into a slot of its own, which fits a cache, tells the others
through pipes that it is there, and reads theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tonnage.host.nodes import machine_within

SLOT_BYTES = 2 << 20
"""Of a piece, a multiple of a page."""
SLOTS = 2
"""They take turns: a rank that has left the meeting of one piece may write the next one while others still read."""


class SharedMemory:
    """Collectives of ranks that read memory of one another; ``share_memory`` makes it.

    Every method is a collective: all ranks call it, in the same order, with tensors of the same sizes and types.

    Raises ``RuntimeError``, as gloo does, where a rank has ended.
    """

    def __init__(
        self, rank: int, memories: Sequence[mmap.mmap], outgoing: Sequence[int], incoming: Sequence[int]
    ) -> None:
        """``memories`` of all ranks, and pipes to and from each, this one too."""
        self._rank = rank
        self._memories = [torch.frombuffer(memory, dtype=torch.uint8).view(SLOTS, SLOT_BYTES) for memory in memories]
        self._outgoing, self._incoming, self._turn = outgoing, incoming, 0
        weakref.finalize(self, _close, [*outgoing, *incoming])

    def all_reduce(self, values: Tensor) -> None:
        """Sums over all ranks, in place: added in the order of ranks, and the same bits everywhere. ``values`` is
        contiguous."""
        size = len(self._memories)
        for piece in values.view(-1).split(SLOT_BYTES // values.itemsize):
            slots = self._slots(piece)
            slots[self._rank].copy_(piece)
            self._meet()
            parts = piece.tensor_split(size)
            of_ranks = [slot.tensor_split(size) for slot in slots]
            _sum([parts_of[self._rank] for parts_of in of_ranks], out=parts[self._rank])
            of_ranks[self._rank][self._rank].copy_(parts[self._rank])
            self._meet()
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    part.copy_(of_ranks[rank][rank])

    def reduce_scatter(self, output: Tensor, values: Tensor) -> None:
        """Put this rank's part of the sum of ``values`` over all ranks into ``output``, which has one of as many equal
        parts as there are ranks."""
        size = len(self._memories)
        length = SLOT_BYTES // values.itemsize // size
        of_ranks = values.view(size, -1)
        for part, piece in zip(output.split(length), of_ranks.split(length, dim=1), strict=True):
            slots = [slot.view_as(piece) for slot in self._slots(piece)]
            slots[self._rank].copy_(piece)
            self._meet()
            _sum([slot[self._rank] for slot in slots], out=part)

    def all_gather(self, output: Tensor, values: Tensor) -> None:
        """Put the ``values`` of every rank into ``output``, one after another, where this rank's are already."""
        length = SLOT_BYTES // values.itemsize
        others = output.view(len(self._memories), -1).split(length, dim=1)
        for piece, parts in zip(values.split(length), others, strict=True):
            slots = self._slots(piece)
            slots[self._rank].copy_(piece)
            self._meet()
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    part.copy_(slots[rank])

    def _slots(self, piece: Tensor) -> list[Tensor]:
        """Room for ``piece`` in each rank's memory, one-dimensional."""
        self._turn = (self._turn + 1) % SLOTS
        num_bytes = piece.numel() * piece.itemsize
        return [memory[self._turn, :num_bytes].view(piece.dtype) for memory in self._memories]

    def _meet(self) -> None:
        """Wait until every rank has come as far."""
        with contextlib.suppress(BrokenPipeError):  # of one that has ended, which its own pipe says below
            for pipe in self._outgoing:
                os.write(pipe, b".")
        for pipe in self._incoming:
            if not os.read(pipe, 1):
                raise RuntimeError("Connection closed by peer: another worker has ended")


def share_memory(group: dist.ProcessGroup) -> SharedMemory | None:
    """Let the ranks of a gloo ``group`` read memory of one another; all of them call this.

    None, to all of them, where they are not on one machine that lets them.
    """
    if not hasattr(os, "memfd_create") or dist.get_backend(group) != dist.Backend.GLOO:
        return None
    pipes = [os.pipe() for _ in range(dist.get_world_size(group))]
    machine = int.from_bytes(hashlib.sha256(machine_within("pid").encode()).digest()[:7])  # whose processes we see
    try:
        memory = os.memfd_create("tonnage")
        os.truncate(memory, SLOTS * SLOT_BYTES)
    except OSError:  # a sandbox without such memory: as if it were another machine
        memory, machine = os.open(os.devnull, os.O_RDWR), -os.getpid()
    offered = [memory, *(end for _, end in pipes)]
    own = torch.tensor([machine, os.getpid(), *offered])
    places = [torch.empty_like(own) for _ in pipes]
    dist.all_gather(places, own, group)
    memories: list[mmap.mmap] = []
    outgoing: list[int] = []
    rank = dist.get_rank(group)
    if all(place[0] == own[0] for place in places):
        with contextlib.suppress(OSError):
            for _, process, theirs, *ends in (place.tolist() for place in places):
                memories.append(_mapped(f"/proc/{process}/fd/{theirs}"))
                outgoing.append(os.open(f"/proc/{process}/fd/{ends[rank]}", os.O_WRONLY))
    are_open = torch.tensor(int(len(outgoing) == len(places)))
    dist.all_reduce(are_open, dist.ReduceOp.MIN, group)
    _close(offered)
    shared = SharedMemory(rank, memories, outgoing, [end for end, _ in pipes])
    return shared if are_open else None


def _mapped(path: str) -> mmap.mmap:
    number = os.open(path, os.O_RDWR)
    with contextlib.closing(os.fdopen(number, "r+b", 0)) as file:
        return mmap.mmap(file.fileno(), SLOTS * SLOT_BYTES)


def _sum(parts: Sequence[Tensor], *, out: Tensor) -> None:
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def _close(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)
