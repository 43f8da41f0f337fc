"""What happens in a step, and in which order.

A step is: agree on how many supervised tokens it has, run the micro-batches, sum the loss and the squared gradient
norm over the ranks, clip, update, write it down (``ending``). Evaluation, checkpoints and a polite stop happen between
steps. Nothing is hidden behind this page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tonnage.checkpoint.save import Cursor, Saver
from tonnage.host.core_waits import CoreWaits
from tonnage.training.answers import Asking, answer
from tonnage.training.batch import RankStep
from tonnage.training.ending import Ending, measure
from tonnage.training.job import Job
from tonnage.training.judging import Judging, compared, judged
from tonnage.training.kto import KtoLoss
from tonnage.training.memory import Peak, Phases
from tonnage.training.metrics import Recorder
from tonnage.training.nonfinite import FirstNonfinite, too_many_skips


@dataclass(frozen=True)
class BetweenSteps:
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

    def due_after(self, step: int) -> tuple[bool, bool]:
        """Whether the run is evaluated after a step, and whether it is saved."""
        evaluates = self.evaluate_every != 0 and step % self.evaluate_every == 0
        saves = self.checkpoint_every != 0 and step % self.checkpoint_every == 0
        return evaluates, saves


def train(
    job: Job, between_steps: BetweenSteps, recorder: Recorder, phases: Phases, stop_requested: Callable[[], bool]
) -> bool:
    """Train from the job's cursor to the end, or to the first step border after ``stop_requested`` answers yes.

    One rank's yes ends it on all. Every rank calls this with its own ``job``. The last state is saved in either case.
    Evaluations may end it too, where they find nothing better any more.

    Returns:
        Whether the run went to its end.
    """
    course = _Course(job, between_steps, recorder, phases)
    late: Ending | None = None
    finished = True
    course.begin()

    for step in job.steps(job.cursor):
        if course.is_over:
            break
        phases.enter("step", step=step.number, num_micro_batches=len(step.micro_batches), micro_batch=0)
        # Sizes of the step, and whether to stop before it: one sum over the ranks.
        sizes = job.world.once(step.tokens, step.computed_tokens, step.supervised_tokens, step.weight)
        tokens, computed, supervised, weight, stops = job.world.sum(*sizes, stop_requested())
        if stops:
            finished = False
            break

        # Forward and backward, in turns, or in the order of a pipeline's schedule. Each loss is already divided by the
        # weight of the whole step, so they add up.
        denominator, scaled_tokens = weight / job.loss_scale.value, tokens / job.loss_scale.value
        passes = partial(run_passes, job, step, denominator, scaled_tokens, phases)
        losses = passes()

        # The results of the step before are read only now, while the device works on this one. If they were not finite,
        # that step was run again to find out why, and these gradients are gone.
        if late is not None:
            course.settle(late)
            late = None
            if course.is_stuck:
                break
            if course.cursor.skips:
                losses = passes()

        # One small sum over the ranks tells loss and gradient norm.
        phases.enter("update")
        ending = Ending(job, step, denominator, measure(job, losses), recorder.log, (tokens, computed, supervised))
        evaluates, saves = between_steps.due_after(step.number)
        is_last = step.next_position >= job.num_packs
        if job.reads_late:
            ending.update_unseen()
            if not (evaluates or saves or is_last):
                late = ending
                continue
        course.settle(ending)
        if is_last or course.is_stuck:
            break

        if evaluates:
            course.evaluate()
        if saves or course.is_best:
            course.save()

    if late is not None:  # a stop came before it was settled
        course.settle(late)
    if finished and not course.is_stuck:
        course.evaluate_last()
    course.end()
    return finished


def run_passes(job: Job, step: RankStep, denominator: float, tokens: float, phases: Phases) -> list[Tensor]:
    """Forward and backward passes of a step's micro-batches; their losses, each over ``denominator``, those of routers
    over ``tokens``."""
    optimizer, losses, batches = job.optimizer, list[Tensor](), step.micro_batches
    if job.pair_loss is not None:
        job.pair_loss.clear()
    if isinstance(job.pair_loss, KtoLoss):
        job.pair_loss.set_level(job.pipeline, batches, job.world)
    with job.quantized(step.number > job.quantizes_after):
        for turn in job.pipeline.passes(batches, denominator, tokens):
            if turn.last:
                optimizer.prefetch()  # state that rests elsewhere comes during the backward pass
            if turn.kind == "backward":
                optimizer.finish()  # an update that went on in the background; all blocks have waited for theirs
            phases.enter(turn.kind, micro_batch=turn.number)
            losses += turn.run()
            if turn.kind == "backward":
                job.heap.after_passes()
    return losses


class _Course:
    """How a run goes: where it is, and what is done at the end of each step and between steps."""

    def __init__(self, job: Job, between_steps: BetweenSteps, recorder: Recorder, phases: Phases) -> None:
        self._job, self._between_steps, self._recorder, self._phases = job, between_steps, recorder, phases
        self._saver = Saver(
            between_steps.checkpoints,
            between_steps.keep,
            job.world,
            keep_best=between_steps.judging.saves_best,
            sync_too=recorder.files,
            log=recorder.log,
            progress=phases.progress,
        )
        self.cursor = self._saved = job.cursor
        """Where the run is, and where it was at its last checkpoint."""
        self._evaluated = self.cursor.step
        """The step after which it was evaluated last."""
        self._core_waits = CoreWaits(recorder.log)
        self._began = 0.0
        """When the time of the next step to be written down began."""
        self._bad: FirstNonfinite | None = None
        """What was not finite in the last step, if anything was found."""

    @property
    def is_stuck(self) -> bool:
        """Whether too many steps in a row were skipped."""
        return self.cursor.skips > self._job.skip_limit

    @property
    def is_over(self) -> bool:
        """Whether evaluations end the run."""
        return is_over(self.cursor, self._between_steps.judging)

    @property
    def is_best(self) -> bool:
        """Whether the step was just found to be the best, and is saved for that."""
        is_best = self.cursor.best_step == self._evaluated == self.cursor.step
        return self._between_steps.judging.saves_best and is_best

    def begin(self) -> None:
        """Before the first step, ask the model and, if the run is judged then, evaluate it."""
        if self.cursor.step == 0:
            self._ask()
            if self._between_steps.judging.before:
                self._judge()
        self._began = time.perf_counter()

    def settle(self, ending: Ending) -> None:
        """Find out what became of a step, and write it down."""
        self.cursor, self._bad, record = ending.settle(self.cursor)
        self._job.heap.after_step(besides=self._saver.host_bytes)
        self._phases.end()
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        waited = self._core_waits.of_step(self.cursor.step, seconds)
        self._recorder.record(**record, **cost(*ending.counted, seconds, self._phases.peak), **waited)
        if not self.is_stuck:
            self._recorder.saved(self._saver.news())

    def evaluate(self) -> None:
        self._ask()
        self._judge()
        self._evaluated = self.cursor.step
        self._began = time.perf_counter()

    def evaluate_last(self) -> None:
        """As ``evaluate``, after the last step, if there was any and it is not evaluated yet.

        The state is saved first, so that nothing is lost if the evaluation fails. Where evaluations find the best step
        or end the run, it is saved afterwards, as what they find is part of it.
        """
        if self.cursor == self._job.cursor or self._evaluated == self.cursor.step:
            return
        judging = self._between_steps.judging
        if not (judging.saves_best or judging.patience):
            self.save()
        self.evaluate()

    def save(self) -> None:
        """Save a checkpoint; training goes on meanwhile if there is room for a copy of the state."""
        job, saver = self._job, self._saver
        self._phases.enter("save", micro_batch=0, num_micro_batches=0)
        if self._between_steps.saves_beside:
            model_state, optimizer_state, copies = job.snapshot()
            saver.save(self.cursor, model_state, optimizer_state, job.facts, copies=copies)
        else:
            saver.save(self.cursor, *job.state(), job.facts, wait=True)
        self._saved = self.cursor
        self._began = time.perf_counter()

    def end(self) -> None:
        """Save the last state, wait for it, and write down what is said of the whole run. Raises where it is stuck."""
        job, cursor, recorder, phases, saver = self._job, self.cursor, self._recorder, self._phases, self._saver
        if self.is_over:
            best = f"{cursor.best_figure} {cursor.best_value:.4f} at step {cursor.best_step}"
            recorder.log(f"stopping early: {cursor.stale} evaluations in a row were no better than {best}")
        phases.enter("save", micro_batch=0, num_micro_batches=0)
        if cursor.step != self._saved.step:
            saver.save(cursor, *job.state(), job.facts, wait=True)
        saver.wait()
        recorder.saved(saver.news())
        phases.end()
        recorder.memory(cursor.step, phases.of_all_ranks(job.world))
        if job.experts:
            recorder.record(step=cursor.step, expert_shares=job.experts.shares())
        if self.is_stuck:
            raise too_many_skips(cursor, self._bad)

    def _ask(self) -> None:
        """Let the model answer the prompts, if there are any, and write the answers down."""
        job, asking, phases = self._job, self._between_steps.asking, self._phases
        if asking is None:
            return
        phases.enter("answer", micro_batch=0, num_micro_batches=0)
        began = time.perf_counter()
        tokens = answer(job.pipeline, asking, job.deal, job.world, progress=phases.advance)
        answers = list(map(asking.decode, tokens))
        self._recorder.answered(self.cursor.step, asking.prompts, answers, time.perf_counter() - began)

    def _judge(self) -> None:
        """Evaluate and write it down. What is found before the first step is compared with nothing."""
        cursor, judging, began = self.cursor, self._between_steps.judging, time.perf_counter()
        record = judged(self._job, judging, self._phases)
        if record:
            self._recorder.record(step=cursor.step, **record, eval_seconds=time.perf_counter() - began)
            if cursor.step:
                self.cursor = compared(record, judging, cursor)


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
