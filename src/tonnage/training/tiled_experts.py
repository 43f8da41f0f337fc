"""Experts of a mixture whose stacked matrices come in tiles of experts (``parallel.tiled``).

The rows of an expert lie side by side (``model.experts``), so a tile gives those of its own experts, and its gradient
is theirs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tonnage.kernels.grouped import add_outer, multiply_into
from tonnage.model.experts import IN_TILES
from tonnage.parallel.tiled import Tile, TiledWeight


def use_tiles(experts: nn.Module, name: str, weight: TiledWeight) -> None:
    """Let a module of experts compute with stacked matrices that come in tiles."""
    experts.__dict__.setdefault(IN_TILES, {})[name] = partial(_multiplied, weight)


def _multiplied(weight: TiledWeight, rows: Tensor, ends: Tensor, *, turned: bool) -> Tensor:
    """As ``kernels.grouped.grouped_product``."""
    anchor = torch.zeros((), device=rows.device, requires_grad=True)
    output: Tensor = _Experts.apply(rows, anchor, weight, ends, turned)  # type: ignore[no-untyped-call]
    return output


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, weight: TiledWeight, ends: Tensor, turned: bool) -> Tensor:
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        ctx.save_for_backward(rows, starts, ends)
        ctx.weight, ctx.turned = weight, turned
        output = rows.new_zeros(len(rows), weight.shape[2] if turned else weight.shape[1])
        for tile in weight.tiles():
            experts = _experts_of(tile, ends)
            matrices = tile.matrix if turned else tile.matrix.transpose(1, 2)
            multiply_into(output, rows, matrices, starts[experts], ends[experts])
            del matrices
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, starts, ends = ctx.saved_tensors
        weight, gradient, of_rows = ctx.weight, gradient.contiguous(), torch.zeros_like(rows)
        left, right = (rows, gradient) if ctx.turned else (gradient, rows)
        for tile in weight.tiles(backwards=True):
            experts = _experts_of(tile, ends)
            matrices = tile.matrix.transpose(1, 2) if ctx.turned else tile.matrix
            multiply_into(of_rows, gradient, matrices, starts[experts], ends[experts])
            del matrices
            of_tile = tile.room()
            add_outer(of_tile, left, right, ends[experts], starts[experts])
            tile.add(of_tile)
            del of_tile
        return of_rows, None, None, None, None


def _experts_of(tile: Tile, like: Tensor) -> Tensor:
    """The numbers of a tile's experts."""
    return torch.cat([torch.arange(those.start, those.stop, device=like.device) for those in tile.rows])
