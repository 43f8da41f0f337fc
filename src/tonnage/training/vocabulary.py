"""Softmax and cross-entropy over a vocabulary that is whole, or divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tonnage.parallel.tensor import Ranks, all_reduce, ranks_of


@dataclass(frozen=True)
class Vocabulary:
    """The tokens whose logits this rank has, and what is done to these before the softmax."""

    first: int = 0
    ranks: Ranks | None = None
    """Those that have the others; None if there are none."""
    scale: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(weight: Tensor, scale: float, softcap: float | None) -> Vocabulary:
        """That of a head whose ``weight`` may be divided by vocabulary."""
        ranks = ranks_of(weight)
        return Vocabulary(0 if ranks is None else ranks.part_of(weight.shape[0]).start, ranks, scale, softcap)

    def scale_and_cap(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slope_of_cap(self, logits: Tensor) -> Tensor | None:
        """Derivative of the cap at logits that are capped; None where there is no cap."""
        return None if self.softcap is None else 1.0 - (logits / self.softcap).square_()

    def normaliser_and_picked(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the sum of exponentials over all tokens, and the logit of the target; (rows, 1) each."""
        if self.ranks is None:
            picked = logits.gather(1, targets)
            return logits.logsumexp(1, keepdim=True), picked
        is_local, places = self.places_of(targets, logits)
        picked = torch.where(is_local, logits.gather(1, places), 0.0)
        normaliser = logits.logsumexp(1, keepdim=True)
        largest = all_reduce(normaliser, self.ranks, "max")
        sums = all_reduce(torch.cat([(normaliser - largest).exp_(), picked], 1), self.ranks)
        return largest + sums[:, :1].log(), sums[:, 1:]

    def subtract(self, gradient: Tensor, tokens: Tensor, amounts: Tensor) -> None:
        """Take ``amounts``, (rows, tokens) as ``tokens``, from where these are, if this rank has them."""
        if self.ranks is not None:
            is_local, tokens = self.places_of(tokens, gradient)
            amounts = amounts * is_local
        gradient.scatter_add_(1, tokens, -amounts)

    def places_of(self, targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Whether targets are among the tokens of this rank, and where among its ``logits`` (0 if not)."""
        is_local = (targets >= self.first) & (targets < self.first + logits.shape[1])
        return is_local, torch.where(is_local, targets - self.first, 0)


@dataclass(frozen=True)
class Soft:
    """What a teacher expects after every position, and how it counts beside the targets."""

    tokens: Tensor
    """int64 (rows, k): the teacher's likeliest tokens."""
    logprobs: Tensor
    """fp32 (rows, k): their log-probabilities at ``temperature``, of which all k together have a probability of 1."""
    share: float
    """Of the cross-entropy of the targets; the divergence from the teacher has the rest."""
    temperature: float

    def rows(self, chunk: slice) -> Soft:
        return replace(self, tokens=self.tokens[chunk], logprobs=self.logprobs[chunk])


def softmax_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, vocabulary: Vocabulary, *, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Loss of every row and the gradient of their sum with respect to the logits, which are fp32 and lose their values.

    In torch operations. Shapes: ``logits`` (rows, vocabulary), ``targets`` and ``weights`` (rows, 1).
    """
    vocabulary.scale_and_cap(logits)
    normaliser, picked = vocabulary.normaliser_and_picked(logits, targets)
    losses = (normaliser - picked) * weights
    if not wants_gradient:
        return losses, logits
    slope = vocabulary.slope_of_cap(logits)
    gradient = logits.sub_(normaliser).exp_()  # in their own memory
    vocabulary.subtract(gradient, targets, torch.ones_like(targets, dtype=gradient.dtype))
    gradient.mul_(weights * vocabulary.scale)
    return losses, gradient if slope is None else gradient.mul_(slope)


def distilled_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, vocabulary: Vocabulary, soft: Soft, *, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """As ``softmax_loss``, where a teacher's probabilities are targets as well. Of every row, ``weights`` times

        share * -log q_1(target) + (1 - share) * T^2 * sum_j p(j) * (log p(j) - log q_T(j))

    with q_T the softmax over the whole vocabulary of the logits divided by the temperature T, and p the teacher's at T
    over its k likeliest tokens j, which it has renormalised to 1. The sum is the Kullback-Leibler divergence of q_T
    from p; T^2 keeps its gradient, which falls with 1 / T^2, as large as that of the targets.

    Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", section 2, eq. 1 and 2.
    """
    share, rest, temperature = soft.share, 1 - soft.share, soft.temperature
    vocabulary.scale_and_cap(logits)
    slope = vocabulary.slope_of_cap(logits) if wants_gradient else None
    heated = logits if temperature == 1 else logits / temperature
    divergences, normaliser = divergence(heated, vocabulary, soft)
    losses = rest * temperature**2 * divergences
    if share:
        of_targets, picked = vocabulary.normaliser_and_picked(logits, targets)
        losses = losses + share * (of_targets - picked)
    losses = losses * weights
    if not wants_gradient:
        return losses, logits
    amounts = rest * soft.logprobs.exp()
    if heated is logits:
        gradient = logits.sub_(normaliser).exp_()
    else:
        gradient = heated.sub_(normaliser).exp_().mul_(rest * temperature)
        amounts = amounts * temperature
        if share:
            gradient += logits.sub_(of_targets).exp_().mul_(share)
    vocabulary.subtract(gradient, soft.tokens, amounts)
    if share:
        vocabulary.subtract(gradient, targets, torch.full_like(targets, share, dtype=gradient.dtype))
    gradient.mul_(weights * vocabulary.scale)
    return losses, gradient if slope is None else gradient.mul_(slope)


def divergence(heated: Tensor, vocabulary: Vocabulary, soft: Soft) -> tuple[Tensor, Tensor]:
    """The sum over j in ``distilled_loss``, of logits that are divided by the temperature, and the logarithm of the
    sum of their exponentials; fp32 (rows, 1) each."""
    normaliser, picked = vocabulary.normaliser_and_picked(heated, soft.tokens)
    probabilities = soft.logprobs.exp()
    terms = probabilities * (soft.logprobs - picked + normaliser)
    return torch.where(probabilities > 0, terms, 0.0).sum(1, keepdim=True), normaliser
