"""Everything that is decided before a run goes on (``tonnage train --resume``).

The same decisions as for a new run, and besides: from which checkpoint, whether the data are the ones that the run was
trained on, and whether the config still means the same run. What would make it another run is refused unless the user
has said so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.config import Change, Config, compare, overridden_key, read_config
from tonnage.data import Progress, silent
from tonnage.errors import Problem, UserError, user_error
from tonnage.files.writing import write_json
from tonnage.planning.batch import steps_of
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory, complete_checkpoints
from tonnage.rundir.records import LossNote
from tonnage.rundir.samples import rewind_samples

if TYPE_CHECKING:
    from tonnage.checkpoint.save import Cursor
    from tonnage.decide.decision import Decision


@dataclass(frozen=True)
class Resumption:
    """A run that goes on: from where, and as what."""

    checkpoint: Path
    cursor: Cursor
    decision: Decision
    changes: tuple[Change, ...]
    """Of the config, since the checkpoint was saved."""
    workers_before: int
    """That the run had until now: where ``launch.workers`` is ``auto``, it goes on with what it finds."""
    rates: tuple[float, float] | None = None
    """Learning rates of the last step that is done and the next, where changes make another schedule of it."""

    other_data: tuple[str, ...] = ()
    """What is not as it was of the data that the run was trained on."""

    @property
    def news(self) -> list[str]:
        """What is not as it was before, a line for each."""
        plan, before = self.decision.plan, self.workers_before
        lines = [f"changed  {change}" for change in self.changes]
        if self.decision.config.launch.workers == "auto" and plan.workers != before:
            lines.append(
                f"changed  {before} -> {plan.workers} workers, as many as there are now (launch.workers: auto)"
            )
        lines += [f"changed  data: {difference}" for difference in self.other_data]
        if self.rates is not None:
            last, following = self.rates
            step = self.cursor.step
            lines.append(
                f"learning rate {last:.3g} at step {step:,}, {following:.3g} at the next: its schedule is that of "
                f"{plan.num_steps:,} steps now"
            )
        return lines

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train: all is done, or evaluations have ended the run."""
        patience = self.decision.config.evaluate.patience
        return self.cursor.position >= self.decision.plan.num_packs or 0 < patience <= self.cursor.stale


def decide_resumption(
    run: RunDirectory,
    overrides: Sequence[str],
    progress: Progress = silent,
    *,
    step: int | None = None,
    allow_changes: bool = False,
    force: bool = False,
    loss: LossNote | None = None,
) -> Resumption:
    """Decide how ``run`` goes on from its newest complete checkpoint, or from that of ``step``.

    ``allow_changes`` accepts a config or data that mean another run, ``force`` a plan that does not fit into memory.
    ``loss`` is the function that was given as the run's own loss.

    Raises:
        UserError: no run, no usable checkpoint, other data, another loss, or a config that means another run.
    """
    from tonnage.checkpoint.resume import choose
    from tonnage.checkpoint.save import Cursor, RunForm, read_state
    from tonnage.decide.decision import decide_on

    check_resumable(run, overrides, step)
    check_loss(run, loss)
    checkpoint = choose(run.checkpoints, step)
    state = read_state(checkpoint, RunForm)
    config = read_config(run.config, overrides)
    if config.adapter == "auto":  # which it was, and was decided
        config = config.model_copy(update={"adapter": read_config(run.config, check_files=False).adapter})
    config = config.model_copy(update={"output": str(run.path)})
    changes = compare(state["config"] | {"output": config.output}, config)
    if not allow_changes and (refused := [change for change in changes if not change.is_free]):
        raise UserError(*map(_another_run, refused))
    layout = Plan.read(run.plan).layout
    sizes = config.parallel.model_dump(include={"tensor", "context", "pipeline"})
    same_axes = all(size in ("auto", getattr(layout, axis)) for axis, size in sizes.items())
    decision = decide_on(config, progress, force=force, before=layout if same_axes else None)
    base = state.get("base", "")
    if base and base != decision.plan.weights.base_digest:
        raise user_error(
            where=str(decision.model.files.directory),
            found="other weights than those that the run was started from, of which it trains a part",
            needed="the same weights: a checkpoint holds only what is trained",
            change="put the model back as it was (or set revision to the commit that it had)",
        )
    other_data = _data_changes(state["data"], decision.plan)
    if other_data and not allow_changes:
        raise user_error(
            found=f"other data than the run was trained on: {'; '.join(other_data)}",
            needed="the same rows, prepared in the same way, so that the next pack is the next pack",
            change="restore the files of data.train and data.validation, the tokenizer and the template; "
            "or say --allow-changes (from Python: allow_changes=True)",
            where="data",
        )
    cursor = Cursor.of(state)
    plan, *others = (
        continued(plan, config, cursor, state["packs_per_step"]) for plan in (decision.plan, *decision.others)
    )
    rates = _rates(state, decision.config, plan)
    decision = replace(decision, plan=plan, others=tuple(others))
    return Resumption(checkpoint, cursor, decision, tuple(changes), layout.workers, rates, other_data)


