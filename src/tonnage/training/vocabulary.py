"""Softmax and cross-entropy over a vocabulary that is whole, or divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Scale and cap logits in place."""
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

    def subtract_targets(self, gradient: Tensor, targets: Tensor) -> None:
        """Take 1 from where the target is, if this rank has it."""
        if self.ranks is None:
            gradient.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=gradient.dtype))
        else:
            is_local, places = self.places_of(targets, gradient)
            gradient.scatter_add_(1, places, -is_local.to(gradient.dtype))

    def places_of(self, targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Whether targets are among the tokens of this rank, and where among its ``logits`` (0 if not)."""
        is_local = (targets >= self.first) & (targets < self.first + logits.shape[1])
        return is_local, torch.where(is_local, targets - self.first, 0)


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
    vocabulary.subtract_targets(gradient, targets)
    gradient.mul_(weights * vocabulary.scale)
    return losses, gradient if slope is None else gradient.mul_(slope)
