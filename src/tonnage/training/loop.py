"""What happens in a step, and in which order.

A step is: agree on how many supervised tokens it has, run the micro-batches, sum the loss and the squared gradient
norm over the ranks, clip, update, write it down. Evaluation, checkpoints and a polite stop happen between steps.
Nothing is hidden behind this page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tonnage.checkpoint.save import Cursor, Saver
from tonnage.training.answers import Asking, answer
from tonnage.training.batch import MicroBatch, training_steps
from tonnage.training.job import Job
from tonnage.training.judging import Judging, judged
from tonnage.training.memory import HeapLimit, Peak, Phases
from tonnage.training.metrics import Recorder
from tonnage.training.nonfinite import Finding, first_nonfinite, too_many_skips


@dataclass(frozen=True)
class Habits:
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
    habits: Habits,
    recorder: Recorder,
    phases: Phases,
    stop_requested: Callable[[], bool],
) -> bool:
    """Train from the job's cursor to the end, or to the first step border after ``stop_requested`` answers yes.

    It is enough that it does on one rank. Every rank calls this with its own ``job``. The last state is saved in
    either case. Evaluations may end it too, where they find nothing better any more.

    Returns:
        Whether the run went to its end.
    """
    world, optimizer, judging = job.world, job.optimizer, habits.judging
    saver = Saver(
        habits.checkpoints,
        habits.keep,
        world,
        keep_best=judging.saves_best,
        sync_too=recorder.files,
        log=recorder.log,
        progress=phases.progress,
    )
    heap = HeapLimit()
    cursor = saved = job.cursor
    finished = True
    if cursor.step == 0:
        _ask(job, 0, habits.asking, recorder, phases)
        if judging.before:
            _evaluate(job, cursor, judging, recorder, phases)
    evaluated = cursor.step
    began = time.perf_counter()

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
        losses = run_passes(job, step.micro_batches, weight / scale, tokens / scale, phases)
        phases.enter("update")

        # One small sum over the ranks tells loss and gradient norm.
        scaled_loss, squared = world.sum(*world.once(float(sum(losses))), float(optimizer.gradients.squared_norm()))
        cursor, bad, told = update(
            job,
            cursor,
            loss=scaled_loss / scale,
            norm=math.sqrt(squared / world.replicas) / scale,
            lr=job.schedule.lr(step.number),
            next_position=step.next_position,
            num_micro_batches=len(step.micro_batches),
            first_bad=partial(first_nonfinite, job, step, weight / scale),
            log=recorder.log,
        )
        heap.after_step(besides=saver.host_bytes)

        phases.end()
        now = time.perf_counter()
        seconds, began = now - began, now
        recorder.record(**told, **cost(tokens, computed, supervised, seconds, phases.peak))
        if cursor.skips > job.skip_limit:
            break

        recorder.saved(saver.news())
        if step.next_position >= job.num_packs:
            break
        if habits.evaluate_every and step.number % habits.evaluate_every == 0:
            _ask(job, step.number, habits.asking, recorder, phases)
            cursor = _evaluate(job, cursor, judging, recorder, phases)
            evaluated = cursor.step
            began = time.perf_counter()
        is_best = judging.saves_best and cursor.best_step == evaluated == step.number
        if is_best or (habits.checkpoint_every and step.number % habits.checkpoint_every == 0):
            phases.enter("save", micro_batch=0, num_micro_batches=0)
            if habits.saves_beside:
                model_state, optimizer_state, copies = job.snapshot()
                saver.save(cursor, model_state, optimizer_state, job.facts, copies=copies)
            else:
                saver.save(cursor, *job.state(), job.facts, wait=True)
            saved = cursor
            began = time.perf_counter()

    stuck = cursor.skips > job.skip_limit
    if finished and not stuck and cursor != job.cursor and evaluated != cursor.step:
        _ask(job, cursor.step, habits.asking, recorder, phases)
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
        raise too_many_skips(cursor, bad)
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
    return losses


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
    scale, optimizer, number = job.loss_scale.value, job.optimizer, cursor.step + 1
    balance = job.experts.after_step(scale) if job.experts else {}
    finite = math.isfinite(loss) and math.isfinite(norm)
    bad = None
    if finite:
        optimizer.step(lr, scale=(min(1.0, job.clip / norm) if job.clip and norm else 1.0) * share / scale)
    else:
        bad = first_bad()
        log(f"step {number} skipped: {bad or 'not finite, but finite when run again'}")
    job.loss_scale.after_step(finite=finite)
    optimizer.gradients.clear(keep=job.adds_up and num_micro_batches > 1)  # held most of the time anyway
    after = replace(
        cursor,
        step=number,
        position=next_position,
        num_updates=optimizer.num_steps,
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
