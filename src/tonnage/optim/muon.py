"""Matrices that Muon updates (``kernels.muon``): what lies between the update of their momentum and of their weights.

A matrix is made orthogonal whole. Where ranks have parts of its rows, each of a window of as many matrices goes to one
of them, which makes it orthogonal, and the parts go back: all ranks work, each number travels twice, in bf16, and the
bits are those of a matrix that was whole. Where it is whole on several ranks, each computes the same; so do those of a
tensor axis, which send each other what they have of it before.

    rank 0   m of a, b ─► rows of a, b ─┐            ┌─► a orthogonal ─┐            ┌─► rows of a, b ─► weights
                                        ├ all-to-all ┤                 ├ all-to-all ┤
    rank 1   m of a, b ─► rows of a, b ─┘            └─► b orthogonal ─┘            └─► rows of a, b ─► weights
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tonnage.kernels.muon import orthogonalised
from tonnage.kernels.regions import cuts_of, local_part, part_of
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
                self._parts[trained.name] = _orthogonal(trained.parameter, self.part(trained))
            return
        mesh, axis = _divided_along(matrices[0])
        group, ranks, rank = mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)
        own = [self.part(trained) for trained in matrices]
        sizes = [part.numel() for part in own] + [0] * (ranks - len(own))
        whole, parts = None, [0] * ranks
        if rank < len(matrices):
            whole = matrices[rank].parameter
            rows, columns = _of_tensor_axis(whole)
            of_ranks = (part_of(slice(0, rows), ranks, other) for other in range(ranks))
            parts = [(part.stop - part.start) * columns for part in of_ranks]
        received = _exchanged(torch.cat(own), sizes, parts, group)
        if whole is not None:
            received = _orthogonal(whole, received)
        back = _exchanged(received, parts, sizes, group)
        self._parts |= dict(zip((trained.name for trained in matrices), back.split(sizes), strict=False))


def _divided_along(trained: TrainedParameter) -> tuple[dist.device_mesh.DeviceMesh, int]:
    """The mesh and the axis of it along which a matrix's rows are divided."""
    parameter = trained.parameter
    assert isinstance(parameter, DTensor)
    ((axis, side),) = cuts_of(parameter, tensor_axis=False)
    assert side == 0
    return parameter.device_mesh, axis


def _of_tensor_axis(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a matrix that the ranks have together which have the same part of it along a tensor axis."""
    rows, columns = parameter.shape
    for axis, side in cuts_of(parameter, tensor_axis=True):
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        part = part_of(slice(0, parameter.shape[side]), mesh.size(axis), mesh.get_local_rank(axis))
        size = part.stop - part.start
        rows, columns = (size, columns) if side == 0 else (rows, size)
    return rows, columns


def _orthogonal(parameter: Tensor, update: Tensor) -> Tensor:
    """A matrix's ``update`` made orthogonal, flat: all of it, or of its part along a tensor axis, whose ranks have the
    others."""
    own = update.view(_of_tensor_axis(parameter))
    cuts = list(cuts_of(parameter, tensor_axis=True))
    if not cuts:
        return orthogonalised(own).reshape(-1)
    ((axis, side),) = cuts
    assert isinstance(parameter, DTensor)
    mesh, whole = parameter.device_mesh, slice(0, parameter.shape[side])
    ranks = mesh.size(axis)
    parts = [part_of(whole, ranks, rank) for rank in range(ranks)]
    lines = own if side == 0 else own.T
    sizes = [(part.stop - part.start) * lines.shape[1] for part in parts]
    sent = lines.reshape(-1).repeat(ranks)
    every = _exchanged(sent, [lines.numel()] * ranks, sizes, mesh.get_group(axis)).view(-1, lines.shape[1])
    orthogonal = orthogonalised(every if side == 0 else every.T)
    mine = parts[mesh.get_local_rank(axis)]
    return (orthogonal[mine] if side == 0 else orthogonal[:, mine]).reshape(-1)


def _exchanged(sent: Tensor, sizes: Sequence[int], coming: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """So many elements of ``sent``, bf16, to each rank of a group, for as many as are ``coming`` from each."""
    received = torch.empty(sum(coming), dtype=torch.bfloat16, device=sent.device)
    as_bytes = received.view(torch.uint8), sent.contiguous().view(torch.uint8)
    dist.all_to_all_single(*as_bytes, [2 * size for size in coming], [2 * size for size in sizes], group=group)
    return received
