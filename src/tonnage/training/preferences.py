"""Losses of pairs of answers of which one is preferred: a function each, with its formula and its source.

Most are made of the answers' log-probabilities (``PairLoss``), that of a reward model of its scores (``RewardLoss``). A
function takes what is known of the pairs of a micro-batch (``Answers``) and gives the loss of each. The engine sums
these by the pairs' weights and divides once, by the weight of all pairs of the step: so it does not matter which pairs
share a row, a micro-batch or a worker. A new kind is a function, its line in ``LOSSES``, and its name in the schema.
That of answers which are each good or bad needs more than its own document (``kto``).

In the formulas log p is the log-probability of an answer, the sum over its tokens; log p / n divides it by their
number; r is log p less that of the reference; w is the chosen answer, l the rejected one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tonnage.config import Objective
from tonnage.host.locked import sent
from tonnage.parallel.world import World
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


class PreferenceLoss(ABC):
    """A loss of documents of two answers, and what it has seen of them since ``clear``."""

    has_reference = False
    """Whether answers are compared with what the model as it was made of them."""
    kept: int
    """Numbers that are kept of a document, its weight the first."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._seen: list[Tensor] = []

    @torch.no_grad()
    def take_down(self, *numbers: Tensor) -> None:
        """Note some documents: ``kept`` times fp64 (documents,)."""
        self._seen.append(torch.stack(numbers).detach())

    def clear(self) -> None:
        """Forget the documents that were seen."""
        self._seen = []

    def seen(self, device: torch.device) -> Tensor:
        """What is kept of the documents seen: fp64 (``kept``, documents)."""
        return torch.cat([torch.zeros(self.kept, 0, dtype=torch.float64, device=device), *self._seen], dim=1)

    @abstractmethod
    def tally(self, device: torch.device) -> Tensor:
        """Sums over the documents seen, from which ``figures`` follow: fp64 (sums,)."""

    @abstractmethod
    def figures(self, tally: Sequence[float]) -> dict[str, float]:
        """What is written down of a step, from a tally over all ranks; nothing if there was no document."""

    @abstractmethod
    def evaluated(self, world: World) -> tuple[int, dict[str, Figure]]:
        """How many documents all ranks have seen, and their figures with intervals; the same on every rank."""


class _OfPairs(PreferenceLoss):
    """That of pairs of which one answer is preferred."""

    names: tuple[str, ...] = FIGURES
    """Those of ``FIGURES`` that it tells."""
    kept = 2 + len(FIGURES)
    """Weight, loss and the figures in ``names``."""

    def take_down_pairs(self, weights: Tensor, losses: Tensor, rewards: Tensor, *logprobs: Tensor) -> None:
        """Note some pairs: fp64 (pairs,) each, ``rewards`` (pairs, 2)."""
        chosen, rejected = rewards.unbind(1)
        right = (chosen > rejected).double() + (chosen == rejected).double() / 2  # nothing is learned yet: even chances
        self.take_down(weights, losses, chosen, rejected, right, *logprobs)

    def tally(self, device: torch.device) -> Tensor:
        """Sums over the pairs seen: their weights, and these times each figure: fp64 (1 + figures,)."""
        weights, _, *figures = self.seen(device)
        return torch.stack([weights.sum(), *(weights @ figure for figure in figures)])

    def figures(self, tally: Sequence[float]) -> dict[str, float]:
        """Those in ``names``, and the margin between rewards."""
        weight, *sums = tally
        if not weight:
            return {}
        figures = {name: value / weight for name, value in zip(self.names, sums, strict=True)}
        return figures | {"reward_margin": figures["reward_chosen"] - figures["reward_rejected"]}

    def evaluated(self, world: World) -> tuple[int, dict[str, Figure]]:
        """Loss, margin and accuracy: ``EVALUATED``."""
        weights, losses, chosen, rejected, right, *_ = self.seen(world.device)
        sums = ratio_sums(world, *((value, weights) for value in (losses, chosen - rejected, right)))
        figures = {name: sums_of.figure for name, sums_of in zip(EVALUATED, sums, strict=True)}
        accuracy = sums[-1]
        alike = accuracy.y == accuracy.rows  # then it is a share of pairs
        share = wilson(accuracy.x, accuracy.rows) if alike else accuracy.figure.within(0.0, 1.0)
        return int(accuracy.rows), figures | {EVALUATED[-1]: share}


