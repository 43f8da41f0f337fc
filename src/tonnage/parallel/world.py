"""The ranks of a run and what they agree on: joining, the device mesh, and small sums.

A worker is told who it is by the environment variables that every launcher of the field sets (``RANK``,
``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``). A world of one joins itself in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

TEXT_BYTES = 4096


@dataclass(frozen=True)
class World:
    """This rank among all."""

    rank: int
    size: int
    device: torch.device
    backend: str
    mesh: DeviceMesh
    """Axes ``("replicate", "shard")``: states are sharded along the second, and held again along the first."""

    @property
    def replicas(self) -> int:
        """How many ranks hold the same part of the states."""
        return self.mesh["replicate"].size()

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sums of plain numbers over all ranks, in fp64; the same on every rank."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return tuple(totals.tolist())

    def gather(self, text: str) -> list[str]:
        """A short text of every rank (cut at ``TEXT_BYTES``), in the order of ranks; the same list on every rank."""
        sent = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        encoded = text.encode()[:TEXT_BYTES]
        sent[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[: len(encoded)]
        found = [torch.empty_like(sent, device=self.device) for _ in range(self.size)]
        dist.all_gather(found, sent.to(self.device))
        return [bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in found]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.sum(0.0)


@contextmanager
def join_world(replicate: int = 1, timeout_seconds: float = 600.0, store: Store | None = None) -> Iterator[World]:
    """Join the ranks that the environment names; leave them at the end.

    ``replicate`` groups of neighbouring ranks each hold all states once. ``store`` is one that the ranks share already,
    where they have met before; otherwise they meet at ``MASTER_ADDR``.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0" if size == 1 else "29500")
    if torch.cuda.is_available():
        # A launcher that shows every process a device of its own leaves it no other number than 0.
        local_rank = int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.device_count() > 1 else 0
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
        store=None if store is None else PrefixStore("world", store),
    )
    try:
        yield World(rank, size, device, backend, device_mesh(device, size, replicate))
    finally:
        dist.destroy_process_group()


def device_mesh(device: torch.device, size: int, replicate: int) -> DeviceMesh:
    """``size`` ranks as ``replicate`` groups of neighbours."""
    return init_device_mesh(device.type, (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))
