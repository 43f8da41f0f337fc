"""What happens in a step, and in which order.

A step is: agree on how many supervised tokens it has, run the micro-batches, sum the loss and the squared gradient
norm over the ranks, clip, update, write it down (``ending``). Evaluation, checkpoints and a polite stop happen between
steps. Nothing is hidden behind this page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tonnage.checkpoint.save import Cursor, Saver
from tonnage.host.core_waits import CoreWaits
from tonnage.training.answers import Asking, answer
from tonnage.training.batch import MicroBatch, training_steps
from tonnage.training.ending import Ending, measure
from tonnage.training.job import Job
from tonnage.training.judging import Judging, judged
from tonnage.training.memory import Peak, Phases
from tonnage.training.metrics import Recorder
from tonnage.training.nonfinite import Finding, first_nonfinite, too_many_skips


@dataclass(frozen=True)
class BetweenSteps:
    """What happens between steps, and how often."""

    evaluate_every: int
    """0 is only at the end."""
    checkpoint_every: int
    """0 is only at the end."""
    checkpoints: Path
    keep: int
    saves_beside: bool = True
    """Whether training goes on, from a copy of its state, while a checkpoint is written."""
    asking: Asking | None = None
    """What the model is asked at every evaluation, and before the first step."""
    judging: Judging = field(default_factory=Judging)
    """What follows from evaluations."""


def train(
    job: Job,
    between_steps: BetweenSteps,
    recorder: Recorder,
    phases: Phases,
    stop_requested: Callable[[], bool],
) -> bool:
    """Train from the job's cursor to the end, or to the first step border after ``stop_requested`` answers yes.

    One rank's yes ends it on all. Every rank calls this with its own ``job``. The last state is saved in either case.
    Evaluations may end it too, where they find nothing better any more.

    Returns:
        Whether the run went to its end.
    """
    world, judging = job.world, between_steps.judging
    saver = Saver(
        between_steps.checkpoints,
        between_steps.keep,
        world,
        keep_best=judging.saves_best,
        sync_too=recorder.files,
        log=recorder.log,
        progress=phases.progress,
    )
    step_log = _StepLog(job, recorder, phases, saver)
    cursor = saved = job.cursor
    late: Ending | None = None
    finished = True
    if cursor.step == 0:
        _ask(job, 0, between_steps.asking, recorder, phases)
        if judging.before:
            _evaluate(job, cursor, judging, recorder, phases)
    evaluated = cursor.step
    step_log.began = time.perf_counter()

    for step in training_steps(
        job.train_data,
        job.deal,
        seed=job.seed,
        num_packs=job.num_packs,
        steps_done=cursor.step,
        position=cursor.position,
    ):
        if is_over(cursor, judging):
            break
        phases.enter("step", step=step.number, num_micro_batches=len(step.micro_batches), micro_batch=0)
        tokens, computed, supervised, weight, stops = world.sum(
            *world.once(step.tokens, step.computed_tokens, step.supervised_tokens, step.weight), stop_requested()
        )
        if stops:
            finished = False
            break

        scale = job.loss_scale.value

        # Forward and backward, in turns, or in the order of a pipeline's schedule. Each loss is already divided by the
        # weight of the whole step, so they add up.
        passes = partial(run_passes, job, step.micro_batches, weight / scale, tokens / scale, phases)
        losses = passes()

        # The results of the step before are read only now, while the device works on this one. If they were not finite,
        # that step was run again to find out why, and these gradients are gone.
        if late is not None:
            cursor, late = step_log.settle(late, cursor), None
            if cursor.skips > job.skip_limit:
                break
            if cursor.skips:
                losses = passes()

        # One small sum over the ranks tells loss and gradient norm.
        phases.enter("update")
        ending = Ending(
            job,
            number=step.number,
            next_position=step.next_position,
            num_micro_batches=len(step.micro_batches),
            totals=measure(job, losses),
            first_bad=partial(first_nonfinite, job, step, weight / scale),
            log=recorder.log,
            counted=(tokens, computed, supervised),
        )
        evaluates = between_steps.evaluate_every and step.number % between_steps.evaluate_every == 0
        saves = between_steps.checkpoint_every and step.number % between_steps.checkpoint_every == 0
        is_last = step.next_position >= job.num_packs
        if job.reads_late:
            ending.update_unseen()
            if not (evaluates or saves or is_last):
                late = ending
                continue
        cursor = step_log.settle(ending, cursor)
        if is_last or cursor.skips > job.skip_limit:
            break

        if evaluates:
            _ask(job, step.number, between_steps.asking, recorder, phases)
            cursor = _evaluate(job, cursor, judging, recorder, phases)
            evaluated = cursor.step
            step_log.began = time.perf_counter()
        if saves or (judging.saves_best and cursor.best_step == evaluated == step.number):
            phases.enter("save", micro_batch=0, num_micro_batches=0)
            if between_steps.saves_beside:
                model_state, optimizer_state, copies = job.snapshot()
                saver.save(cursor, model_state, optimizer_state, job.facts, copies=copies)
            else:
                saver.save(cursor, *job.state(), job.facts, wait=True)
            saved = cursor
            step_log.began = time.perf_counter()

    if late is not None:  # one that a stop has overtaken
        cursor = step_log.settle(late, cursor)
    stuck = cursor.skips > job.skip_limit
    if finished and not stuck and cursor != job.cursor and evaluated != cursor.step:
        _ask(job, cursor.step, between_steps.asking, recorder, phases)
        cursor = _evaluate(job, cursor, judging, recorder, phases)
    if is_over(cursor, judging):
        best = f"{cursor.best_figure} {cursor.best_value:.4f} at step {cursor.best_step}"
        recorder.log(f"stopping early: {cursor.stale} evaluations in a row were no better than {best}")
    phases.enter("save", micro_batch=0, num_micro_batches=0)
    if cursor != saved:
        saver.save(cursor, *job.state(), job.facts, wait=True)
    saver.wait()
    recorder.saved(saver.news())
    phases.end()
    recorder.memory(cursor.step, phases.of_all_ranks(world))
    if job.experts:
        recorder.record(step=cursor.step, expert_shares=job.experts.shares())
    if stuck:
        raise too_many_skips(cursor, step_log.bad)
    return finished


def run_passes(
    job: Job, batches: Sequence[MicroBatch], denominator: float, tokens: float, phases: Phases
) -> list[Tensor]:
    """Forward and backward passes of micro-batches; their losses, each over ``denominator``, those of routers over
    ``tokens``."""
    optimizer, losses = job.optimizer, list[Tensor]()
    for one in job.pipeline.passes(batches, denominator, tokens):
        if one.last:
            optimizer.prefetch()  # state that rests elsewhere comes during the backward pass
        if one.kind == "backward":
            optimizer.finish()  # an update that went on in the background; all blocks have waited for theirs
        phases.enter(one.kind, micro_batch=one.number)
        losses += one.run()
        if one.kind == "backward":
            job.heap.after_passes()
    return losses


class _StepLog:
    """What is written down of every step, in their order."""

    def __init__(self, job: Job, recorder: Recorder, phases: Phases, saver: Saver) -> None:
        self._job, self._recorder, self._phases, self._saver = job, recorder, phases, saver
        self._core_waits = CoreWaits(recorder.log)
        self.began = 0.0
        """When the time of the next step to be written down began."""
        self.bad: Finding | None = None
        """What was not finite in the last step, if anything was found."""

    def settle(self, ending: Ending, cursor: Cursor) -> Cursor:
        """Find out what became of a step, and write it down; where the run is then."""
        cursor, self.bad, told = ending.settle(cursor)
        self._job.heap.after_step(besides=self._saver.host_bytes)
        self._phases.end()
        now = time.perf_counter()
        seconds, self.began = now - self.began, now
        waited = self._core_waits.of_step(cursor.step, seconds)
        self._recorder.record(**told, **cost(*ending.counted, seconds, self._phases.peak), **waited)
        if cursor.skips <= self._job.skip_limit:
            self._recorder.saved(self._saver.news())
        return cursor


def cost(tokens: float, computed: float, supervised: float, seconds: float, peak: Peak) -> dict[str, Any]:
    """What of a step is written down besides: tokens, time and memory."""
    return {
        "tokens": int(tokens),
        "computed_tokens": int(computed),
        "supervised_tokens": int(supervised),
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "memory": {"device_peak": peak.device, "host_peak": peak.host},
    }


def is_over(cursor: Cursor, judging: Judging) -> bool:
    """Whether so many evaluations in a row found nothing better that the run ends."""
    return 0 < judging.patience <= cursor.stale


def _evaluate(job: Job, cursor: Cursor, judging: Judging, recorder: Recorder, phases: Phases) -> Cursor:
    """Evaluate and write it down; the cursor, with what later evaluations are compared with. What was found before the
    first step is no step's."""
    began = time.perf_counter()
    found = judged(job, judging, phases)
    if not found.record:
        return cursor
    recorder.record(step=cursor.step, **found.record, eval_seconds=time.perf_counter() - began)
    return found.compared(judging, cursor) if cursor.step else cursor


def _ask(job: Job, step: int, asking: Asking | None, recorder: Recorder, phases: Phases) -> None:
    if asking is None:
        return
    phases.enter("answer", micro_batch=0, num_micro_batches=0)
    began = time.perf_counter()
    answers = answer(
        job.pipeline,
        asking,
        job.deal,
        job.world,
        progress=lambda done, total: phases.progress(micro_batch=done, num_micro_batches=total),
    )
    recorder.answered(step, asking.prompts, list(map(asking.decode, answers)), time.perf_counter() - began)
