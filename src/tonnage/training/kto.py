"""The loss of answers that are each desirable or not: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect
Theoretic Optimization", eqs. 7 and 8.

    desirable w_D (1 - sigmoid(beta (r - z0)))          r    log-ratio of the row's answer to that of the reference
    undesirable w_U (1 - sigmoid(beta (z0 - r)))        z0   max(0, mean r' of the step)

r' is the log-ratio of an answer to another prompt (the second one of a document, ``data.building.mates``), and z0 an
estimate of how far the model has moved from the reference. It is one number for all rows of a step, on all ranks, so
it must be known before the first of them has a slope: a step begins with forward passes without gradient. z0 itself
and the answers to other prompts have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tonnage.config import Objective
from tonnage.data.building.mates import LABEL
from tonnage.host.locked import sent
from tonnage.parallel.world import World
from tonnage.rundir.figures import Figure
from tonnage.training.batch import MicroBatch
from tonnage.training.pipeline import Pipeline
from tonnage.training.preferences import Answers, PreferenceLoss, ratio_sums, value_and_slopes


class KtoLoss(PreferenceLoss):
    """The loss of rows with a label."""

    has_reference = True
    kept = 5
    """Weight and label, r, log p of the row's answer, r'."""

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        self._level = torch.zeros((), dtype=torch.float64)
        """z0"""

    @torch.no_grad()
    def set_level(self, pipeline: Pipeline, batches: Sequence[MicroBatch], world: World) -> None:
        """Find z0 of a step whose micro-batches of this rank are ``batches``; every rank calls this."""
        for turn in pipeline.passes(batches, 1.0, backward=False):
            turn.run()
        self._level = self._seen_level(world)
        self.clear()

    def _seen_level(self, world: World) -> Tensor:
        """z0 of the rows that all ranks have seen, each by its weight; fp64, on the device."""
        weights, _, _, _, others = self.seen(world.device)
        sums = torch.stack([weights @ others, weights.sum()])
        total, weight = world.total(sums if world.speaks else torch.zeros_like(sums)).unbind()
        return torch.clamp(total / weight, min=0)

    def value_and_slopes(self, logprobs: Tensor, batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        """As the function of that name, of every row's loss."""

        def losses_of(answers: Answers) -> Tensor:
            return self._losses(answers.ratios[:, 0], _labels(batch, logprobs.device))

        def note(answers: Answers, weights: Tensor, losses: Tensor) -> None:
            own, others = answers.ratios.unbind(1)
            self.take_down(weights, _labels(batch, own.device), own, answers.logprobs[:, 0], others)

        assert not batch.documents or batch.reference is not None, "the reference is missing"
        return value_and_slopes(logprobs, batch, denominator, losses_of, note)

    def _losses(self, ratios: Tensor, labels: Tensor) -> Tensor:
        objective = self.objective
        good = objective.desirable * torch.sigmoid(objective.beta * (self._level - ratios))
        bad = objective.undesirable * torch.sigmoid(objective.beta * (ratios - self._level))
        return labels * good + (1 - labels) * bad

    def tally(self, device: torch.device) -> Tensor:
        """Sums over the rows seen, of the desirable ones and of the others: weights, rewards and log-probabilities;
        z0 times all weights: fp64 (7,)."""
        weights, labels, own, logprobs, _ = self.seen(device)
        sides = [weights * labels, weights * (1 - labels)]
        sums = [sum_ for side in sides for sum_ in (side.sum(), self.objective.beta * (side @ own), side @ logprobs)]
        return torch.stack([*sums, weights.sum() * self._level.to(device)])

    def figures(self, tally: Sequence[float]) -> dict[str, float]:
        """Mean rewards and log-probabilities of both kinds of rows that there are, and z0 as ``kl``."""
        *sides, level = tally
        figures: dict[str, float] = {}
        for name, (weight, reward, logprob) in (("chosen", sides[:3]), ("rejected", sides[3:])):
            if weight:
                figures |= {f"reward_{name}": reward / weight, f"logprob_{name}": logprob / weight}
        if sides[0] and sides[3]:
            figures["reward_margin"] = figures["reward_chosen"] - figures["reward_rejected"]
        weight = sides[0] + sides[3]
        return figures | {"kl": level / weight} if weight else {}

    def evaluated(self, world: World) -> tuple[int, dict[str, Figure]]:
        """The loss, with z0 of all rows; mean rewards of both kinds that there are, and the margin between them."""
        self._level = self._seen_level(world)
        weights, labels, own, _, _ = self.seen(world.device)
        rewards, losses = self.objective.beta * own, self._losses(own, labels)
        means = (losses, weights), (rewards, weights * labels), (rewards, weights * (1 - labels))
        loss, chosen, rejected = ratio_sums(world, *means)
        figures = {"eval_loss": loss.figure}
        for name, sums in (("chosen", chosen), ("rejected", rejected)):
            if sums.rows:
                figures[f"eval_reward_{name}"] = sums.figure
        if chosen.rows and rejected.rows:
            figures["eval_reward_margin"] = _difference(chosen.figure, rejected.figure)
        return int(loss.rows), figures


def _difference(one: Figure, other: Figure) -> Figure:
    """Of two means over different rows."""
    value, half = one.value - other.value, math.hypot(one.high - one.value, other.high - other.value)
    return Figure(value, value - half, value + half)


def _labels(batch: MicroBatch, device: torch.device) -> Tensor:
    """Of the rows of a micro-batch 1 if it is desirable, else 0: fp64 (rows,)."""
    return sent(batch.of_documents(batch.columns[LABEL])[::2].double(), device)
