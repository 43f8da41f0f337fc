"""Losses of pairs of answers of which one is preferred: a function each, with its formula and its source.

Most are made of the answers' log-probabilities (``PairLoss``), that of a reward model of its scores (``RewardLoss``). A
function takes what is known of the pairs of a micro-batch (``Answers``) and gives the loss of each. The engine sums
these by the pairs' weights and divides once, by the weight of all pairs of the step: so it does not matter which pairs
share a row, a micro-batch or a worker. A new kind is a function, its line in ``LOSSES``, and its name in the schema.

In the formulas log p is the log-probability of an answer, the sum over its tokens; log p / n divides it by their
number; r is log p less that of the reference; w is the chosen answer, l the rejected one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tonnage.config import Objective
from tonnage.host.locked import sent
from tonnage.rundir.figures import Figure, RatioSums, wilson
from tonnage.training.batch import MicroBatch


@dataclass(frozen=True)
class Answers:
    """What losses are made of: fp64 (pairs, 2) each, of the chosen and the rejected answers."""

    logprobs: Tensor
    """Sums over the tokens of an answer."""
    tokens: Tensor
    reference: Tensor
    """``logprobs`` of the reference; zeros where there is none."""

    @property
    def ratios(self) -> Tensor:
        """r: how much likelier the answers became."""
        return self.logprobs - self.reference

    @property
    def means(self) -> Tensor:
        """log p / n."""
        return self.logprobs / self.tokens


Loss = Callable[[Answers, Objective], Tensor]
"""The loss of every pair, fp64 (pairs,)."""


def dpo(answers: Answers, objective: Objective) -> Tensor:
    """-log sigmoid(beta (r_w - r_l)), with labels that are swapped with probability e (``label_smoothing``):
    -(1 - e) log sigmoid(z) - e log sigmoid(-z).

    Rafailov et al. 2023, "Direct Preference Optimization", eq. 7; Mitchell 2023, "A note on DPO with noisy preferences"
    (conservative DPO), eq. 3.
    """
    logits = _difference(dpo_rewards(answers, objective))
    smoothing = objective.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def hinge(answers: Answers, objective: Objective) -> Tensor:
    """max(0, 1 - beta (r_w - r_l)).

    Liu et al. 2023, "Statistical Rejection Sampling Improves Preference Optimization", eq. 11, after SLiC (Zhao et al.
    2023).
    """
    return F.relu(1 - _difference(dpo_rewards(answers, objective)))


def ipo(answers: Answers, objective: Objective) -> Tensor:
    """(r_w / n_w - r_l / n_l - 1 / (2 beta))^2.

    Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences", eq. 17, with tau
    for beta, and log-probabilities a token, as its authors' results are.
    """
    return (_difference(answers.ratios / answers.tokens) - 1 / (2 * objective.beta)) ** 2


def orpo(answers: Answers, objective: Objective) -> Tensor:
    """-log p_w / n_w - beta log sigmoid(log odds_w - log odds_l), with odds = q / (1 - q) and q = exp(log p / n).

    Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model", eqs. 4 to 7.
    """
    means = answers.means
    log_odds = means - torch.log1p(-means.clamp(max=CERTAIN).exp())
    return -means[:, 0] - objective.beta * F.logsigmoid(_difference(log_odds))


def simpo(answers: Answers, objective: Objective) -> Tensor:
    """-log sigmoid(beta (log p_w / n_w - log p_l / n_l) - margin).

    Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward", eq. 6; its gamma is margin.
    """
    return -F.logsigmoid(objective.beta * _difference(answers.means) - objective.margin)


def _difference(numbers: Tensor) -> Tensor:
    return numbers[:, 0] - numbers[:, 1]


def dpo_rewards(answers: Answers, objective: Objective) -> Tensor:
    """beta r, or beta r / n with ``per_token``: (pairs, 2)."""
    return objective.beta * (answers.ratios / answers.tokens if objective.per_token else answers.ratios)


def mean_rewards(answers: Answers, objective: Objective) -> Tensor:
    """beta log p / n: (pairs, 2)."""
    return objective.beta * answers.means


CERTAIN = -1e-7
"""The mean log-probability above which an answer's odds are no more distinguished: those of 1 are infinite."""
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "dpo": (dpo, dpo_rewards),
    "hinge": (hinge, dpo_rewards),
    "ipo": (ipo, dpo_rewards),
    "orpo": (orpo, mean_rewards),
    "simpo": (simpo, mean_rewards),
}
"""By ``objective.kind``: the loss of pairs, and what their answers are worth by it."""

