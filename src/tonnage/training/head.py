"""The vocabulary projection and its cross-entropy, chunk by chunk, with its own backward pass.

Logits of a chunk exist once, are turned into their own gradient in place, and that is multiplied: by the weight at
once; by the hidden states in the backward pass if it is the only chunk, where the product is added to what other
micro-batches left, and at once if there are several. What is left for the backward pass is one (supervised, hidden)
matrix, and the hidden states and slopes of the one chunk or the gradient of the weight, if that is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tonnage.kernels import softmax
from tonnage.kernels.embedding import HeadsGradient
from tonnage.kernels.products import add_product, linear, product
from tonnage.kernels.sums import adds_up, handed_over
from tonnage.planning.profile import HEAD_PIECE
from tonnage.training.vocabulary import Vocabulary, softmax_loss


class LogitsMemory:
    """Memory for the logits of a chunk that stays from one micro-batch to the next.

    No heap keeps pieces of so many megabytes. They would be new pages each time, which take a sixth of the time of the
    product that fills them.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, numbers: int, like: Tensor) -> Tensor:
        """So many, at least, on the device and in the type of another tensor; nobody else's until given back."""
        memory, self._memory = self._memory, None
        fits = memory is not None and memory.numel() >= numbers and memory.dtype == like.dtype
        return memory if memory is not None and fits else like.new_empty(numbers)

    def give_back(self, memory: Tensor) -> None:
        """Let the next one have it."""
        self._memory = memory


class LinearCrossEntropy(torch.autograd.Function):
    """``loss.linear_cross_entropy`` as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        target_weights: Tensor,
        scale: float,
        softcap: float | None,
        chunk_tokens: int,
        to_embedding: HeadsGradient | None,
        vocabulary: Vocabulary,
        memory: LogitsMemory | None,
    ) -> Tensor:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        num_tokens, wanted = hidden.shape[0], need_hidden or need_weight or need_bias
        num_chunks = max(1, math.ceil(num_tokens / chunk_tokens))
        chunk_tokens = _equal(chunk_tokens, num_tokens)
        room = None if memory is None else memory.take(chunk_tokens * len(weight), hidden)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight and num_chunks > 1 else None
        slopes = hidden.new_empty(0, len(weight)) if need_weight and num_tokens == 0 else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if need_bias else None

        for start in range(0, num_tokens, max(1, chunk_tokens)):
            chunk = slice(start, start + chunk_tokens)
            h, w = hidden[chunk], target_weights[chunk, None]
            losses, gradient = _of_chunk(
                h, weight, bias, targets[chunk], w, scale, softcap, vocabulary, room, wants_gradient=wanted
            )
            loss += losses.sum()
            if not wanted:
                del losses, gradient
                continue
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                product(gradient, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight, gradient.t(), h, HEAD_PIECE)
            elif need_weight:
                slopes = gradient
            del gradient  # before the next chunk's are made

        ctx.weight, ctx.to_embedding, ctx.slopes = weight, to_embedding, slopes
        ctx.hidden = None if slopes is None else hidden.detach()
        ctx.memory, ctx.room = memory, room
        if memory is not None and room is not None and slopes is None:
            memory.give_back(room)
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if not _is_one(upstream):
            for gradient in (*gradients, ctx.slopes):
                if gradient is not None:
                    gradient.mul_(upstream)
        of_hidden, of_weight, of_bias = gradients
        if ctx.slopes is not None:
            of_weight = _of_weight(ctx.weight, ctx.slopes, ctx.hidden, ctx.to_embedding)
            ctx.slopes = ctx.hidden = None  # which is not given up by itself
            if ctx.memory is not None:
                ctx.memory.give_back(ctx.room)
        if ctx.to_embedding is not None:
            ctx.to_embedding.gradient, of_weight = of_weight, None
        elif of_weight is not None:
            of_weight = handed_over(ctx.weight, of_weight)
        return of_hidden, of_weight, of_bias, *(None,) * 8


def target_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    chunk_tokens: int,
    vocabulary: Vocabulary,
    memory: LogitsMemory | None,
    *,
    seen: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Cross-entropy of every target, fp32 (tokens,), for which nothing is kept; arguments as above. ``seen`` is shown
    the logits of each chunk, without scale and cap, before they are gone."""
    chunk_tokens = _equal(chunk_tokens, len(hidden))
    room = None if memory is None else memory.take(chunk_tokens * len(weight), hidden)
    found, ones = [], torch.ones(len(hidden), 1, device=hidden.device)
    for start in range(0, len(hidden), max(1, chunk_tokens)):
        part = slice(start, start + chunk_tokens)
        logits = _logits(hidden[part], weight, bias, room)
        if seen is not None:
            seen(logits)
        found.append(
            _of_logits(logits, targets[part], ones[part], scale, softcap, vocabulary, wants_gradient=False)[0].flatten()
        )
        del logits
    if memory is not None and room is not None:
        memory.give_back(room)
    return torch.cat(found) if found else torch.zeros(0, device=hidden.device)


def _equal(chunk_tokens: int, num_tokens: int) -> int:
    """Tokens of a chunk, at most, where all are about as large."""
    num_chunks = max(1, math.ceil(num_tokens / chunk_tokens))
    return min(chunk_tokens, math.ceil(num_tokens / num_chunks / 8) * 8)


def _of_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    vocabulary: Vocabulary,
    room: Tensor | None,
    *,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Loss of every row of a chunk and, where it is wanted, the gradient of their sum with respect to the logits.

    Shapes: ``targets`` (rows,), ``weights`` (rows, 1). ``room`` is memory for the logits.
    """
    logits = _logits(hidden, weight, bias, room)
    return _of_logits(logits, targets, weights, scale, softcap, vocabulary, wants_gradient=wants_gradient)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor | None) -> Tensor:
    """Logits of a chunk, (rows, vocabulary), in ``room`` if that is given."""
    if room is None:
        return linear(hidden, weight, bias)
    logits = room[: len(hidden) * len(weight)].view(len(hidden), len(weight))
    product(hidden, weight.t(), out=logits)
    return logits


def _of_logits(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    vocabulary: Vocabulary,
    *,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """As ``_of_chunk``; the logits are gone afterwards."""
    if softcap is None and vocabulary.ranks is None and softmax.takes(logits):
        losses = softmax.softmax_loss(logits, targets, weights[:, 0], scale, wants_gradient=wants_gradient)
        return losses, logits  # the gradient is in their own memory
    return softmax_loss(
        logits.float(), targets[:, None], weights, scale, softcap, vocabulary, wants_gradient=wants_gradient
    )


def _is_one(upstream: Tensor) -> bool:
    """Whether a gradient of the loss is known to be 1, as it is unless fp16 scales the loss: to look is free on a CPU,
    and would wait for the device elsewhere. What has no content is taken for it."""
    return upstream.device.type == "cpu" and (isinstance(upstream, FakeTensor) or float(upstream) == 1.0)


def _of_weight(weight: Tensor, slopes: Tensor, hidden: Tensor, to_embedding: HeadsGradient | None) -> Tensor | None:
    """The gradient of a head's weight from that of its logits; nothing if it is added up here. The embedding's, with
    which it is one, is rounded together with it."""
    if to_embedding is not None:
        return product(slopes.t(), hidden, out=to_embedding.take(weight, hidden))
    if not adds_up(weight):
        return product(slopes.t(), hidden)
    assert weight.grad is not None
    add_product(weight.grad, slopes.t(), hidden, HEAD_PIECE)
    return None
