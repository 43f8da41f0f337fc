"""The loss: summed over supervised tokens, divided once by their global number, full logits never in memory.

Most tokens of an instruction are context: nothing is learned from predicting them. The vocabulary projection, the
largest product of a small model, therefore runs only at positions whose next token is supervised, and in chunks.
Logits of a chunk exist once, are turned into their own gradient in place, and that is multiplied: by the weight at
once; by the hidden states in the backward pass if it is the only chunk, where the product is added to what other
micro-batches left, and at once if there are several. What is left for the backward pass is one (supervised, hidden)
matrix, and the slopes of the one chunk or the gradient of the weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tonnage.kernels import softmax
from tonnage.kernels.embedding import HeadsGradient, use_fast_embedding
from tonnage.kernels.products import add_product, linear, product
from tonnage.kernels.sums import adds_up, handed_over
from tonnage.model.anatomy import Anatomy
from tonnage.model.attention import packing_arguments
from tonnage.parallel.stages import Doors
from tonnage.parallel.tensor import Ranks, all_reduce, enter, local_part, ranks_of
from tonnage.planning.profile import HEAD_CHUNK, HEAD_PIECE
from tonnage.training.batch import MicroBatch


class LossModel(nn.Module):
    """A causal language model that ends in its loss instead of its logits.

    It owns no parameter: it calls the backbone, picks the supervised positions, and hands them to
    ``linear_cross_entropy`` together with the head's weight. As the root of the module tree it is also the root unit
    of sharding, so embedding, final norm and head are gathered together when it runs.

    A stage of a pipeline (``doors``) ends in hidden states instead, or begins with them.

    It stays in evaluation mode: dropout would make the loss depend on how packs are dealt to ranks and micro-batches,
    and no current model is fine-tuned with it.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, doors: Doors | None = None) -> None:
        super().__init__()
        self.model = model
        self.anatomy = anatomy
        self.doors = doors or Doors(first=True, last=True, hidden_size=anatomy.head.in_features)
        tied = self.doors.first and self.doors.last and anatomy.tied
        self.to_embedding = HeadsGradient() if tied else None
        self.logits: LogitsMemory | None = LogitsMemory()
        if self.doors.first:
            use_fast_embedding(anatomy.embedding, self.to_embedding)
        self.eval()

    def give_memory_back(self) -> None:
        """Keep none from one micro-batch to the next."""
        self.logits = None
        if self.to_embedding is not None:
            self.to_embedding.keeps = False

    def forward(self, batch: MicroBatch, denominator: float, received: Tensor | None = None) -> Tensor:
        """Loss of a micro-batch: sum of weight x negative log-likelihood over ``denominator``; a fp32 scalar.

        Of a stage that is not the last: its hidden states, (1, tokens, hidden). ``received`` are those of the stage
        before.

        ``denominator`` is the sum of the weights over the whole step, on all ranks, so that the losses of all
        micro-batches of all ranks add up to the loss of the step.
        """
        anatomy = self.anatomy
        device = next(self.model.parameters()).device
        packing = packing_arguments(batch.lengths, device, batch.shared)
        hidden = self.doors.run(anatomy.backbone, batch.input_ids.to(device), received, **packing)
        if not self.doors.last:
            return hidden
        return linear_cross_entropy(
            hidden[0].index_select(0, batch.positions.to(device)),
            anatomy.head.weight,
            anatomy.head.bias,
            batch.targets.to(device),
            batch.weights.to(device) / denominator,
            logit_scale=anatomy.logit_scale,
            logit_softcap=anatomy.logit_softcap,
            to_embedding=self.to_embedding,
            memory=self.logits,
        )


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


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    target_weights: Tensor,
    *,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    chunk_tokens: int = HEAD_CHUNK,
    to_embedding: HeadsGradient | None = None,
    memory: LogitsMemory | None = None,
) -> Tensor:
    """Sum over tokens of ``target_weights`` x cross-entropy of ``hidden @ weight.T + bias``; an fp32 scalar.

    Shapes: ``hidden`` (tokens, hidden), ``weight`` (vocabulary, hidden), ``targets`` int64 (tokens,),
    ``target_weights`` fp32 (tokens,). Softmax and sums are fp32; products run in the dtype of ``hidden``. At most
    ``chunk_tokens`` rows of logits exist at a time. No tokens give zero, with zero gradients.

    ``weight`` and ``bias`` may be divided by vocabulary (``parallel.tensor``): each rank then has the logits of its own
    tokens, and the ranks exchange three numbers of every row: the largest, the sum, the target's.

    The gradient of ``weight`` goes ``to_embedding``, if that awaits it, and not to autograd. Logits are in ``memory``
    where ``kernels.softmax`` is for them, on a CPU.
    """
    if (ranks := ranks_of(weight)) is not None:
        hidden = enter(hidden, ranks)
    if not torch.is_grad_enabled():  # which a function of autograd's own does not look at
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden,
        local_part(weight),
        None if bias is None else local_part(bias),
        targets,
        target_weights,
        logit_scale,
        logit_softcap,
        chunk_tokens,
        to_embedding if to_embedding is not None and to_embedding.is_awaited() else None,
        Vocabulary(0, None) if ranks is None else Vocabulary(ranks.part_of(weight.shape[0]).start, ranks),
        memory if softmax.takes(hidden) and bias is None and logit_softcap is None and ranks is None else None,
    )
    return loss


