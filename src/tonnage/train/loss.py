"""The loss: summed over supervised tokens, divided once by their global number, full logits never in memory.

Most tokens of an instruction are context: nothing is learned from predicting them. The vocabulary projection, the
largest product of a small model, therefore runs only at positions whose next token is supervised, and in chunks,
and its gradients are computed in the same pass: logits of a chunk exist once, are turned into their own gradient in
place, and are gone. What is left for the backward pass is one (supervised, hidden) matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tonnage.model.anatomy import Anatomy
from tonnage.model.attention import packing_arguments
from tonnage.model.embedding import HeadsGradient, use_fast_embedding
from tonnage.model.products import linear, product
from tonnage.model.sums import add, handed_over
from tonnage.parallel.stages import Doors
from tonnage.parallel.tensor import Ranks, all_reduce, enter, local_part, ranks_of
from tonnage.plan.profile import HEAD_CHUNK
from tonnage.train import softmax
from tonnage.train.batch import MicroBatch


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
        if self.doors.first:
            use_fast_embedding(anatomy.embedding, self.to_embedding)
        self.eval()

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
        )


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
) -> Tensor:
    """Sum over tokens of ``target_weights`` x cross-entropy of ``hidden @ weight.T + bias``; an fp32 scalar.

    Shapes: ``hidden`` (tokens, hidden), ``weight`` (vocabulary, hidden), ``targets`` int64 (tokens,),
    ``target_weights`` fp32 (tokens,). Softmax and sums are fp32; products run in the dtype of ``hidden``. At most
    ``chunk_tokens`` rows of logits exist at a time. No tokens give zero, with zero gradients.

    ``weight`` and ``bias`` may be divided by vocabulary (``parallel.tensor``): each rank then has the logits of its own
    tokens, and the ranks exchange three numbers of every row: the largest, the sum, the target's.

    The gradient of ``weight`` goes ``to_embedding``, if that awaits it, and not to autograd.
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
    ) -> Tensor:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        num_tokens = hidden.shape[0]
        chunked, wanted = num_tokens > chunk_tokens, need_hidden or need_weight or need_bias
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = None
        if need_weight:  # one chunk needs no accumulator; several are summed in fp32
            make = torch.empty_like if 0 < num_tokens <= chunk_tokens else torch.zeros_like
            grad_weight = make(weight, dtype=torch.float32 if chunked else weight.dtype)
        grad_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if need_bias else None

        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            h, w = hidden[chunk], target_weights[chunk, None]
            logits = linear(h, weight, bias)
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
            if grad_weight is not None and chunked:
                add(grad_weight, product(gradient.t(), h))
            elif grad_weight is not None:
                product(gradient.t(), h, out=grad_weight)
            del logits, gradient  # before the next chunk's are made

        ctx.weight, ctx.to_embedding = weight, to_embedding
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        # It is 1 unless fp16 scales the loss. To look is free on a CPU, and would wait for the device elsewhere.
        if upstream.device.type != "cpu" or float(upstream) != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(upstream)
        of_hidden, of_weight, of_bias = gradients
        if ctx.to_embedding is not None:
            ctx.to_embedding.gradient, of_weight = of_weight, None
        elif of_weight is not None:
            of_weight = handed_over(ctx.weight, of_weight)
        return of_hidden, of_weight, of_bias, *(None,) * 7


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
