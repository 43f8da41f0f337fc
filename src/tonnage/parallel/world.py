"""The ranks of a run and what they agree on: joining, the device mesh, and small sums.

A worker is told who it is by the environment variables that every launcher of the field sets (``RANK``,
``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``). A world of one joins itself in the same way.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from tonnage.errors import user_error
from tonnage.model.context import Context

AXES = ("pipeline", "replicate", "shard", "tensor")
"""Of the device mesh, those that talk least first, so that those that talk most are neighbours.

Ranks of one ``pipeline`` coordinate hold one stage of the model. Packs are dealt along ``replicate`` and ``shard``:
states are sharded along the second, and held again along the first. Along ``tensor`` ranks compute the same packs with
parts of each matrix. An axis of size one applies nothing.

Ranks that divide rows (``Context``) are neighbours along ``replicate`` and ``shard``, as if they were one axis: they
take the same packs, a slice of each row, and share states as any others do there.
"""


@dataclass(frozen=True)
class World:
    """This rank among all."""

    rank: int
    size: int
    device: torch.device
    backend: str
    mesh: DeviceMesh
    """Its axes are ``AXES``."""
    hosts: dist.ProcessGroup | None = None
    """All ranks, as a group that exchanges numbers without a device; None where the default group does so."""
    context: Context | None = None
    """Those that divide the rows of this one, if any do."""

    @property
    def replicas(self) -> int:
        """How many ranks hold the same part of the states."""
        return self.mesh["replicate"].size()

    @property
    def data_size(self) -> int:
        """How many ranks, or groups of ranks, have tokens of their own: replicate x shard."""
        return self.mesh["replicate"].size() * self.mesh["shard"].size()

    @property
    def data_rank(self) -> int:
        """Which of them this rank belongs to. Ranks that differ in tensor or pipeline alone have the same tokens."""
        return self.mesh.get_local_rank("replicate") * self.mesh["shard"].size() + self.mesh.get_local_rank("shard")

    @property
    def speaks(self) -> bool:
        """Whether this rank reports for those that have the same tokens: it is the first of the last stage, which has
        the loss."""
        is_last = self.mesh.get_local_rank("pipeline") == self.mesh["pipeline"].size() - 1
        return is_last and self.mesh.get_local_rank("tensor") == 0

    def once(self, *values: float) -> tuple[float, ...]:
        """Numbers that belong to tokens, as terms of a ``sum`` that counts them once: 0 on ranks that do not speak."""
        return values if self.speaks else (0.0,) * len(values)

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sums of plain numbers over all ranks, in fp64; the same on every rank. No device is waited for."""
        totals = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(totals, group=self.hosts)
        return tuple(totals.tolist())

    def total(self, values: Tensor) -> Tensor:
        """Sums of ``values``, which are on the device, over all ranks; in place. The host waits for nothing."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, text: str) -> list[str]:
        """A text of every rank, in the order of ranks; the same list on every rank."""
        if self.size == 1:
            return [text]
        encoded = torch.tensor([*text.encode()], dtype=torch.uint8)
        lengths = self._of_all(torch.tensor([encoded.numel()]))
        longest = int(max(lengths))
        received = self._of_all(torch.nn.functional.pad(encoded, (0, longest - encoded.numel())))
        return [bytes(content[:length].tolist()).decode() for content, length in zip(received, lengths, strict=True)]

    def _of_all(self, values: Tensor) -> list[Tensor]:
        received = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(received, values, group=self.hosts)
        return received

    def barrier(self) -> None:
        self.sum(0.0)


@contextmanager
def join_world(
    replicate: int = 1,
    timeout_seconds: float = 600.0,
    store: Store | None = None,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    device_type: Literal["cpu", "cuda"] | None = None,
) -> Iterator[World]:
    """Join the ranks that the environment names; leave them at the end.

    ``device_type`` is what the plan is for; None takes a GPU where there is one. ``replicate``, ``tensor`` and
    ``pipeline`` are sizes of these axes; ``shard`` takes what they leave. ``context`` ranks divide each row.
    ``store`` is one that the ranks share already, where they have met before; otherwise they meet at ``MASTER_ADDR``.

    Raises ``UserError`` where the plan is for GPUs, and this rank has none.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0" if size == 1 else "29500")
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda" or (device_type is None and torch.cuda.is_available()):
        device, backend = _own_gpu(), "nccl"
        _check_built_for(device)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
        store=None if store is None else PrefixStore("world", store),
    )
    apart = backend != "gloo" and size > 1
    try:
        mesh = device_mesh(device, size, replicate, tensor=tensor, pipeline=pipeline)
        hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds)) if apart else None
        ranks = context_of(mesh, context) if context > 1 else None
        yield World(rank, size, device, backend, mesh, hosts, ranks)
    except BaseException:
        if backend == "gloo" or size == 1:  # NCCL would wait for others, which wait in a collective; the process ends
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _own_gpu() -> torch.device:
    """The GPU of this rank. Raises ``UserError`` where there is none."""
    number, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if num_gpus == 1:  # a launcher that shows every process a device of its own leaves it no other number than 0
        number = 0
    if number < num_gpus:
        return torch.device("cuda", number)
    raise user_error(
        found=f"{num_gpus} GPU{'s' * (num_gpus != 1)} on {socket.gethostname()}, the plan is for GPUs, and this is "
        f"worker {number} there, counted from 0",
        needed="a GPU for each worker",
        change="look at nvidia-smi and CUDA_VISIBLE_DEVICES; to plan for what is here: tonnage train --resume RUN",
    )


def _check_built_for(device: torch.device) -> None:
    """Refuse a GPU that is older than all that torch has kernels for. Raises ``UserError``."""
    built = [int(match[1]) for name in torch.cuda.get_arch_list() if (match := re.match(r"sm_(\d+)", name))]
    major, minor = torch.cuda.get_device_capability(device)
    if built and 10 * major + minor < min(built):
        raise user_error(
            found=f"{torch.cuda.get_device_name(device)}, of compute capability {major}.{minor}, and torch "
            f"{torch.__version__}, whose kernels are for {min(built) // 10}.{min(built) % 10} and newer",
            needed="a torch that was built for the GPU",
            change="install a build of torch for an older CUDA, or use another GPU",
        )


def device_mesh(device: torch.device, size: int, replicate: int, *, tensor: int = 1, pipeline: int = 1) -> DeviceMesh:
    """``size`` ranks along ``AXES``; ``shard`` takes what the others leave."""
    shape = (pipeline, replicate, size // (pipeline * replicate * tensor), tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=AXES)


def context_of(mesh: DeviceMesh, context: int) -> Context:
    """The ranks that divide rows with this one: so many neighbours along ``replicate`` and ``shard``."""
    pipeline, replicate, shard, tensor = mesh.shape
    shape = (pipeline, replicate * shard // context, context, tensor)
    names = ("pipeline", "packs", "context", "tensor")
    along = init_device_mesh(mesh.device_type, shape, mesh_dim_names=names)["context"]
    return Context(along.get_group().group_name, context, along.get_local_rank())
