"""Softmax and cross-entropy over a vocabulary that is whole, or divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tonnage.parallel.tensor import Ranks, all_reduce


def softmax_loss(
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