class PairLoss(_OfPairs):
    """The loss of pairs that is made of log-probabilities."""

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        self._loss, self._rewards = LOSSES[objective.kind]
        self.has_reference = objective.has_reference

    def value_and_slopes(self, logprobs: Tensor, batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        """As the function of that name, of every pair's loss and that of its chosen answer alone, if that is wanted."""

        def losses_of(answers: Answers) -> Tensor:
            return self._loss(answers, self.objective) - self.objective.supervised * answers.means[:, 0]

        def note(answers: Answers, weights: Tensor, losses: Tensor) -> None:
            rewards = self._rewards(answers, self.objective)
            self.take_down_pairs(weights, losses, rewards, *answers.logprobs.unbind(1))

        assert not batch.documents or batch.reference is not None or not self.has_reference, "the reference is missing"
        return value_and_slopes(logprobs, batch, denominator, losses_of, note)


class RewardLoss(_OfPairs):
    """-log sigmoid(s_w - s_l - margin) + center (s_w + s_l)^2, of the scores s of both answers; the margin is the
    row's, or 0.

    Ouyang et al. 2022, "Training language models to follow instructions with human feedback", eq. 1; Touvron et al.
    2023, "Llama 2", eq. 2, for the margin; Eisenstein et al. 2023, "Helping or Herding?", eq. 2, for the center.
    """

    names, kept = FIGURES[:3], 5

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
        losses = -F.logsigmoid(difference) + self.objective.center * rewards.sum(1) ** 2
        self.take_down_pairs(weights, losses, rewards)
        return ((weights * losses).sum() / denominator).float()


def value_and_slopes(
    logprobs: Tensor,
    batch: MicroBatch,
    denominator: float,
    losses_of: Callable[[Answers], Tensor],
    note: Callable[[Answers, Tensor, Tensor], None],
) -> tuple[Tensor, Tensor]:
    """The loss of a micro-batch over ``denominator``, an fp32 scalar, and its derivative with respect to each of
    ``logprobs``, fp32 (supervised,); zeros where no gradient is wanted.

    Args:
        logprobs: fp32 (supervised,), those of all targets, answer after answer.
        batch: The micro-batch.
        denominator: The weight of all documents of the step.
        losses_of: Gives the loss of every document, fp64 (documents,).
        note: Is shown answers, weights and losses of the documents, without gradients.
    """
    device, slopes = logprobs.device, torch.zeros_like(logprobs)
    if not batch.documents:
        return logprobs.new_zeros(()), slopes
    answers, weights = _answers(logprobs, batch), sent(batch.answer_weights()[::2].double(), device)
    with torch.enable_grad():
        answers.logprobs.requires_grad_()
        losses = losses_of(answers)
        value = (weights * losses).sum()
    if torch.is_grad_enabled():
        (of_answers,) = torch.autograd.grad(value, answers.logprobs)
        counts, number = sent(torch.tensor(batch.targets_of), device), sum(batch.targets_of)
        of_targets = (of_answers.flatten() / denominator).repeat_interleave(counts, output_size=number)
        slopes[:number] = of_targets.float()
    with torch.no_grad():
        note(answers, weights, losses)
    return (value.detach() / denominator).float(), slopes


def _answers(logprobs: Tensor, batch: MicroBatch) -> Answers:
    """The answers of a micro-batch, detached."""
    by_answer = logprobs.detach().double()[: sum(batch.targets_of)].split(batch.targets_of)
    sums = torch.stack([of_answer.sum() for of_answer in by_answer]).view(-1, 2)
    tokens = torch.tensor(batch.targets_of, dtype=torch.float64).view(-1, 2)
    reference = torch.zeros_like(tokens) if batch.reference is None else batch.reference.view(-1, 2)
    return Answers(sums, sent(tokens, sums.device), sent(reference, sums.device))


EVALUATED = ("eval_loss", "eval_reward_margin", "eval_reward_accuracy")
"""Figures of pairs in evaluations."""


def ratio_sums(world: World, *means: tuple[Tensor, Tensor]) -> list[RatioSums]:
    """Sums over all ranks, from which means follow: of values by weights, fp64 (documents,) each. Documents whose
    weight is 0 are not there."""
    columns = [
        column
        for value, weights in means
        for x in [weights * value]
        for column in ((weights > 0).double(), x, weights, x * x, x * weights, weights * weights)
    ]
    sums = world.sum(*world.once(*torch.stack(columns).sum(1).tolist()))
    return [RatioSums(*sums[at : at + 6]) for at in range(0, len(sums), 6)]
