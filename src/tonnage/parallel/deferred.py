"""Gradients of weights that are computed later than the rest of a backward pass, when there is nothing better to do.

In a backward pass of a layer, the stage before waits for the product with the weight; nobody waits for the product with
the layer's input, which is half of the work. Linear layers of blocks keep what that one needs, and compute it when they
are told to. The numbers are the same, in the same order for each weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tonnage.kernels.products import linear, product
from tonnage.kernels.sums import add

Kept = tuple[nn.Parameter, Tensor, Tensor]
"""A weight, the inputs of its layer and the gradient of its outputs, both (rows, features)."""


class WeightGradients:
    """Puts off the gradients of the weights of ``blocks``' linear layers.

    Parameters must be whole on this rank: a shard's gradient is reduced in the backward pass. ``came`` is called for
    every gradient that is added here; of all others autograd tells.
    """

    def __init__(self, blocks: Sequence[nn.Module], came: Callable[[nn.Parameter], None]) -> None:
        self._came = came
        self._kept: defaultdict[tuple[int, int], list[Kept]] = defaultdict(list)
        self._key: tuple[int, int] | None = None
        layers: list[Any] = [module for block in blocks for module in block.modules() if type(module) is nn.Linear]
        for layer in layers:
            weight = layer._parameters.get("weight")
            if weight is not None and weight.requires_grad:  # a frozen one may be packed, or have an addition
                layer.forward = partial(_forward, self, layer)

    @contextmanager
    def put_off(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Leave gradients of weights in the backward pass inside to ``compute``."""
        self._key = stage, micro_batch
        try:
            yield
        finally:
            self._key = None

    def compute(self, stage: int, micro_batch: int) -> None:
        """Compute the gradients of weights of a backward pass, and add them to those that are there."""
        for weight, inputs, gradient in self._kept.pop((stage, micro_batch), ()):
            added = product(gradient.t(), inputs)
            if weight.grad is None:
                weight.grad = added.to(weight.grad_dtype or weight.dtype)
            else:
                add(weight.grad, added)
            self._came(weight)

    def keep(self, *kept: Any) -> bool:
        """Keep what a weight's gradient needs, if it is put off."""
        if self._key is not None:
            self._kept[self._key].append(kept)
        return self._key is not None


def _forward(later: WeightGradients, module: nn.Linear, inputs: Tensor) -> Tensor:
    output: Tensor = _Linear.apply(inputs, module.weight, module.bias, later)  # type: ignore[no-untyped-call]
    return output.view(*inputs.shape[:-1], output.shape[-1])


class _Linear(torch.autograd.Function):
    """The rows of ``linear``, whose gradient with respect to its weight may come later."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None, later: WeightGradients) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.weight, ctx.later = weight, later
        return linear(inputs.reshape(-1, inputs.shape[-1]), weight, bias)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        inputs_rows = inputs.reshape(-1, inputs.shape[-1])
        need_input, need_weight, need_bias, _ = ctx.needs_input_grad
        off = need_weight and ctx.later.keep(ctx.weight, inputs_rows, rows)
        return (
            product(rows, weight).view(inputs.shape) if need_input else None,
            product(rows.t(), inputs_rows) if need_weight and not off else None,
            rows.sum(0) if need_bias else None,
            None,
        )
