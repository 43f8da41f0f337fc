"""Matrices that Muon updates (``kernels.muon``): what lies between the update of their momentum and of their weights.

A matrix is made orthogonal whole. Where ranks have parts of its rows, each of a window of as many matrices goes to one
of them, which makes it orthogonal, and the parts go back: all ranks work, each number travels twice, in bf16, and the
bits are those of a matrix that was whole. Where it is whole on several ranks, each computes the same.

    rank 0   m of a, b ─► rows of a, b ─┐            ┌─► a orthogonal ─┐            ┌─► rows of a, b ─► weights
                                        ├ all-to-all ┤                 ├ all-to-all ┤
    rank 1   m of a, b ─► rows of a, b ─┘            └─► b orthogonal ─┘            └─► rows of a, b ─► weights
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tonnage.kernels.muon import orthogonalised
from tonnage.kernels.regions import local_part, part_of
from tonnage.optim.tiers import TrainedParameter


class Updates:
    """The updates of a step's matrices, this rank's parts of them, by name: flat, in bf16."""

    def __init__(self, windows: Mapping[int, Sequence[TrainedParameter]]) -> None:
        """``windows`` are the matrices that are updated together; every rank has the same."""
        self._windows = windows
        self._pending = sorted(windows)
        self._parts: dict[str, Tensor] = {}

    def part(self, trained: TrainedParameter) -> Tensor:
        """This rank's part of a matrix's update: of its momentum, and orthogonal once ``finish`` has been called."""
        if trained.name not in self._parts:
            shard = local_part(trained.parameter)
            self._parts[trained.name] = torch.empty(shard.numel(), dtype=torch.bfloat16, device=shard.device)
        return self._parts[trained.name]

    def finish(self, window: int) -> None:
        """Make the matrices of all windows up to ``window`` orthogonal, whose momentum is complete; those of windows
        before it are forgotten."""
        while self._pending and self._pending[0] <= window:
            self._parts = {trained.name: self.part(trained) for trained in self._windows[self._pending[0]]}
            self._orthogonalise(self._windows[self._pending.pop(0)])

    def finish_all(self) -> None:
        """Take part in whatever is left: of matrices of which this rank has no rows."""
        if self._pending:
            self.finish(self._pending[-1])

    def _orthogonalise(self, matrices: Sequence[TrainedParameter]) -> None:
        if matrices[0].ranks == 1:
            for trained in matrices:
                shape = local_part(trained.parameter).shape
                self._parts[trained.name] = orthogonalised(self.part(trained).view(shape)).reshape(-1)
            return
        mesh, axis = _divided_along(matrices[0])
        group, ranks, rank = mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)
        own = [self.part(trained) for trained in matrices]
        sizes = [part.numel() for part in own] + [0] * (ranks - len(own))
        whole, parts = None, [0] * ranks
        if rank < len(matrices):
            whole = matrices[rank].parameter
            parts = [_elements(whole, ranks, other) for other in range(ranks)]
        rows = _exchanged(torch.cat(own), sizes, parts, group)
        if whole is not None:
            rows = orthogonalised(rows.view(whole.shape)).reshape(-1)
        back = _exchanged(rows, parts, sizes, group)
        self._parts |= dict(zip((trained.name for trained in matrices), back.split(sizes), strict=False))


def _divided_along(trained: TrainedParameter) -> tuple[dist.device_mesh.DeviceMesh, int]:
    """The mesh and the axis of it along which a matrix's rows are divided."""
    parameter = trained.parameter
    assert isinstance(parameter, DTensor)
    cuts = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if len(cuts) != 1 or parameter.placements[cuts[0]] != Shard(0):
        raise NotImplementedError(f"Muon of {trained.name}, which is divided as {parameter.placements}")
    return parameter.device_mesh, cuts[0]


def _elements(parameter: Tensor, ranks: int, rank: int) -> int:
    """Elements of the rows that a rank has."""
    rows = part_of(slice(0, parameter.shape[0]), ranks, rank)
    return int(rows.stop - rows.start) * parameter.shape[1]


def _exchanged(sent: Tensor, sizes: Sequence[int], coming: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """So many elements of ``sent``, bf16, to each rank of a group, for as many as are ``coming`` from each."""
    received = torch.empty(sum(coming), dtype=torch.bfloat16, device=sent.device)
    as_bytes = received.view(torch.uint8), sent.contiguous().view(torch.uint8)
    dist.all_to_all_single(*as_bytes, [2 * size for size in coming], [2 * size for size in sizes], group=group)
    return received
