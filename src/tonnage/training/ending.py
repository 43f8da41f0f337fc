"""How a step ends once its passes are through: its numbers are summed, gradients clipped, weights updated, and it is
noted what became of it.

A device is a step behind whoever asks it for work, and idle while its answers are waited for. So where the update can
look at the numbers itself (``Job.reads_late``), it is asked for at once, to change nothing if they are not finite
(``update_unseen``), and they are read when the passes of the next step are asked for as well (``settle``). Of that step
no update is asked for before, so what is skipped, when and why is the same as where every step waits for its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tonnage.checkpoint.save import Cursor
from tonnage.kernels.streams import Reading
from tonnage.training.job import Job
from tonnage.training.nonfinite import Finding


@dataclass
class Ending:
    """The end of a step whose gradients are there."""

    job: Job
    number: int
    """Of the step, from 1."""
    next_position: int
    """The first pack of the run that comes after it."""
    num_micro_batches: int
    totals: Tensor
    """fp64 (2,), on the device: loss and squared norm over all ranks, both as the loss scale made them."""
    first_bad: Callable[[], Finding | None]
    """Looks for what is not finite, where something is not."""
    log: Callable[[str], None]
    counted: tuple[float, float, float]
    """Tokens, computed tokens and supervised tokens of the step, on all ranks."""
    _reading: Reading = field(init=False)
    _is_updated: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._reading = Reading(self.totals)

    @property
    def lr(self) -> float:
        """Learning rate of the step."""
        return self.job.schedule.lr(self.number)

    def update_unseen(self) -> None:
        """Ask for the update before anybody knows whether it may be: with what is not finite it changes nothing."""
        loss, squared = self.totals.unbind()
        norm = (squared / self.job.world.replicas).sqrt()
        shrinks = (norm > self.job.clip) if self.job.clip else torch.zeros_like(norm, dtype=torch.bool)
        factor = torch.where(shrinks, self.job.clip / norm, 1.0)
        factor = torch.where(loss.isfinite() & norm.isfinite(), factor, float("nan"))
        self.job.optimizer.step(self.lr, scale=factor.float())
        _forget_gradients(self.job, self.num_micro_batches)
        self._is_updated = True

    def settle(self, cursor: Cursor) -> tuple[Cursor, Finding | None, dict[str, Any]]:
        """Read the numbers, update if that is still to be done, and take note.

        Returns what ``update`` does; ``cursor`` is where the run was before this step.
        """
        scale = self.job.loss_scale.value
        loss, squared = self._reading.numbers()
        loss, norm = loss / scale, math.sqrt(squared / self.job.world.replicas) / scale
        how: dict[str, Any] = {"lr": self.lr, "next_position": self.next_position, "first_bad": self.first_bad}
        how |= {"loss": loss, "norm": norm, "log": self.log}
        if not self._is_updated:
            return update(self.job, cursor, num_micro_batches=self.num_micro_batches, **how)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.job.optimizer.take_back()
        return _note(self.job, cursor, **how)


def measure(job: Job, losses: Sequence[Tensor]) -> Tensor:
    """What ``losses`` and the gradients there are come to over all ranks: ``Ending.totals``."""
    squared = job.optimizer.gradients.squared_norm().to(job.world.device)
    loss = torch.zeros_like(squared)
    if losses and job.world.speaks:
        loss = sum(losses[1:], losses[0]).double()
    return job.world.total(torch.stack([loss, squared]))


def update(
    job: Job,
    cursor: Cursor,
    *,
    loss: float,
    norm: float,
    lr: float,
    next_position: int,
    num_micro_batches: int,
    first_bad: Callable[[], Finding | None],
    log: Callable[[str], None],
    share: float = 1.0,
) -> tuple[Cursor, Finding | None, dict[str, Any]]:
    """Clip and update by the gradients that are there, and forget them; a step that is not finite changes nothing.

    Args:
        cursor: where the run was before this step.
        loss, norm: of the whole step, without the loss scale.
        next_position: the first pack of the run that comes after it.
        first_bad: looks for what is not finite, where something is not.
        share: what the gradients are multiplied by first.

    Returns:
        Where the run is now, what was found not to be finite, and what of the step is written down.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        shrinking = min(1.0, job.clip / norm) if job.clip and norm else 1.0
        job.optimizer.step(lr, scale=shrinking * share / job.loss_scale.value)
    _forget_gradients(job, num_micro_batches)
    return _note(job, cursor, loss=loss, norm=norm, lr=lr, next_position=next_position, first_bad=first_bad, log=log)


def _forget_gradients(job: Job, num_micro_batches: int) -> None:
    job.optimizer.gradients.clear(keep=job.adds_up and num_micro_batches > 1)  # held most of the time anyway


def _note(
    job: Job,
    cursor: Cursor,
    *,
    loss: float,
    norm: float,
    lr: float,
    next_position: int,
    first_bad: Callable[[], Finding | None],
    log: Callable[[str], None],
) -> tuple[Cursor, Finding | None, dict[str, Any]]:
    """What became of a step that is updated, or changed nothing; see ``update``."""
    scale, number = job.loss_scale.value, cursor.step + 1
    balance = job.experts.after_step(scale) if job.experts else {}
    finite, bad = math.isfinite(loss) and math.isfinite(norm), None
    if not finite:
        bad = first_bad()
        log(f"step {number} skipped: {bad or 'not finite, but finite when run again'}")
    job.loss_scale.after_step(finite=finite)
    after = replace(
        cursor,
        step=number,
        position=next_position,
        num_updates=job.optimizer.num_steps,
        skips=0 if finite else cursor.skips + 1,
        loss_scale=job.loss_scale.value,
        good_steps=job.loss_scale.good_steps,
    )
    told = {
        "step": number,
        "epoch": next_position / job.train_data.num_packs,
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "skipped": not finite,
        **balance,
        **job.moved(),
        **({"not_finite": str(bad)} if bad else {}),
        **({"loss_scale": scale} if job.loss_scale.growth_steps else {}),
    }
    return after, bad, told
