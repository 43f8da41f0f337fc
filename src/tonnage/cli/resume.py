"""``tonnage train --resume``: everything that is decided before a run goes on.

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

from tonnage.errors import Problem, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.checkpoint.save import Cursor
    from tonnage.cli.decide import Decision
    from tonnage.config import Change, Config
    from tonnage.planning.plan import Plan
    from tonnage.rundir.directory import RunDirectory


@dataclass(frozen=True)
class Resumption:
    """A run that goes on: from where, and as what."""

    checkpoint: Path
    cursor: Cursor
    decision: Decision
    changes: tuple[Change, ...]
    """Of the config, since the checkpoint was saved."""
    rates: tuple[float, float] | None = None
    """Learning rates of the last step that is done and the next, where changes make another schedule of it."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train."""
        return self.cursor.position >= self.decision.plan.num_packs


def decide_resumption(
    run: RunDirectory,
    overrides: Sequence[str],
    console: Console,
    *,
    step: int | None,
    allow_changes: bool,
    force: bool = False,
) -> Resumption:
    """Decide how ``run`` goes on from its newest complete checkpoint, or from that of ``step``.

    ``allow_changes`` accepts a config or data that mean another run, ``force`` a plan that does not fit into memory.

    Raises:
        UserError: no run, no usable checkpoint, other data, or a config that means another run.
    """
    from tonnage.checkpoint.resume import choose
    from tonnage.checkpoint.save import Cursor, RunForm, read_state
    from tonnage.cli.decide import decide_on
    from tonnage.config import compare, overridden_key, read_config
    from tonnage.planning.plan import Plan

    if not run.config.exists() or not run.plan.exists():
        raise UserError(Problem("no run", "a run directory", "start one: tonnage train CONFIG", str(run.path)))
    if "output" in map(overridden_key, overrides):
        raise UserError(
            Problem("another output", "the run's own directory", "copy the directory, and resume the copy", "output")
        )
    checkpoint = choose(run.checkpoints, step)
    state = read_state(checkpoint, RunForm)
    config = read_config(run.config, overrides)
    config = config.model_copy(update={"output": str(run.path)})
    changes = compare(state["config"] | {"output": config.output}, config)
    if not allow_changes:
        _refuse([change for change in changes if not change.is_free])
    layout = Plan.read(run.plan).layout
    said = config.parallel.model_dump(include={"tensor", "pipeline"})
    same_workers = config.launch.workers == layout.workers and all(
        size in ("auto", getattr(layout, axis)) for axis, size in said.items()
    )
    decision = decide_on(config, console, force=force, before=layout if same_workers else None)
    if not allow_changes:
        _check_data(state["data"], decision.plan)
    cursor = Cursor.of(state)
    plan, *others = (
        continued(plan, config, cursor, state["packs_per_step"]) for plan in (decision.plan, *decision.others)
    )
    rates = _rates(state, decision.config, plan)
    return Resumption(checkpoint, cursor, replace(decision, plan=plan, others=tuple(others)), tuple(changes), rates)


def _rates(state: Mapping[str, Any], config: Config, plan: Plan) -> tuple[float, float] | None:
    """Learning rates of the last step and the next, unless the schedule is that with which the run was saved."""
    from tonnage.optim.schedule import Schedule
    from tonnage.planning.planner import warmup_of

    def schedule(optimizer: Mapping[str, Any], num_steps: int) -> Schedule:
        warmup = warmup_of(optimizer["warmup"], num_steps)
        return Schedule(optimizer["lr"], num_steps, warmup, optimizer["schedule"], optimizer["final"])

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


def begin_again(run: RunDirectory, resumption: Resumption, console: Console) -> None:
    """Bring the run directory to where the checkpoint was saved, and tell what was done to it."""
    from tonnage.checkpoint.resume import set_aside
    from tonnage.checkpoint.save import interrupted_saves
    from tonnage.cli.terminal import say
    from tonnage.files.writing import write_json

    step = resumption.cursor.step
    for path in interrupted_saves(run.checkpoints):
        console.print(f"{path.name} was interrupted and is not a checkpoint; it will be removed.")
    for path in set_aside(run.checkpoints, step):
        say(console, "A later checkpoint is kept as ", (str(path), "bold"), "; nothing uses it.")
    if num_records := run.rewind_metrics(step):
        console.print(f"{num_records} records of lost steps were moved to {run.cut_metrics.name}.")
    write_json(run.resume, {"checkpoint": resumption.checkpoint.name})


def show_resumption(resumption: Resumption, console: Console) -> None:
    """Print from where the run goes on, and what has changed."""
    from tonnage.cli.terminal import say

    cursor, plan = resumption.cursor, resumption.decision.plan
    say(
        console,
        "Going on from ",
        (str(resumption.checkpoint), "bold"),
        f": {cursor.step:,} of {plan.num_steps:,} steps are done, pack {cursor.position:,} is next.",
    )
    for change in resumption.changes:
        say(console, f"  changed  {change}")
    if resumption.rates is not None:
        last, following = resumption.rates
        say(
            console,
            f"  learning rate {last:.3g} at step {cursor.step:,}, {following:.3g} at the next: its schedule is that of "
            f"{plan.num_steps:,} steps now",
        )


def _refuse(changes: Sequence[Change]) -> None:
    if changes:
        raise UserError(
            *(
                Problem(
                    found=f"{change.before} when the run was saved, now {change.after}",
                    needed="the same, or it is another run",
                    change=f"{change.key}={change.before}, or say --allow-changes",
                    where=change.key,
                )
                for change in changes
            )
        )


def _check_data(saved: Mapping[str, Any], plan: Plan) -> None:
    now = plan.facts()["data"]
    assert isinstance(now, dict)
    if dict(saved) != now:
        differing = [f"{name} {saved.get(name)}, now {now[name]}" for name in now if saved.get(name) != now[name]]
        raise UserError(
            Problem(
                found=f"other data than the run was trained on: {'; '.join(differing)}",
                needed="the same rows, prepared in the same way, so that the next pack is the next pack",
                change="restore the files of data.train and data.validation, the tokenizer and the template; "
                "or say --allow-changes",
                where="data",
            )
        )
