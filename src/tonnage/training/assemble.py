"""Where strangers are introduced: from a plan to the parts of a running job.

Order: build on meta, shard, allocate the shard, fill it, give it an optimizer. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path

from torch import nn

from tonnage.checkpoint.resume import restore
from tonnage.checkpoint.save import Cursor
from tonnage.config import Config, Source, as_json
from tonnage.config.bounds import figure_of
from tonnage.data import PackedDataset
from tonnage.files.reading import read_record
from tonnage.kernels.switches import is_on, switch_off
from tonnage.kernels.threads import use_threads
from tonnage.model import flash
from tonnage.offload.pages import joined
from tonnage.optim.adamw import AdamW
from tonnage.optim.loss_scale import LossScale
from tonnage.optim.schedule import Schedule
from tonnage.parallel.deferred import WeightGradients
from tonnage.parallel.deterministic import compute_the_same
from tonnage.parallel.world import World
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import Prompts
from tonnage.training.answers import Asking
from tonnage.training.batch import Deal
from tonnage.training.building import stages_of, trains_of
from tonnage.training.job import Job
from tonnage.training.judging import Judging, Scoring
from tonnage.training.loop import BetweenSteps
from tonnage.training.memory import HeapLimit, Phases, set_up_heap
from tonnage.training.moves import DiskUse, HostUse
from tonnage.training.own_loss import OwnLoss
from tonnage.training.pipeline import Pipeline
from tonnage.training.resting import check_tiers, optimizer_of
from tonnage.training.routing import ExpertLoad
from tonnage.training.scorers import scorer_of
from tonnage.training.setting import Setting


def assemble(
    config: Config,
    plan: Plan,
    world: World,
    log: Callable[[str], None],
    phases: Phases,
    checkpoint: Path | None = None,
    loss: OwnLoss | None = None,
) -> Job:
    """Build everything that ``plan`` says, on this rank; with a ``checkpoint``, as it was when that was saved. ``loss``
    is what is trained instead of cross-entropy."""
    setting, layout = Setting(config, plan, world, log, phases), plan.layout
    check_tiers(layout, world)
    if config.deterministic:
        compute_the_same(world.device)
    switch_off(layout.kernels_off)
    # Nobody has seen newer ones add in one order.
    flash.choose(world.device, log, newer=is_on("attention") and not config.deterministic)
    if layout.kernels_off:
        log(f"kernels that are off: {', '.join(layout.kernels_off)}")
    if world.device.type == "cpu" or layout.update_tier == "host":
        use_threads(plan.threads_per_worker)
    if world.device.type == "cpu":
        set_up_heap(returns=layout.returns_memory, padded=layout.arrangement == "padded")

    stages = stages_of(setting, load=checkpoint is None)
    for stage in stages.values():
        stage.loss_model.own = loss
    parameters = {name: one for stage in stages.values() for name, one in stage.model.named_parameters()}
    shared = {name for stage in stages.values() for name in stage.shared}
    first = next(iter(stages.values()))
    places = [stage.placed for stage in stages.values()]
    on_disk = [place.on_disk for place in places if place.on_disk is not None]
    masters = [place.masters for place in places if place.masters is not None]
    on_host = [place.on_host for place in places if place.on_host is not None]
    for one in masters:
        parameters |= one.parameters
    blocks = [block for stage in stages.values() for block in stage.loss_model.anatomy.blocks]
    loss_models = {number: stage.loss_model for number, stage in stages.items()}

    phases.enter("optimizer")
    pages = joined([one.pages for one in on_disk])
    optimizer = optimizer_of(
        setting, parameters, list(loss_models.values()), shared=shared, pages=pages, masters=masters, tiled=first.tiled
    )
    pipeline = Pipeline(
        loss_models,
        world,
        setting.precision.compute,
        schedule=layout.schedule,
        zero=layout.zero,
        shared=[name for name in sorted(shared) if parameters[name].requires_grad],
        gradients=optimizer.gradients,
        later=WeightGradients(blocks, optimizer.gradients.came) if setting.takes_passes_apart else None,
    )
    cursor = Cursor()
    if checkpoint is not None:
        phases.enter("load")
        elsewhere = reduce(frozenset.__and__, (stage.elsewhere for stage in stages.values()))
        cursor = _go_on(checkpoint, optimizer, parameters, elsewhere, setting)
        if pages is not None:
            pages.rest(list(pages))

    validation, keeps = plan.data.validation_path, layout.device == "cpu" and not layout.returns_memory
    experts, loss_scale = _experts(pipeline, setting), _loss_scale(config, cursor)
    return Job(
        world=world,
        pipeline=pipeline,
        parameters=parameters,
        optimizer=optimizer,
        schedule=Schedule(
            config.optimizer.lr,
            plan.num_steps,
            plan.warmup_steps,
            config.optimizer.schedule,
            config.optimizer.final,
            from_zero=config.optimizer.warmup_from == "zero",
            rise=config.optimizer.warmup_shape,
        ),
        loss_scale=loss_scale,
        clip=config.optimizer.clip,
        skip_limit=config.optimizer.skips,
        adds_up=layout.zero >= 2 or not layout.sharded,
        train_data=PackedDataset.open(Path(plan.data.train_path)),
        validation_data=PackedDataset.open(Path(validation)) if validation else None,
        deal=Deal(
            plan.packs_per_step,
            layout.micro_batch,
            world.data_rank,
            world.data_size,
            round_to=setting.multiple,
            share_prefixes=layout.share_prefixes,
            padded_tokens=layout.row_tokens if layout.arrangement == "padded" else 0,
            chunk=plan.model.chunk,
        ),
        num_packs=plan.num_packs,
        seed=config.seed,
        source_names=names_of(config),
        general_data=PackedDataset.open(Path(plan.data.general_path)) if plan.data.general_path else None,
        general_names=dict(enumerate(_named(config.evaluate.general or ()))),
        cursor=cursor,
        facts={**plan.facts(), "config": as_json(config)},
        # The next loss scale, and the account of experts, are settled with each step.
        reads_late=optimizer.is_unseen and experts is None and not loss_scale.growth_steps,
        pages=pages,
        experts=experts,
        disk=DiskUse(optimizer, on_disk) if layout.tiers_on_disk else None,
        host=HostUse(optimizer, first.inputs, masters or on_host) if layout.uses_host else None,
        heap=HeapLimit(plan.choice.kept_bytes if keeps else None),
        saved_elsewhere=frozenset(shared) if len(layout.stages) - 1 in stages else frozenset(),
        saves_still=trains_of(config).all,
    )


def names_of(config: Config) -> dict[int, str]:
    """Names of the sources of validation rows by their number, as documents have it: all sources count, those of
    training first."""
    data = config.data
    if not isinstance(data.validation, tuple):
        return dict(enumerate(_named(data.train)))
    return dict(enumerate(_named(data.validation), start=len(data.train)))


def _named(sources: Sequence[Source]) -> list[str]:
    """What sources are called: their files, with a number where several are called so."""
    names = [Path(one.path).name if one.split == "train" else f"{one.path} {one.split}" for one in sources]
    return [name if names.count(name) == 1 else f"{name} #{at}" for at, name in enumerate(names, start=1)]


def between_steps_of(run: RunDirectory, config: Config, plan: Plan) -> BetweenSteps:
    """What a run does between steps. Raises ``UserError`` for a scorer that cannot be imported."""
    return BetweenSteps(
        config.evaluate.steps_between(plan.num_steps),
        config.checkpoint.steps_between,
        run.checkpoints,
        config.checkpoint.keep,
        plan.layout.saves_beside,
        asking_of(run, config, plan),
        judging_of(run, config, plan),
    )


def judging_of(run: RunDirectory, config: Config, plan: Plan) -> Judging:
    """How the run is judged on its way. Raises ``UserError`` for a scorer that cannot be imported."""
    evaluate, best, scoring = config.evaluate, config.checkpoint.best, None
    if (figure := figure_of(evaluate.scorer)) is not None:
        names = dict.fromkeys(["exact_match", figure])
        scorers = {name: scorer_of(evaluate.scorer if name == figure else name, evaluate.pattern) for name in names}
        scoring = Scoring(_asking(run, run.questions, config, plan), scorers)
    return Judging(
        before=evaluate.before,
        figure="eval_loss" if best == "none" else best,
        saves_best=best != "none",
        patience=evaluate.patience,
        scoring=scoring,
    )


def asking_of(run: RunDirectory, config: Config, plan: Plan) -> Asking | None:
    """What the model is asked at every evaluation; None where nothing is."""
    if not (config.evaluate.prompts and run.prompts.exists()):
        return None
    return _asking(run, run.prompts, config, plan)


def _asking(run: RunDirectory, prompts: Path, config: Config, plan: Plan) -> Asking:
    from transformers import AutoTokenizer

    found, layout = read_record(prompts, Prompts), plan.layout
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer, trust_remote_code=config.trust_remote_code)
    return Asking(
        tuple(found.prompts),
        frozenset(found.stop_tokens),
        layout.row_tokens,
        lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
    )


def _go_on(
    checkpoint: Path,
    optimizer: AdamW,
    parameters: Mapping[str, nn.Parameter],
    elsewhere: frozenset[str],
    setting: Setting,
) -> Cursor:
    """Fill parameters and optimizer from a checkpoint; returns how far the run was."""
    tensors = optimizer.tensors()
    saved = {name: one for name, one in parameters.items() if one.requires_grad or trains_of(setting.config).all}
    state = restore(checkpoint, saved, tensors, setting.world, setting.log, elsewhere)
    optimizer.adopt(tensors)
    cursor = Cursor.of(state)
    optimizer.num_steps = cursor.num_updates
    setting.log(f"going on from {checkpoint.name}: step {cursor.step} is done, pack {cursor.position} is next")
    return cursor


def _experts(pipeline: Pipeline, setting: Setting) -> ExpertLoad | None:
    """Who keeps account of the experts, if the model has some that can be heard."""
    routings = [stage.routing for stage in pipeline.stages if stage.routing is not None]
    return ExpertLoad(routings, setting.world, setting.log) if routings else None


def _loss_scale(config: Config, cursor: Cursor) -> LossScale:
    """What the loss is multiplied by so that fp16 holds its gradients: 1 for all other types."""
    if config.precision != "fp16":
        return LossScale()
    found = LossScale(config.optimizer.loss_scale, config.optimizer.loss_scale_growth)
    if cursor.loss_scale != 1:
        found.value, found.good_steps = cursor.loss_scale, cursor.good_steps
    return found