FIGURES = ("reward_chosen", "reward_rejected", "reward_accuracy", "logprob_chosen", "logprob_rejected")
"""Means over pairs that are written down of every step and evaluation; the last two where there are logits."""
MARGIN = "margin"
"""The column of rows that says by how much an answer is better than the other."""


class SeenPairs:
    """What a loss has seen of pairs."""

    figures: tuple[str, ...] = FIGURES
    """Those of ``FIGURES`` that it tells."""
    has_reference = False
    """Whether answers are compared with what the model as it was made of them."""

    def __init__(self) -> None:
        self._pairs: list[Tensor] = []

    @torch.no_grad()
    def take_down(self, weights: Tensor, losses: Tensor, rewards: Tensor, logprobs: Sequence[Tensor] = ()) -> None:
        """Note some pairs: fp64 (pairs,) each, ``rewards`` (pairs, 2)."""
        chosen, rejected = rewards.unbind(1)
        right = (chosen > rejected).double() + (chosen == rejected).double() / 2  # nothing is learned yet: even chances
        self._pairs.append(torch.stack([weights, losses, chosen, rejected, right, *logprobs]).detach())

    def clear(self) -> None:
        """Forget the pairs that were seen."""
        self._pairs = []

    def pairs(self, device: torch.device) -> Tensor:
        """Weight, loss and ``figures`` of the pairs seen since ``clear``: fp64 (2 + figures, pairs)."""
        none = torch.zeros(2 + len(self.figures), 0, dtype=torch.float64, device=device)
        return torch.cat([none, *self._pairs], dim=1)

    def tally(self, device: torch.device) -> Tensor:
        """Sums over those pairs: their weights, and ``figures`` times these: fp64 (1 + figures,)."""
        weights, _, *figures = self.pairs(device)
        return torch.stack([weights.sum(), *(weights @ figure for figure in figures)])


class PairLoss(SeenPairs):
    """The loss of an objective that is made of log-probabilities, and what it has seen of pairs."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self._objective = objective
        self._loss, self._rewards = LOSSES[objective.kind]
        self.has_reference = objective.has_reference

    def value_and_slopes(self, logprobs: Tensor, batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch over ``denominator``, an fp32 scalar, and its derivative with respect to each of
        ``logprobs``, fp32 (supervised,); zeros where no gradient is wanted."""
        device, slopes = logprobs.device, torch.zeros_like(logprobs)
        if not batch.documents:
            return logprobs.new_zeros(()), slopes
        assert batch.reference is not None or not self._objective.has_reference, "pairs come with the reference"
        answers, weights = self._answers(logprobs, batch), sent(batch.answer_weights()[::2].double(), device)
        with torch.enable_grad():
            answers.logprobs.requires_grad_()
            losses = self._loss(answers, self._objective) - self._objective.supervised * answers.means[:, 0]
            value = (weights * losses).sum()
        if torch.is_grad_enabled():
            (of_answers,) = torch.autograd.grad(value, answers.logprobs)
            counts, number = sent(torch.tensor(batch.targets_of), device), sum(batch.targets_of)
            of_targets = (of_answers.flatten() / denominator).repeat_interleave(counts, output_size=number)
            slopes[:number] = of_targets.float()
        with torch.no_grad():
            rewards = self._rewards(answers, self._objective)
        self.take_down(weights, losses, rewards, answers.logprobs.unbind(1))
        return (value.detach() / denominator).float(), slopes

    @staticmethod
    def _answers(logprobs: Tensor, batch: MicroBatch) -> Answers:
        """The answers of a micro-batch, detached."""
        by_answer = logprobs.detach().double()[: sum(batch.targets_of)].split(batch.targets_of)
        sums = torch.stack([of_answer.sum() for of_answer in by_answer]).view(-1, 2)
        tokens = torch.tensor(batch.targets_of, dtype=torch.float64).view(-1, 2)
        reference = torch.zeros_like(tokens) if batch.reference is None else batch.reference.view(-1, 2)
        return Answers(sums, sent(tokens, sums.device), sent(reference, sums.device))


