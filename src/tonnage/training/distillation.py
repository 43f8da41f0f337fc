"""How a teacher counts beside the targets (``vocabulary.distilled_loss``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonnage.host.locked import sent
from tonnage.training.batch import MicroBatch
from tonnage.training.vocabulary import Soft


@dataclass(frozen=True)
class Distillation:
    """The share of the targets' own loss, and the temperature of teacher and student."""

    share: float
    temperature: float

    def soft(self, batch: MicroBatch, device: torch.device) -> Soft | None:
        """What the teacher expects in the place of every target of a micro-batch, its probabilities renormalised over
        the tokens that are kept; None where it was not asked."""
        if batch.teacher_tokens is None or batch.teacher_logprobs is None:
            return None
        logprobs = (sent(batch.teacher_logprobs, device) / self.temperature).log_softmax(1)
        return Soft(sent(batch.teacher_tokens, device).long(), logprobs, self.share, self.temperature)
