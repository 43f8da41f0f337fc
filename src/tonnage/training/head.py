"""The vocabulary projection and its cross-entropy, chunk by chunk, with its own backward pass.

Logits of a chunk exist once, are turned into their own gradient in place, and that is multiplied: by the weight at
once; by the hidden states in the backward pass if it is the only chunk, where the product is added to what other
micro-batches left, and at once if there are several. What is left for the backward pass is one (supervised, hidden)
matrix, and the hidden states and slopes of the one chunk or the gradient of the weight, if that is trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tonnage.kernels import softmax
from tonnage.kernels.embedding import HeadsGradient
from tonnage.kernels.products import add_product, linear, product
from tonnage.kernels.regions import local_part
from tonnage.kernels.sums import adds_up, handed_over
from tonnage.parallel.tensor import all_reduce, enter
from tonnage.planning.profile import HEAD_PIECE, head_chunk
from tonnage.training.vocabulary import Soft, Vocabulary, distilled_loss, divergence, softmax_loss


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


@dataclass(frozen=True)
class Targets:
    """What the logits of some rows are held against."""

    tokens: Tensor
    """int64 (rows,)"""
    weights: Tensor
    """fp32 (rows,)"""
    soft: Soft | None = None


@dataclass(frozen=True)
class Head:
    """The projection of hidden states to the vocabulary, with a weight that is in memory, and its cross-entropy.

    ``weight``, (vocabulary, hidden), and ``bias`` may be divided by vocabulary (``parallel.tensor``): each rank then
    has the logits of its own tokens, and the ranks exchange three numbers of every row: the largest, the sum, the
    target's.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    """Of the logits, as ``scale`` is."""
    chunk_tokens: int | None = None
    """Rows of logits that exist at a time, at most; by default as many as ``planning.profile.head_chunk`` says."""
    to_embedding: HeadsGradient | None = None
    """If that awaits the gradient of ``weight``, it goes there, and not to autograd."""
    memory: LogitsMemory | None = None
    """For logits, where ``kernels.softmax`` is for them, on a CPU."""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens whose logits this rank has."""
        return Vocabulary.of(self.weight, self.scale, self.softcap)

    @property
    def most_tokens(self) -> int:
        """Rows whose logits exist at a time, at most."""
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        return head_chunk(len(local_part(self.weight)), trains=self.weight.requires_grad)

    def most_loss_tokens(self, soft: Soft | None) -> int:
        """The same for ``loss``. Where logits become their own gradient, more tokens take no more memory."""
        part = local_part(self.weight)
        if self.chunk_tokens is not None or soft is not None or not self._is_plain or not softmax.keeps_memory(part):
            return self.most_tokens
        more = 4 * part.shape[1] // part.element_size()  # a row of the gradient in fp32, as logits of its token
        return head_chunk(len(part), trains=self.weight.requires_grad, more=more)

    @property
    def _is_plain(self) -> bool:
        """Whether logits are the product alone, of the whole vocabulary: no bias, no cap, no ranks that divide it."""
        return self.bias is None and self.softcap is None and self.vocabulary.ranks is None

    def loss(self, hidden: Tensor, targets: Tensor, target_weights: Tensor, soft: Soft | None = None) -> Tensor:
        """Sum over tokens of ``target_weights`` x cross-entropy of ``hidden @ weight.T + bias``; an fp32 scalar. With
        ``soft`` targets besides, ``distilled_loss`` in the place of cross-entropy.

        Shapes: ``hidden`` (tokens, hidden), ``targets`` int64 (tokens,), ``target_weights`` fp32 (tokens,). Softmax and
        sums are fp32; products run in the dtype of ``hidden``. No tokens give zero, with zero gradients.
        """
        part, bias, ranks = local_part(self.weight), self.bias, self.vocabulary.ranks
        if ranks is not None:
            hidden = enter(hidden, ranks)
        if not torch.is_grad_enabled():  # which a function of autograd's own does not look at
            hidden, part, bias = hidden.detach(), part.detach(), None if bias is None else bias.detach()
        bias = None if bias is None else local_part(bias)
        to_embedding = self.to_embedding
        if to_embedding is not None and not to_embedding.is_awaited():
            to_embedding = None
        if to_embedding is not None and ranks is not None:
            # Of none that comes this way torch 2.11 makes one of zeros.
            part = part.detach().requires_grad_(part.requires_grad)
        loss: Tensor = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, part, bias, Targets(targets, target_weights, soft), self, to_embedding
        )
        return loss

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor, targets: Tensor, *, likeliest_of: list[Tensor] | None = None) -> Tensor:
        """That of every target, fp32 (tokens,), for which nothing is kept. ``likeliest_of`` takes up the tokens with
        the largest logits, int64, chunk by chunk."""
        room = self.room_for(_equal(self.most_tokens, len(hidden)), hidden)
        losses, ones = [], torch.ones(len(hidden), 1, device=hidden.device)
        for chunk, logits in self._by_chunk(hidden, room):
            if likeliest_of is not None:
                likeliest_of.append(self._largest(logits.float()))
            of_chunk = _of_logits(logits, Targets(targets[chunk], ones[chunk]), self.vocabulary, wants_gradient=False)
            losses.append(of_chunk[0].flatten())
            del logits, of_chunk
        if self.memory is not None and room is not None:
            self.memory.give_back(room)
        return -torch.cat(losses) if losses else torch.zeros(0, device=hidden.device)

    @torch.no_grad()
    def divergences(self, hidden: Tensor, soft: Soft) -> Tensor:
        """That of every row from its teacher (``vocabulary.divergence``), fp32 (tokens,), for which nothing is kept."""
        found = [
            divergence(logits.div_(soft.temperature), self.vocabulary, soft.rows(chunk))[0].flatten()
            for chunk, logits in self._capped(hidden)
        ]
        return torch.cat(found) if found else torch.zeros(0, device=hidden.device)

    @torch.no_grad()
    def top(self, hidden: Tensor, num_tokens: int, first: int) -> Tensor:
        """The likeliest ``num_tokens`` of the ``first`` tokens after every row: their log-probabilities, and which
        they are, fp32 (2, rows, tokens). No vocabulary has so many that fp32 would not know their numbers."""
        assert self.vocabulary.ranks is None, "a teacher is not divided by vocabulary"
        found = [
            torch.stack([top.values - logits.logsumexp(1, keepdim=True), top.indices.float()])
            for _, logits in self._capped(hidden)
            for top in [logits[:, :first].topk(num_tokens)]
        ]
        return torch.cat(found, 1) if found else torch.zeros(2, 0, num_tokens, device=hidden.device)

    @torch.no_grad()
    def largest(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """The ``num_tokens`` largest logits of every row, fp32 (rows, tokens), or as many as there are, for which
        nothing is kept."""
        ranks, pieces = self.vocabulary.ranks, []
        for _, logits in self._capped(hidden):
            some = logits.topk(min(num_tokens, logits.shape[1])).values
            if ranks is not None:  # each rank's beside those of the others
                beside = some.new_zeros(len(some), ranks.size, num_tokens)
                beside[:, ranks.rank] = F.pad(some, (0, num_tokens - some.shape[1]), value=-math.inf)
                some = all_reduce(beside, ranks).flatten(1).topk(min(num_tokens, len(self.weight))).values
            pieces.append(some)
        return torch.cat(pieces) if pieces else torch.zeros(0, num_tokens, device=hidden.device)

    def _by_chunk(self, hidden: Tensor, room: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a chunk and their logits, in ``room`` if that is given, chunk by chunk."""
        hidden, weight = hidden.detach(), local_part(self.weight).detach()
        bias = None if self.bias is None else local_part(self.bias).detach()
        chunk_tokens = _equal(self.most_tokens, len(hidden))
        for start in range(0, len(hidden), max(1, chunk_tokens)):
            chunk = slice(start, start + chunk_tokens)
            yield chunk, _logits(hidden[chunk], weight, bias, room)

    def _capped(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The same in fp32, scaled and capped."""
        for chunk, logits in self._by_chunk(hidden, None):
            logits = self.vocabulary.scale_and_cap(logits.float())  # which gives up those of 16 bits
            yield chunk, logits

    def likeliest(self, hidden: Tensor) -> Tensor:
        """The token with the largest logit after every row, the first of several: int64 (tokens,). A scale or a cap of
        the logits changes nothing of their order."""
        bias = None if self.bias is None else local_part(self.bias)
        return self._largest(linear(hidden, local_part(self.weight), bias).float())

    def room_for(self, num_tokens: int, hidden: Tensor) -> Tensor | None:
        """Memory for the logits of so many ``hidden`` states, where ``kernels.softmax`` is for them and nothing else is
        to be done with them."""
        if self.memory is None or not self._is_plain or not softmax.keeps_memory(hidden):
            return None
        return self.memory.take(num_tokens * len(self.weight), hidden)

    def _largest(self, logits: Tensor) -> Tensor:
        """The token of the largest of a rank's logits, fp32 (rows, its tokens), over all ranks that have some."""
        largest, tokens = logits.max(1)
        if (ranks := self.vocabulary.ranks) is None:
            return tokens
        of_all = all_reduce(largest, ranks, "max")
        tokens = torch.where(largest == of_all, tokens + self.vocabulary.first, self.weight.shape[0])
        return -all_reduce(-tokens, ranks, "max")


def scores(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the head of a model of scores, whose ``weight`` is (1, hidden), gives for rows of hidden states, (rows,
    hidden): fp32 (rows,). So few are computed in fp32, where transformers rounds them to the type of the model."""
    return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())[:, 0]


class LinearCrossEntropy(torch.autograd.Function):
    """``Head.loss`` as autograd sees it; ``weight`` and ``bias`` are this rank's part."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        head: Head,
        to_embedding: HeadsGradient | None,
    ) -> Tensor:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        num_tokens, wants_gradient = hidden.shape[0], need_hidden or need_weight or need_bias
        soft = targets.soft
        chunk_tokens = _equal(head.most_loss_tokens(soft), num_tokens)
        is_divided = num_tokens > chunk_tokens
        room = head.room_for(chunk_tokens, hidden) if soft is None else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight and is_divided else None
        slopes = hidden.new_empty(0, len(weight)) if need_weight and num_tokens == 0 else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if need_bias else None

        for start in range(0, num_tokens, max(1, chunk_tokens)):
            chunk = slice(start, start + chunk_tokens)
            logits = _logits(hidden[chunk], weight, bias, room)
            of_chunk = Targets(
                targets.tokens[chunk], targets.weights[chunk, None], None if soft is None else soft.rows(chunk)
            )
            losses, gradient = _of_logits(logits, of_chunk, head.vocabulary, wants_gradient=wants_gradient)
            del logits
            loss += losses.sum()
            if not wants_gradient:
                del losses, gradient
                continue
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                product(gradient, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight, gradient.t(), hidden[chunk], HEAD_PIECE)
            elif need_weight:
                slopes = gradient
            del gradient  # before the next chunk's are made

        ctx.weight, ctx.to_embedding, ctx.slopes = weight, to_embedding, slopes
        ctx.hidden = None if slopes is None else hidden.detach()
        ctx.memory, ctx.room = head.memory, room
        if head.memory is not None and room is not None and slopes is None:
            head.memory.give_back(room)
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
            if ctx.room is not None:
                ctx.memory.give_back(ctx.room)
        if ctx.to_embedding is not None:
            ctx.to_embedding.gradient, of_weight = of_weight, None
        elif of_weight is not None:
            of_weight = handed_over(ctx.weight, of_weight)
        return of_hidden, of_weight, of_bias, *(None,) * 3


def _equal(chunk_tokens: int, num_tokens: int) -> int:
    """Tokens of a chunk, at most, where all are about as large."""
    num_chunks = max(1, math.ceil(num_tokens / chunk_tokens))
    return min(chunk_tokens, math.ceil(num_tokens / num_chunks / 8) * 8)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor | None) -> Tensor:
    """Logits of a chunk, (rows, vocabulary), in ``room`` if that is given."""
    if room is None:
        return linear(hidden, weight, bias)
    logits = room[: len(hidden) * len(weight)].view(len(hidden), len(weight))
    product(hidden, weight.t(), out=logits)
    return logits


def _of_logits(
    logits: Tensor, targets: Targets, vocabulary: Vocabulary, *, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Loss of every row of a chunk and, where it is wanted, the gradient of their sum with respect to the logits, which
    are gone afterwards. The weights of ``targets`` are (rows, 1).
    """
    tokens, weights, soft = targets.tokens, targets.weights, targets.soft
    if soft is not None:
        return distilled_loss(logits.float(), tokens[:, None], weights, vocabulary, soft, wants_gradient=wants_gradient)
    if vocabulary.softcap is None and vocabulary.ranks is None and softmax.takes(logits):
        losses = softmax.softmax_loss(logits, tokens, weights[:, 0], vocabulary.scale, wants_gradient=wants_gradient)
        return losses, logits  # the gradient is in their own memory
    return softmax_loss(logits.float(), tokens[:, None], weights, vocabulary, wants_gradient=wants_gradient)


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