@dataclass(frozen=True)
class Vocabulary:
    """The tokens whose logits this rank has."""

    first: int
    ranks: Ranks | None
    """Those that have the others; None if there are none."""

    def normaliser_and_picked(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the sum of exponentials over all tokens, and the logit of the target; (rows, 1) each."""
        if self.ranks is None:
            picked = logits.gather(1, targets)
            return logits.logsumexp(1, keepdim=True), picked
        here, places = self.here(logits, targets)
        picked = torch.where(here, logits.gather(1, places), 0.0)
        normaliser = logits.logsumexp(1, keepdim=True)
        largest = all_reduce(normaliser, self.ranks, "max")
        sums = all_reduce(torch.cat([(normaliser - largest).exp_(), picked], 1), self.ranks)
        return largest + sums[:, :1].log(), sums[:, 1:]

    def subtract_targets(self, gradient: Tensor, targets: Tensor) -> None:
        """Take 1 from where the target is, if it is here."""
        if self.ranks is None:
            gradient.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=gradient.dtype))
        else:
            here, places = self.here(gradient, targets)
            gradient.scatter_add_(1, places, -here.to(gradient.dtype))

    def here(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Whether targets are among the tokens of this rank, and where (0 if not)."""
        here = (targets >= self.first) & (targets < self.first + logits.shape[1])
        return here, torch.where(here, targets - self.first, 0)


class _LinearCrossEntropy(torch.autograd.Function):
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
        chunk_tokens = min(chunk_tokens, math.ceil(num_tokens / num_chunks / 8) * 8)  # all about as large
        room = None if memory is None else memory.take(chunk_tokens * len(weight), hidden)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight and num_chunks > 1 else None
        slopes = hidden.new_empty(0, len(weight)) if need_weight and num_tokens == 0 else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if need_bias else None

        for start in range(0, num_tokens, max(1, chunk_tokens)):
            chunk = slice(start, start + chunk_tokens)
            h, w = hidden[chunk], target_weights[chunk, None]
            if room is None:
                logits = linear(h, weight, bias)
            else:
                logits = room[: len(h) * len(weight)].view(len(h), len(weight))
                product(h, weight.t(), out=logits)
            if softcap is None and vocabulary.ranks is None and softmax.takes(logits):
                losses = softmax.softmax_loss(logits, targets[chunk], w[:, 0], scale, wants_gradient=wanted)
                gradient = logits  # in their own memory
            else:
                logits = logits.float()
                losses, gradient = _softmax_loss(
                    logits, targets[chunk, None], w, scale, softcap, vocabulary, wants_gradient=wanted
                )
            loss += losses.sum()
            if not wanted:
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
            del logits, gradient  # before the next chunk's are made

        ctx.weight, ctx.to_embedding, ctx.hidden, ctx.slopes = weight, to_embedding, hidden.detach(), slopes
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


def _softmax_loss(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    vocabulary: Vocabulary,
    *,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Loss of every row and the gradient of their sum with respect to the logits, which are fp32 and lose their values.

    In torch operations. Shapes: ``logits`` (rows, vocabulary), ``targets`` and ``weights`` (rows, 1).
    """
    if scale != 1.0:
        logits.mul_(scale)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    normaliser, picked = vocabulary.normaliser_and_picked(logits, targets)
    losses = (normaliser - picked) * weights
    if not wants_gradient:
        return losses, logits
    slope = 1.0 - (logits / softcap).square_() if softcap is not None else None
    gradient = logits.sub_(normaliser).exp_()  # in their own memory
    vocabulary.subtract_targets(gradient, targets)
    gradient.mul_(weights * scale)
    return losses, gradient if slope is None else gradient.mul_(slope)
