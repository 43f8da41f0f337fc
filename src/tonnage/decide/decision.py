"""Everything that is decided before a run: the config, the model's files, the prepared data, the plan.

``tonnage train``, ``plan`` and ``inspect`` all start here, so what is shown is what will happen. Every mistake that can
be found is found here, before a weight is loaded. ``progress`` is told (what, done, total) by whatever takes long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tonnage.config import AnyLaunch, Config, check_trackers, read_config
from tonnage.data import Prepared, Progress, silent
from tonnage.decide.guest import with_guest
from tonnage.decide.hardware import Where, counted, where
from tonnage.decide.images import with_features
from tonnage.decide.models import ModelFound, check_groups, find, with_adapter
from tonnage.decide.other_model import OtherModel, check_no_token_is_new, find_other
from tonnage.decide.plans import PlanQuestion, asked_of, other_plans, plan_run
from tonnage.decide.prompts import prompts_of, questions_of
from tonnage.decide.reference import reference_of, with_reference
from tonnage.decide.rows import prepare_data
from tonnage.decide.teacher import entry_of, with_teacher
from tonnage.planning.batch import resolved
from tonnage.planning.layout import Layout
from tonnage.planning.machine import Machine
from tonnage.planning.plan import Plan
from tonnage.planning.ways import choose
from tonnage.rundir.samples import Prompts


@dataclass(frozen=True)
class Decision:
    """A config and all that follows from it."""

    config: Config
    """The run's: what it left open is written out, but for ``launch.workers``, which the plan has."""
    model: ModelFound
    prepared: Prepared
    plan: Plan
    others: tuple[Plan, ...] = ()
    """Plans of the other numbers of workers that an elastic run may have, the most first."""
    prompts: Prompts | None = None
    """What the model is asked at every evaluation."""
    questions: Prompts | None = None
    """Rows that are answered and scored at every evaluation."""

    @property
    def launch(self) -> AnyLaunch:
        """How the workers are started, with their number written out, and what each reserves."""
        launch = self.config.launch.model_copy(update={"workers": self.plan.workers})
        return launch.on(self.plan.layout.device)


def decide(
    path: str,
    overrides: Sequence[str] = (),
    progress: Progress = silent,
    *,
    force: bool = False,
) -> Decision:
    """Read the config, find the model, prepare the data, make the plan. ``force`` accepts a plan that does not fit into
    memory.

    Raises:
        UserError: the user can mend it; lists every problem found.
    """
    return decide_on(read_config(path, overrides), progress, force=force)


def decide_on(
    config: Config,
    progress: Progress = silent,
    *,
    fresh_output: bool = False,
    force: bool = False,
    before: Layout | None = None,
) -> Decision:
    """As ``decide``, for a config that is read already. ``fresh_output`` also requires that the output directory holds
    no run yet. Of a run that goes on, ``before`` is the layout it had, which counts if it has as many workers again."""
    check_trackers(config)
    launch = config.launch
    config = counted(config)
    if before is not None and before.workers != config.launch.num_workers:
        before = None
    model = find(config, fresh_output=fresh_output)
    if model.files.commit is not None:  # of a hub model, so that whoever goes on with the run finds the same
        config = config.model_copy(update={"revision": model.files.commit})
    config, other = with_adapter(config, model), find_other(config, model)
    prepared = prepare_data(config, model, progress)
    if other is not None:
        check_no_token_is_new(prepared, model, other)
        if other.files.commit is not None:
            config = config.with_keys("objective", {f"{other.key}_revision": other.files.commit})
    if prepared.date:  # whoever goes on with the run another day goes on with this one
        config = config.with_keys("data", {"date": prepared.date})
    prompts, questions = prompts_of(config, prepared), questions_of(config, prepared)
    place = where(config, None, progress)

    def planned(config: Config, anyway: bool = force) -> list[Plan]:
        plan = plan_run(config, model, prepared, place, before, force=anyway)
        return [plan, *other_plans(config, model, prepared, place, force=anyway)]

    why = ""
    if config.adapter == "auto":
        config, why = choose(config, planned, place.machine.kind, force=force)
        if config.adapter == "none":  # then all weights are the run's own, and which they were does not matter
            model = replace(model, weights=replace(model.weights, base_digest=""))
    check_groups(config, model)
    plan, *others = planned(config)
    if why:
        plan = replace(plan, reasons=plan.reasons | {"adapter": why})
    settled = _written_out(config, plan, *others)
    if any(one.choice.saving.every != settled.checkpoint.every for one in others):  # some size would save sooner
        reasons = plan.reasons
        plan, *others = planned(settled)
        plan = replace(plan, reasons=reasons | {"checkpoint.every": f"auto: {plan.saves}"})
    plan, *rest = _asking_before(settled, model, other, prepared, place, (plan, *others), progress)
    settled = settled.model_copy(update={"launch": launch})  # whoever goes on with it may have other GPUs
    return Decision(settled, model, prepared, plan, tuple(rest), prompts, questions)


def _asking_before(
    config: Config,
    model: ModelFound,
    other: OtherModel | None,
    prepared: Prepared,
    place: Where,
    plans: Sequence[Plan],
    progress: Progress,
) -> list[Plan]:
    """Plans with what is asked before training, of the model as it was or of the ``other`` one; the plan itself is the
    first. Raises ``UserError`` where there is no room for that."""
    if config.objective.has_reference:
        entry = reference_of(config, model, other, plans[0], progress)
        plans = [with_reference(plan, entry, config.objective.reference) for plan in plans]
    elif other is not None:
        entry, validation = entry_of(config, other, plans[0], progress), prepared.validation
        tokens = validation.supervised_tokens if validation is not None else 0
        plans = [with_teacher(config, plan, entry, tokens) for plan in plans]
    plans = [plan if other is None else with_guest(config, other, plan, place.machine) for plan in plans]
    return list(with_features(config, model, prepared, plans, place.machine, progress))


def asked(
    path: str | None, overrides: Sequence[str], machine: Machine | None, progress: Progress = silent
) -> PlanQuestion:
    """What ``plan`` is asked of a config (without a file, of ``overrides`` alone): for this machine or, if given, for
    another one. Raises as ``decide``, but for what does not fit."""
    config = counted(read_config(path, overrides), machine)
    model = find(config)
    config, other = with_adapter(config, model), find_other(config, model)
    prepared = prepare_data(config, model, progress)
    if other is not None:
        check_no_token_is_new(prepared, model, other)
    check_groups(config, model)
    return asked_of(config, model, prepared, where(config, machine, progress))


def _written_out(config: Config, *plans: Plan) -> Config:
    """The config with the decided values of what it left open, for a run to have when it goes on."""
    config, _ = resolved(config, plans[0].data.num_packs)
    if config.checkpoint.every != "auto":
        return config
    every = min((plan.choice.saving.every for plan in plans if plan.choice.saving.every), default=0)
    return config.with_keys("checkpoint", {"every": every})
