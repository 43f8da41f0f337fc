"""Steps that a program takes itself, with the parts of a running job: what ``tonnage.Session`` is made of.

    forward_backward(batch)   gradients of a batch, added to those that are there
    update(lr)                clip, update, write it down
    evaluate(packs)           the loss of packs, of which nothing is learnt

Passes, sums and divisions are the loop's (``loop.py``), so batches of the run's own packs, one an update, give its
losses to the bit. Where several batches make an update, all are divided by the weight of the first, and the update
multiplies by that over the weight of all: each token counts as if they were one batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tonnage.checkpoint.save import COMPLETE, Saver, checkpoint_path
from tonnage.data import HeldPacks
from tonnage.errors import user_error
from tonnage.host.core_waits import CoreWaits
from tonnage.kernels.switches import switched_off
from tonnage.planning.layout import Layout
from tonnage.training.batch import Packs, RankStep, draw_of, evaluation_steps
from tonnage.training.ending import StepNumbers, update
from tonnage.training.evaluate import evaluate, evaluate_pairs, judged_loss
from tonnage.training.job import Job
from tonnage.training.loop import cost, run_passes
from tonnage.training.memory import Phases
from tonnage.training.metrics import Recorder
from tonnage.training.nonfinite import FirstNonfinite, first_nonfinite, too_many_skips
from tonnage.training.own_loss import OwnLoss, check_sum, rows_of


@dataclass(frozen=True)
class Batch:
    """What one ``forward_backward`` sees: rows as packs, from ``session.batches()`` or ``session.batch(rows)``."""

    tokens: int
    """Of its documents."""
    supervised_tokens: int
    """Those of them whose loss counts."""
    weight: float
    """Sum of their weights, by which losses are divided."""
    step: RankStep = field(repr=False)
    source: Packs = field(repr=False)
    next_position: int | None = field(default=None, repr=False)
    """Of the run's packs the first that comes after it; None if it is none of these."""

    @staticmethod
    def of(step: RankStep, source: Packs, next_position: int | None = None) -> Batch:
        """The batch of a step of a job of one worker."""
        return Batch(step.tokens, step.supervised_tokens, step.weight, step, source, next_position)