class RewardLoss(SeenPairs):
    """-log sigmoid(s_w - s_l - margin) + center (s_w + s_l)^2, of the scores s of both answers; the margin is the
    row's, or 0.

    Ouyang et al. 2022, "Training language models to follow instructions with human feedback", eq. 1; Touvron et al.
    2023, "Llama 2", eq. 2, for the margin; Eisenstein et al. 2023, "Helping or Herding?", eq. 2, for the center.
    """

    figures = FIGURES[:3]

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self._center = objective.center

    def value(self, scores: Tensor, batch: MicroBatch, denominator: float) -> Tensor:
        """The loss of a micro-batch over ``denominator``, an fp32 scalar with a gradient.

        Args:
            scores: fp32 (documents,), of all answers of the micro-batch.
        """
        if not batch.documents:
            return scores.sum()  # zero, with the gradients that all ranks must have
        rewards, device = scores.double().view(-1, 2), scores.device
        weights = sent(batch.answer_weights()[::2].double(), device)
        margins = batch.of_documents(batch.columns[MARGIN])[::2].double() if MARGIN in batch.columns else None
        difference = _difference(rewards) - (0.0 if margins is None else sent(margins, device))
        losses = -F.logsigmoid(difference) + self._center * rewards.sum(1) ** 2
        self.take_down(weights, losses, rewards)
        return ((weights * losses).sum() / denominator).float()


def loss_of_pairs(objective: Objective) -> PairLoss | RewardLoss:
    """The loss of an objective that has pairs."""
    return RewardLoss(objective) if objective.scores else PairLoss(objective)


def figures_of(tally: Sequence[float]) -> dict[str, float]:
    """``FIGURES``, and the margin between rewards, of a tally over all ranks; nothing if there was no pair."""
    weight, *sums = tally or (0.0,)
    if not weight:
        return {}
    figures = {name: value / weight for name, value in zip(FIGURES, sums, strict=False)}
    return figures | {"reward_margin": figures["reward_chosen"] - figures["reward_rejected"]}


def ratio_sums(pairs: Tensor) -> list[float]:
    """Of what ``SeenPairs.pairs`` gives, the sums that loss, margin and accuracy follow from: ``EVALUATED`` times 6."""
    weights, losses, chosen, rejected, right, *_ = pairs
    values = (losses, chosen - rejected, right)
    columns = [
        column
        for value in values
        for x in [weights * value]
        for column in (torch.ones_like(x), x, weights, x * x, x * weights, weights * weights)
    ]
    return torch.stack(columns).sum(1).tolist()


EVALUATED = ("eval_loss", "eval_reward_margin", "eval_reward_accuracy")
"""Figures of pairs, in the order of ``ratio_sums``."""


def evaluated_pairs(sums: Sequence[float]) -> tuple[int, dict[str, Figure]]:
    """How many pairs there are, and their figures with intervals, from ``ratio_sums`` over all ranks."""
    by_figure = [RatioSums(*sums[6 * number : 6 * number + 6]) for number in range(len(EVALUATED))]
    figures = {name: sums_of.figure for name, sums_of in zip(EVALUATED, by_figure, strict=True)}
    right = by_figure[-1]
    alike = right.y == right.rows  # then it is a share of pairs
    figures[EVALUATED[-1]] = wilson(right.x, right.rows) if alike else right.figure.within(0.0, 1.0)
    return int(right.rows), figures
