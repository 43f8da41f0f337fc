"""The gradient of the token embedding: of the rows that were looked up, summed in fp32 (CPU).

torch makes a gradient of the whole vocabulary, all of it zeros but for a few hundred rows, and adds up those of a token
in the type of the model: in bf16, the sum of a frequent token stops growing after some hundred additions. Here each row
is summed in fp32 and rounded once, and where there is a gradient already (an earlier micro-batch's, or the head's, with
which the embedding may be one), only these rows are added to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.kernels.products import linear
from tonnage.kernels.sums import PIECE, adds_up, handed_over
from tonnage.kernels.switches import is_on


@dataclass
class HeadsGradient:
    """On its way from a head to the embedding that is the same parameter, which comes last in the backward pass.

    Autograd would keep it until then, too, and then add two gradients of the whole vocabulary.
    """

    awaited: bool = False
    """Whether the embedding of this forward pass will fetch it."""
    gradient: Tensor | None = None
    keeps: bool = True
    """Whether its memory stays from one micro-batch to the next, where it was added to a sum (CPU): it would be new
    pages each time."""
    _memory: Tensor | None = None

    def is_awaited(self) -> bool:
        """Whether the embedding will fetch it; asked once a forward pass."""
        awaited, self.awaited = self.awaited, False
        return awaited

    def fetch(self) -> Tensor | None:
        """The gradient, if the head has brought it."""
        gradient, self.gradient = self.gradient, None
        return gradient

    def take(self, weight: Tensor, like: Tensor) -> Tensor:
        """Memory for a gradient of ``weight`` in the type of another tensor."""
        memory, self._memory = self._memory, None
        return torch.empty_like(weight, dtype=like.dtype) if memory is None else memory

    def was_added(self, gradient: Tensor) -> None:
        """Nobody needs ``gradient`` any more: its memory may be kept."""
        if self.keeps and gradient.device.type == "cpu":
            self._memory = gradient


@torch.library.custom_op("tonnage::add_rows", mutates_args=("total",))
def add_rows(total: Tensor, ids: Tensor, rows: Tensor, padding: int = -1) -> None:
    """``total[ids[i]] += rows[i]`` for every i, rows of one id summed in fp32 and rounded to their type before.

    Shapes: ``total`` (vocabulary, hidden), ``ids`` int64 (tokens,), ``rows`` (tokens, hidden). Rows of ``padding`` add
    nothing.
    """
    unique_ids, places = torch.unique(ids, return_inverse=True)
    columns = max(16, PIECE // max(1, len(ids)))
    for total_part, rows_part in zip(total.split(columns, 1), rows.split(columns, 1), strict=True):
        sums = torch.ops.aten.embedding_dense_backward(rows_part.float(), places, len(unique_ids), -1, False)
        sums[unique_ids == padding] = 0
        # index_add_ is slow in bf16
        total_part.index_copy_(0, unique_ids, total_part.index_select(0, unique_ids) + sums.to(rows.dtype))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, head: HeadsGradient | None) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.padding, ctx.head = -1 if padding is None else padding, head
        if head is not None:
            head.awaited = True
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        ids, rows = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        heads = None if ctx.head is None else ctx.head.fetch()
        if heads is None and adds_up(weight):
            add_rows(weight.grad, ids, rows, ctx.padding)
            return None, None, None, None
        whole = torch.zeros_like(weight) if heads is None else heads
        add_rows(whole, ids, rows, ctx.padding)
        result = handed_over(weight, whole)
        if heads is not None and result is None:
            ctx.head.was_added(heads)
        return None, result, None, None


def looks_up_alone(module: nn.Module) -> bool:
    """Whether a module is an embedding that does no more than to look up."""
    is_plain = type(module) is nn.Embedding and module.max_norm is None
    return is_plain and not module.scale_grad_by_freq and not module.sparse


def use_fast_embedding(module: nn.Embedding, head: HeadsGradient | None = None) -> None:
    """Let a token embedding compute its gradient as above; ``head`` brings that of the head with which it shares the
    parameter. An embedding with an addition (``adapted_embedding``) has no gradient of its own."""
    if looks_up_alone(module) and not hasattr(module, "lora_factor") and is_on("embedding"):
        module.forward = partial(_forward, module, head)  # type: ignore[method-assign]


def adapted_embedding(
    ids: Tensor, weight: Tensor, down: Tensor, up: Tensor, factor: float, padding: int | None = None
) -> Tensor:
    """``weight[ids] + factor * down[ids] @ up'``, of which ``down`` and ``up`` alone have gradients.

    Shapes: ``ids`` int64 (...,), ``weight`` (vocabulary, hidden), ``down`` (vocabulary, rank), ``up`` (hidden, rank);
    the result is (..., hidden), in their type. What is kept for the backward pass is ``down[ids]``. Of ``padding``,
    ``down`` has no gradient.
    """
    low = _look_up(ids, down, padding, None) if is_on("embedding") else F.embedding(ids, down, padding)
    output = F.embedding(ids, weight.detach())
    return output.add_(linear(low, up, None), alpha=factor)


def _forward(module: nn.Embedding, head: HeadsGradient | None, ids: Tensor) -> Tensor:
    return _look_up(ids, module.weight, module.padding_idx, head)


def _look_up(ids: Tensor, weight: Tensor, padding: int | None, head: HeadsGradient | None) -> Tensor:
    trains = weight.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not trains or weight.device.type != "cpu" or isinstance(weight, DTensor):
        return F.embedding(ids, weight, padding)
    output: Tensor = _Embedding.apply(ids, weight, padding, head)  # type: ignore[no-untyped-call]
    return output
