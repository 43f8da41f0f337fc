"""How a step ends once its passes are through: its numbers are summed, gradients clipped, weights updated, and it is
noted what became of it.

A device runs a step behind the process that gives it work, and is idle while that process waits for its results. So
where the update can look at the numbers itself (``Job.reads_late``), it is queued at once and changes nothing if they
are not finite (``update_unseen``); the numbers are read once the passes of the next step are queued, too (``settle``).
The update of that step is queued only afterwards, so the same steps are skipped as where every step waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tonnage.checkpoint.save import Cursor
from tonnage.kernels.streams import Reading
from tonnage.training.batch import RankStep
from tonnage.training.job import Job
from tonnage.training.nonfinite import FirstNonfinite, first_nonfinite


@dataclass(frozen=True)
class StepNumbers:
    """What a step came to over all ranks, and how it updates the weights."""

    loss: float
    """Of the whole step, without the loss scale, as the norm is."""
    norm: float
    lr: float
    next_position: int
    """The first pack of the run that comes after it."""
    num_micro_batches: int
    share: float = 1.0
    """What the gradients are multiplied by first."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Means over the pairs of the step."""


@dataclass
class Ending:
    """The end of a step whose gradients are there."""

    job: Job
    step: RankStep
    denominator: float
    """By which its losses were divided."""
    totals: Tensor
    """fp64, on the device: loss and squared norm over all ranks, both as the loss scale made them, and the tally of
    pairs."""
    log: Callable[[str], None]
    counted: tuple[float, float, float]
    """Tokens, computed tokens and supervised tokens of the step, on all ranks."""
    _reading: Reading = field(init=False)
    _is_updated: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._reading = Reading(self.totals)

    @property
    def lr(self) -> float:
        return self.job.schedule.lr(self.step.number)

    def update_unseen(self) -> None:
        """Queue the update before loss and norm are read; if they are not finite, it changes nothing."""
        loss, squared = self.totals[:2].unbind()
        norm = (squared / self.job.world.replicas).sqrt()
        shrinks = (norm > self.job.clip) if self.job.clip else torch.zeros_like(norm, dtype=torch.bool)
        factor = torch.where(shrinks, self.job.clip / norm, 1.0)
        factor = torch.where(loss.isfinite() & norm.isfinite(), factor, float("nan"))
        self.job.optimizer.step(self.lr, scale=factor.float())
        _forget_gradients(self.job, len(self.step.micro_batches))
        self._is_updated = True

    def settle(self, cursor: Cursor) -> tuple[Cursor, FirstNonfinite | None, dict[str, Any]]:
        """Read the numbers, update if that is still to be done, and take note.

        Returns what ``update`` does; ``cursor`` is where the run was before this step.
        """
        scale = self.job.loss_scale.value
        loss, squared, *tally = self._reading.numbers()
        loss, norm = loss / scale, math.sqrt(squared / self.job.world.replicas) / scale
        numbers = StepNumbers(
            loss, norm, self.lr, self.step.next_position, len(self.step.micro_batches), figures=self.job.figures(tally)
        )
        first_bad = partial(first_nonfinite, self.job, self.step, self.denominator)
        return update(self.job, cursor, numbers, first_bad, self.log, is_updated=self._is_updated)


def _forget_gradients(job: Job, num_micro_batches: int) -> None:
    job.optimizer.gradients.clear(keep=job.adds_up and num_micro_batches > 1)  # held most of the time anyway


def measure(job: Job, losses: Sequence[Tensor]) -> Tensor:
    """Sum of ``losses``, squared norm of the gradients and tally of pairs, over all ranks: ``Ending.totals``."""
    squared = job.optimizer.gradients.squared_norm().to(job.world.device)
    loss = torch.zeros_like(squared)
    if losses and job.world.speaks:
        loss = sum(losses[1:], losses[0]).double()
    return job.world.total(torch.cat([torch.stack([loss, squared]), job.tally()]))


def update(
    job: Job,
    cursor: Cursor,
    numbers: StepNumbers,
    first_bad: Callable[[], FirstNonfinite | None],
    log: Callable[[str], None],
    *,
    is_updated: bool = False,
) -> tuple[Cursor, FirstNonfinite | None, dict[str, Any]]:
    """Clip and update by the gradients that are there, and forget them; a step that is not finite changes nothing.

    Args:
        cursor: where the run was before this step.
        first_bad: looks for what is not finite, where something is not.
        is_updated: whether the update was queued, unseen, and is taken back if it is not finite.

    Returns:
        Where the run is now, what was found not to be finite, and what of the step is written down.
    """
    scale, number = job.loss_scale.value, cursor.step + 1
    finite, bad = math.isfinite(numbers.loss) and math.isfinite(numbers.norm), None
    if not is_updated:
        if finite:
            shrinking = min(1.0, job.clip / numbers.norm) if job.clip and numbers.norm else 1.0
            job.optimizer.step(numbers.lr, scale=shrinking * numbers.share / scale)
        _forget_gradients(job, numbers.num_micro_batches)
    elif not finite:
        job.optimizer.take_back()
    balance = job.experts.after_step(scale) if job.experts else {}
    if not finite:
        bad = first_bad()
        log(f"step {number} skipped: {bad or 'not finite, but finite when run again'}")
    job.loss_scale.after_step(finite=finite)
    after = replace(
        cursor,
        step=number,
        position=numbers.next_position,
        num_updates=job.optimizer.num_steps,
        skips=0 if finite else cursor.skips + 1,
        loss_scale=job.loss_scale.value,
        good_steps=job.loss_scale.good_steps,
    )
    record = {
        "step": number,
        "epoch": numbers.next_position / job.train_data.num_packs,
        "loss": numbers.loss,
        "grad_norm": numbers.norm,
        "lr": numbers.lr,
        "skipped": not finite,
        **numbers.figures,
        **balance,
        **job.moved(),
        **({"not_finite": str(bad)} if bad else {}),
        **({"loss_scale": scale} if job.loss_scale.growth_steps else {}),
    }
    return after, bad, record
