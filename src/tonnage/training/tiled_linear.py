"""Linear layers of blocks whose weights come in tiles of outputs (``parallel.tiled``).

A tile gives some columns of the output. Backward, what it gives of the gradient of the inputs is summed in fp32, and
its own gradient leaves with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tonnage.kernels.products import add_product, linear, product
from tonnage.parallel.tiled import TiledWeight
from tonnage.planning.profile import HEAD_PIECE


def use_tiles(layer: nn.Linear, weight: TiledWeight) -> None:
    """Let a linear layer compute with a weight that comes in tiles."""
    layer.forward = partial(_forward, layer, weight)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, weight: TiledWeight, inputs: Tensor) -> Tensor:
    anchor = torch.zeros((), device=inputs.device, requires_grad=True)
    output: Tensor = _Linear.apply(inputs, layer.bias, anchor, weight)  # type: ignore[no-untyped-call]
    return output.view(*inputs.shape[:-1], weight.rows)


class _Linear(torch.autograd.Function):
    """The rows of ``kernels.products.linear``, tile by tile."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor | None, anchor: Tensor, weight: TiledWeight) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.bias_dtype = weight, None if bias is None else bias.dtype
        rows = inputs.reshape(-1, inputs.shape[-1])
        output = rows.new_empty(len(rows), weight.rows)
        for tile in weight.tiles():
            biases = None if bias is None else torch.cat([bias[those] for those in tile.rows])
            columns = linear(rows, tile.matrix, biases)
            sizes = [those.stop - those.start for those in tile.rows]
            for those, part in zip(tile.rows, columns.split(sizes, 1), strict=True):
                output[:, those] = part
            del columns, part
        return output

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        rows = inputs.reshape(-1, inputs.shape[-1])
        need_inputs, need_bias, *_ = ctx.needs_input_grad
        of_inputs = torch.zeros_like(rows, dtype=torch.float32)
        for tile in weight.tiles(backwards=True):
            slopes = torch.cat([of_rows[:, those] for those in tile.rows], 1)
            of_inputs += product(slopes, tile.matrix)
            of_tile = tile.room()
            add_product(of_tile[: slopes.shape[1]], slopes.t(), rows, HEAD_PIECE)
            del slopes
            tile.add(of_tile)
            del of_tile
        of_bias = of_rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_bias else None
        return (of_inputs.to(inputs.dtype).view(inputs.shape) if need_inputs else None), of_bias, None, None