def check_resumable(run: RunDirectory, overrides: Sequence[str], step: int | None) -> None:
    """What can be found out at once: no run, no usable checkpoint, an output. Raises ``UserError``."""
    from tonnage.checkpoint.resume import choose

    if not run.config.exists() or not run.plan.exists():
        raise user_error("no run", "a run directory", "start one: tonnage train CONFIG", str(run.path))
    if "output" in map(overridden_key, overrides):
        raise user_error(
            "another output", "the run's own directory", "copy the directory, and resume the copy", "output"
        )
    if not complete_checkpoints(run.checkpoints) and run.is_locked_elsewhere():
        raise run.is_taken()
    choose(run.checkpoints, step)


def check_loss(run: RunDirectory, now_given: LossNote | None) -> None:
    """Refuse to go on with another loss than the run's, or where a program took the steps. Raises ``UserError``."""
    if run.by_hand.exists():
        raise user_error(
            "a run whose steps a program takes, with a tonnage.Session",
            "a run whose steps tonnage takes",
            f"for another run from its weights, name them as the model: {run.export}",
            str(run.path),
        )
    at_start = run.own_loss()
    if at_start is None and now_given is None:
        return
    if at_start is None or now_given is None:
        now = f"{now_given.module}.{now_given.name}" if now_given else "none is given (here it would be cross-entropy)"
        was = f"{at_start.module}.{at_start.name}" if at_start else "cross-entropy"
        change = f"tonnage.open_run({str(run.path)!r}).resume(loss=...), from Python" if at_start else "leave loss out"
        raise user_error(f"the loss of the run is {was}, and {now}", "the same loss", change, str(run.loss))
    if (now_given.module, now_given.name) != (at_start.module, at_start.name):
        observed = f"{now_given.module}.{now_given.name}, and the run began with {at_start.module}.{at_start.name}"
        raise user_error(observed, "the same loss", f"give {at_start.name}", str(run.loss))
    if now_given.source != at_start.source:
        observed = f"another source of {now_given.module}.{now_given.name} than when the run began"
        raise user_error(observed, "the same function", "put its source back as it was", str(run.loss))


def _rates(state: Mapping[str, Any], config: Config, plan: Plan) -> tuple[float, float] | None:
    """Learning rates of the last step and the next; None where the schedule is the one that the run was saved with."""
    from tonnage.optim.schedule import Schedule

    def schedule(optimizer: Mapping[str, Any], num_steps: int) -> Schedule:
        lengths = [steps_of(optimizer.get(key, 0), num_steps) for key in ("warmup", "decay")]
        return Schedule.of(optimizer, num_steps, *lengths)

    before = schedule(state["config"]["optimizer"], state["num_steps"])
    after = schedule(config.optimizer.model_dump(), plan.num_steps)
    step = state["step"]
    return None if before == after or step >= plan.num_steps else (before.lr(step), after.lr(step + 1))


def continued(plan: Plan, config: Config, cursor: Cursor, packs_per_step: int) -> Plan:
    """The plan of a whole run whose first part had ``packs_per_step`` and is over.

    Where that is not the plan's, a length in steps counts the steps that are done, one in epochs the packs.
    """
    if plan.packs_per_step == packs_per_step:
        return plan
    num_packs = plan.num_packs
    if config.steps is not None:
        num_packs = cursor.position + max(0, config.steps - cursor.step) * plan.packs_per_step
    rest = math.ceil(max(0, num_packs - cursor.position) / plan.packs_per_step)
    return replace(plan, num_packs=num_packs, num_steps=cursor.step + rest)


@dataclass(frozen=True)
class Cleared:
    """What was done to a run's directory so that it goes on from a checkpoint."""

    interrupted: tuple[Path, ...]
    """Saves that were interrupted: no checkpoints; whoever saves next removes them."""
    set_aside: tuple[Path, ...]
    """Later checkpoints, where they are now; nothing uses them."""
    lost_records: int
    """Records of steps that will be done again, moved to ``metrics.cut.jsonl``."""


def begin_again(run: RunDirectory, resumption: Resumption) -> Cleared:
    """Bring the run directory to where the checkpoint was saved."""
    from tonnage.checkpoint.resume import set_aside
    from tonnage.checkpoint.save import interrupted_saves

    step = resumption.cursor.step
    interrupted = tuple(interrupted_saves(run.checkpoints))
    aside = tuple(set_aside(run.checkpoints, step))
    lost = run.rewind_metrics(step)
    rewind_samples(run, step)
    write_json(run.resume, {"checkpoint": resumption.checkpoint.name})
    return Cleared(interrupted, aside, lost)


def _another_run(change: Change) -> Problem:
    return Problem(
        found=f"{change.before} when the run was saved, now {change.after}",
        needed="the same, or it is another run",
        change=f"{change.undone}, or say --allow-changes (from Python: allow_changes=True)",
        where=change.key,
    )


def _data_changes(saved: Mapping[str, Any], plan: Plan) -> tuple[str, ...]:
    """What has changed of the data since the checkpoint was saved."""
    now = plan.facts()["data"]
    assert isinstance(now, dict)
    different = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return tuple(f"{name} {saved.get(name)}, now {now.get(name)}" for name in different)