@dataclass
class _Pending:
    """What came since the last update."""

    batches: list[Batch] = field(default_factory=list)
    own: list[OwnLoss | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Each times the loss scale, and over the weight of the first batch."""
    tallies: list[Tensor] = field(default_factory=list)
    """Of the pairs of each."""

    @property
    def weight(self) -> float:
        return sum(batch.weight for batch in self.batches)

    @property
    def num_micro_batches(self) -> int:
        return sum(len(batch.step.micro_batches) for batch in self.batches)


class ByHand:
    """A job of one worker whose steps are taken one by one."""

    def __init__(self, job: Job, recorder: Recorder, phases: Phases, layout: Layout) -> None:
        assert job.world.size == 1
        self._layout = layout
        self.job, self.cursor = job, job.cursor
        self._saver: Saver | None = None
        self._recorder, self._phases = recorder, phases
        self._core_waits = CoreWaits(recorder.log)
        wide = all(one.dtype == torch.float32 for one in job.parameters.values() if one.requires_grad)
        self._takes_more = layout.micro_batches > 1 or wide
        self._pending = _Pending()
        self._settled: set[OwnLoss] = set()
        self._began = time.perf_counter()

    def as_planned(self) -> AbstractContextManager[None]:
        """What is computed inside has the kernels of the plan, whatever this process has used since with others."""
        return switched_off(self._layout.kernels_off)

    def batches(self) -> Iterator[Batch]:
        """The rest of the run's own, from after those that were in an update."""
        steps = self.job.steps(self.cursor)
        return (Batch.of(step, self.job.train_data, step.next_position) for step in steps)

    def batch(self, packs: Packs) -> Batch:
        """All of some packs as one batch, in micro-batches as large as the plan's."""
        deal = replace(self.job.deal, packs_per_step=packs.num_packs)
        return Batch.of(next(evaluation_steps(packs, deal)), packs)

    def forward_backward(self, batch: Batch, own: OwnLoss | None = None) -> float:
        """The loss of a batch, over its weight; its gradients are added to those there are. Raises ``UserError``.

        If it is cut short, by a loss of one's own or from the keyboard, all gradients since the last update are gone:
        those of a part of the batch are among them.
        """
        self._settle(own, batch.source)
        self._check_reference(batch.source)
        self._check_more(batch)
        job, pending = self.job, self._pending
        first = pending.batches[0] if pending.batches else batch
        scale = job.loss_scale.value
        number = self.cursor.step + 1
        draw = draw_of(job.seed, number)  # masks of dropout are those of this step
        micro_batches = tuple(replace(one, draw=draw) for one in batch.step.micro_batches)
        batch = replace(batch, step=replace(batch.step, number=number, micro_batches=micro_batches))
        self._phases.enter("step", step=number, num_micro_batches=len(micro_batches))
        self._use(own)
        try:
            losses = run_passes(job, batch.step, first.weight / scale, batch.tokens / scale, self._phases)
        except BaseException:
            job.optimizer.gradients.clear()
            self._pending = _Pending()
            raise
        loss = float(sum(losses, torch.zeros(())))
        pending.batches.append(batch)
        pending.own.append(own)
        pending.losses.append(loss)
        pending.tallies.append(job.tally())
        self._phases.end()
        return loss / scale * (first.weight / batch.weight)

    def update(self, lr: float | None = None) -> dict[str, Any]:
        """Update the weights by the gradients there are, and forget these; what was written down of it.

        ``lr``: by default that of the run's schedule. What is not finite changes nothing. Raises ``UserError``.
        """
        job, pending = self.job, self._pending
        if not pending.batches:
            raise user_error("no gradients", "a forward_backward before each update", where="update")
        lr = job.schedule.lr(self.cursor.step + 1) if lr is None else lr
        if not (math.isfinite(lr) and 0 <= lr <= 1):
            raise user_error(f"lr is {lr}", "a number from 0 to 1", where="update")
        self._phases.enter("update")
        scale, share = job.loss_scale.value, pending.batches[0].weight / pending.weight
        positions = [batch.next_position for batch in pending.batches if batch.next_position is not None]
        numbers = StepNumbers(
            loss=sum(pending.losses) / scale * share,
            norm=math.sqrt(float(job.optimizer.gradients.squared_norm())) / scale * share,
            lr=lr,
            next_position=max([self.cursor.position, *positions]),
            num_micro_batches=pending.num_micro_batches,
            share=share,
            figures=job.figures(torch.stack(pending.tallies).sum(0).tolist()),
        )
        self.cursor, bad, outcome = update(job, self.cursor, numbers, self._first_bad, self._recorder.log)
        self.job.heap.after_step()
        self._phases.end()
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        tokens = sum(batch.tokens for batch in pending.batches)
        computed = sum(batch.step.computed_tokens for batch in pending.batches)
        supervised = sum(batch.supervised_tokens for batch in pending.batches)
        record = outcome | cost(tokens, computed, supervised, seconds, self._phases.peak)
        record |= self._core_waits.of_step(self.cursor.step, seconds)
        self._pending = _Pending()
        self._recorder.record(**record)
        if self.cursor.skips > job.skip_limit:
            raise too_many_skips(self.cursor, bad)
        return record

    def evaluate(self, packs: Packs, own: OwnLoss | None = None) -> float:
        """The loss of packs over their weight; no gradient, no dropout. Raises ``UserError``."""
        self._settle(own, packs)
        self._use(own)
        self._check_reference(packs)
        self._phases.enter("evaluate")
        self.job.optimizer.finish()
        job = self.job
        where = (job.pipeline, packs, job.deal, job.world)
        if job.pair_loss is not None:
            loss = evaluate_pairs(*where, job.pair_loss)[1]["eval_loss"].value
        else:
            loss = (evaluate if own is not None else judged_loss)(*where)
        self._phases.end()
        return loss

    def save(self, checkpoints: Path, keep: int) -> None:
        """Save the state as of the last update as a checkpoint, and wait for it. Raises ``UserError``."""
        job, recorder = self.job, self._recorder
        self._phases.enter("save")
        saver = self._saver = self._saver or Saver(
            checkpoints, keep, job.world, sync_too=recorder.files, log=recorder.log
        )
        saver.wait()
        is_whole = (checkpoint_path(checkpoints, self.cursor.step) / COMPLETE).exists()
        if not is_whole:  # it is where Ctrl-C interrupted the call before
            saver.save(self.cursor, *job.state(), job.facts, wait=True)
        recorder.saved(saver.news())
        self._phases.end()

    def _use(self, own: OwnLoss | None) -> None:
        for stage in self.job.pipeline.stages:
            stage.own = own or self.job.pair_loss

    @property
    def _distils(self) -> bool:
        return any(stage.distillation is not None for stage in self.job.pipeline.stages)

    def _check_reference(self, packs: Packs) -> None:
        """Refuse pairs of which nobody knows what the model made of them before, and rows of which nobody has asked
        the teacher. Raises ``UserError``."""
        if self._distils and isinstance(packs, HeldPacks):
            observed = "rows in memory, and an objective with a teacher, which was asked before the first step"
            needed = "the run's own rows, of which it was: session.batches(), or data.validation"
            raise user_error(observed, needed, 'objective="supervised", which has no teacher', "batch")
        pair_loss = self.job.pair_loss
        if pair_loss is not None and pair_loss.has_reference and isinstance(packs, HeldPacks):
            observed = "pairs in memory, and an objective that compares with the model as it was before the first step"
            needed = "the run's own pairs, of which that is known: session.batches(), or data.validation"
            raise user_error(observed, needed, 'objective="orpo" or "simpo", which have no reference', "batch")

    def _settle(self, own: OwnLoss | None, rows: Packs) -> None:
        """Try a loss on the first rows that come, until some told something. Raises ``UserError``."""
        weighs = any(stage.factors is not None for stage in self.job.pipeline.stages)
        if own is not None and (self.job.pair_loss is not None or self._distils or weighs):
            kind = "with a teacher" if self._distils else "that weighs tokens" if weighs else "of pairs"
            observed = f"a loss of one's own, and an objective {kind}"
            raise user_error(observed, "one of them", "leave objective out, or loss", "loss")
        if own is not None and own not in self._settled and check_sum(own, rows_of(rows, range(rows.num_packs))):
            self._settled.add(own)

    def _check_more(self, batch: Batch) -> None:
        """Refuse what the plan did not make gradients ready for. Raises ``UserError``."""
        pending, stages = self._pending, self.job.pipeline.stages
        number = pending.num_micro_batches + len(batch.step.micro_batches)
        if number > 1 and not self._takes_more:
            has = "the plan of this session has one, whose gradients are in 16 bits"
            needed = "gradients that several micro-batches add up to in fp32, as planned"
            batch_keys = f"batch={{'sequences': {number * self.job.deal.micro_batch}}}"
            memory_keys = f"memory={{'micro_batch': {self.job.deal.micro_batch}}}"
            change = f"{batch_keys} and {memory_keys} for the session, or smaller batches"
            observed = f"{number} micro-batches before an update, and {has}"
            raise user_error(observed, needed, change, "forward_backward")
        if pending.batches and any(stage.routing is not None and stage.routing.weight for stage in stages):
            observed = "several batches in an update, and a loss of the routers"
            needed, change = "one, by whose tokens that loss is divided", "one batch with all rows, or router_loss=0"
            raise user_error(observed, needed, change, "forward_backward")

    def _first_bad(self) -> FirstNonfinite | None:
        """Where the first of the pending batches goes wrong that does; gradients are gone afterwards."""
        pending, scale = self._pending, self.job.loss_scale.value
        for batch, own in zip(pending.batches, pending.own, strict=True):
            self._use(own)
            denominator = pending.batches[0].weight / scale
            if found := first_nonfinite(self.job, batch.step, denominator, batch.source):
                return found
        return None
