"""Where strangers are introduced: from a plan to the parts of a running job.

Order: build on meta, shard, allocate the shard, fill it, give it an optimizer. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tonnage.checkpoint.resume import restore
from tonnage.checkpoint.save import Cursor, step_of
from tonnage.config import Config, Objective, Source, as_json
from tonnage.config.bounds import figure_of
from tonnage.data import PackedDataset
from tonnage.files.reading import read_record
from tonnage.kernels.switches import is_on, switch_off
from tonnage.kernels.threads import use_threads
from tonnage.model import flash
from tonnage.model.attention import compile_loops
from tonnage.optim.loss_scale import LossScale
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.schedule import Schedule
from tonnage.parallel.deferred import WeightGradients
from tonnage.parallel.deterministic import compute_the_same
from tonnage.parallel.parallelize import Precision
from tonnage.planning.batch import steps_of
from tonnage.planning.plan import Plan
from tonnage.planning.seconds import pack_costs
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import Prompts
from tonnage.training.answers import Asking
from tonnage.training.batch import Deal
from tonnage.training.building import Stages, stages_of, trains_of_run
from tonnage.training.features import features_of, look_at_images, with_features, with_pictures
from tonnage.training.job import Job
from tonnage.training.judging import Judging, Scoring
from tonnage.training.kto import KtoLoss
from tonnage.training.loop import BetweenSteps
from tonnage.training.loss import soft_targets
from tonnage.training.memory import HeapLimit, Phases, set_up_heap
from tonnage.training.moves import DiskUse, HostUse
from tonnage.training.own_loss import OwnLoss
from tonnage.training.pipeline import Pipeline
from tonnage.training.preferences import PairLoss, RewardLoss
from tonnage.training.reference import reference_scores, with_reference
from tonnage.training.resting import check_tiers, optimizer_of
from tonnage.training.routing import ExpertLoad
from tonnage.training.scorers import scorer_of
from tonnage.training.setting import WorkerSetting
from tonnage.training.teacher import ask_teacher, with_teacher
from tonnage.training.token_losses import factors_of


def assemble(setting: WorkerSetting, checkpoint: Path | None = None, loss: OwnLoss | None = None) -> Job:
    """Build this rank's part of what the plan says; with a ``checkpoint``, as it was when that was saved. ``loss`` is
    what is trained instead of what the config says.

    Raises:
        StoppedEarly: a rank was asked to stop in a pass before training.
    """
    config = setting.config
    check_tiers(setting.layout, setting.world)
    if loss is not None:
        loss.check_documents(setting.layout.context)
    _prepare_process(setting)
    objective = config.objective if loss is None else Objective()
    step, scores = step_of(checkpoint) if checkpoint else 0, None
    has_images, sees = setting.plan.data.features_path is not None, setting.plan.data.sees
    if objective.teacher or objective.reference or has_images:  # before there is anything of the model that is trained
        datasets = _datasets(config, setting.plan)
        rows = datasets["train_data"], datasets["validation_data"]
        if has_images:
            look_at_images(setting, *rows)
        if objective.teacher:
            ask_teacher(setting, *rows)
        elif objective.reference:
            scores = reference_scores(setting, *rows, step, None)
    job = _job(setting, checkpoint, loss)
    if has_images:
        job = with_features(job, setting)
    elif sees:
        job = with_pictures(job, setting)
    if objective.distils:
        job = with_teacher(job, setting)
    if objective.has_reference:
        if scores is None:
            scores = reference_scores(setting, job.train_data, job.validation_data, step, job)
        job = with_reference(job, scores)
    return job


def _job(setting: WorkerSetting, checkpoint: Path | None, loss: OwnLoss | None) -> Job:
    config, plan, world, phases, layout = setting.config, setting.plan, setting.world, setting.phases, setting.layout
    stages = stages_of(setting, load=checkpoint is None)
    pair_loss = _preference_loss(config.objective)
    for loss_model in stages.loss_models:
        loss_model.own, loss_model.factors = loss or pair_loss, factors_of(config.objective)
        if config.objective.distils and loss is None:
            share, temperature = config.objective.supervised, config.objective.temperature
            loss_model.distillation = partial(soft_targets, share=share, temperature=temperature)

    phases.enter("optimizer")
    optimizer = optimizer_of(setting, stages)
    pipeline = _pipeline(setting, stages, optimizer)
    cursor, was_fp16 = Cursor(), False
    if checkpoint is not None:
        phases.enter("load")
        cursor, was_fp16 = _go_on(checkpoint, optimizer, stages, setting)

    routings = [stage.routing for stage in pipeline.stages if stage.routing is not None]
    experts = ExpertLoad(routings, world, setting.log) if routings else None
    loss_scale, settings = _loss_scale(config, cursor if was_fp16 else None), config.optimizer
    decay_steps = steps_of(settings.decay, plan.num_steps)
    keeps = layout.device == "cpu" and not layout.returns_memory
    return Job(
        world=world,
        pipeline=pipeline,
        parameters=stages.parameters,
        optimizer=optimizer,
        schedule=Schedule.of(settings.model_dump(), plan.num_steps, plan.warmup_steps, decay_steps),
        loss_scale=loss_scale,
        clip=settings.clip,
        skip_limit=settings.skips,
        adds_up=layout.zero >= 2 or not layout.sharded,
        deal=_deal(setting),
        num_packs=plan.num_packs,
        seed=config.seed,
        **_datasets(config, plan),
        cursor=cursor,
        facts={**plan.facts(), "config": as_json(config)},
        # The next loss scale, and the account of experts, are settled with each step.
        reads_late=optimizer.is_unseen and experts is None and not loss_scale.growth_steps,
        pair_loss=pair_loss,
        pages=stages.pages,
        quantizes_after=config.quantize_aware.after_steps,
        experts=experts,
        disk=DiskUse(optimizer, stages.on_disk) if layout.tiers_on_disk else None,
        host=HostUse(optimizer, stages.inputs, stages.masters or stages.on_host) if layout.uses_host else None,
        heap=HeapLimit(plan.kept_bytes if keeps else None),
        saved_elsewhere=frozenset(stages.shared if len(layout.stages) - 1 in stages.by_number else ()),
        saves_still=trains_of_run(config, plan).all,
    )


def _preference_loss(objective: Objective) -> PairLoss | RewardLoss | KtoLoss | None:
    if not objective.is_preference:
        return None
    if objective.scores:
        return RewardLoss(objective)
    return (KtoLoss if objective.rows == "verdicts" else PairLoss)(objective)


def prepare_kernels(config: Config, plan: Plan, phases: Phases, *, was_forked: bool = False) -> None:
    """Compile what a worker computes with on a CPU, with its threads: before it is watched, as that takes longer on a
    slow machine than a step ever should."""
    switch_off(plan.layout.kernels_off)
    if plan.layout.device == "cpu" or plan.layout.update_tier == "host":
        phases.enter("compile")
        use_threads(plan.threads_per_worker)
        compile_loops(Precision.of(config.dtype, 1).compute)
    elif was_forked:  # then OMP_NUM_THREADS comes too late
        torch.set_num_threads(plan.threads_per_worker)


def _prepare_process(setting: WorkerSetting) -> None:
    """What holds for all that this process computes: its threads, heap and kernels."""
    config, plan, layout, device = setting.config, setting.plan, setting.layout, setting.world.device
    if config.deterministic:
        compute_the_same(device)
    switch_off(layout.kernels_off)
    # Of newer flash attention it is not known that it adds in the same order every time.
    flash.choose(device, setting.log, newer=is_on("attention") and not config.deterministic)
    if layout.kernels_off:
        setting.log(f"kernels that are off: {', '.join(layout.kernels_off)}")
    if device.type == "cpu" or layout.update_tier == "host":
        use_threads(plan.threads_per_worker)
    if device.type == "cpu":
        set_up_heap(returns=layout.returns_memory, padded=layout.arrangement == "padded")


def _pipeline(setting: WorkerSetting, stages: Stages, optimizer: ShardedOptimizer) -> Pipeline:
    blocks = [block for loss_model in stages.loss_models for block in loss_model.anatomy.blocks]
    return Pipeline(
        {number: stage.loss_model for number, stage in stages.by_number.items()},
        setting.world,
        setting.precision.compute,
        schedule=setting.layout.schedule,
        zero=setting.layout.zero,
        shared=[name for name in sorted(stages.shared) if stages.parameters[name].requires_grad],
        gradients=optimizer.gradients,
        later=WeightGradients(blocks, optimizer.gradients.came) if setting.takes_passes_apart else None,
    )


def _deal(setting: WorkerSetting) -> Deal:
    layout, plan, world = setting.layout, setting.plan, setting.world
    ranks = 1 if world.context is None else world.context.size
    return Deal(
        plan.packs_per_step,
        layout.micro_batch,
        world.data_rank // ranks,
        world.data_size // ranks,
        round_to=setting.multiple,
        share_prefixes=layout.share_prefixes,
        padded_tokens=layout.row_tokens if layout.arrangement == "padded" else 0,
        chunk=plan.model.chunk,
        context=world.context,
        costs=pack_costs(plan.model),
    )


def _datasets(config: Config, plan: Plan) -> dict[str, Any]:
    """What a job trains on and is judged by, with the names of the sources."""
    paths = {"validation_data": plan.data.validation_path, "general_data": plan.data.general_path}
    return {
        "train_data": PackedDataset.open(Path(plan.data.train_path)),
        "source_names": names_of(config),
        "general_names": dict(enumerate(_named(config.evaluate.general or ()))),
        **{name: PackedDataset.open(Path(path)) if path else None for name, path in paths.items()},
    }


def names_of(config: Config) -> dict[int, str]:
    """Names of the sources of validation rows by the number that documents have: sources of training are counted
    first."""
    data = config.data
    if not isinstance(data.validation, tuple):
        return dict(enumerate(_named(data.train)))
    return dict(enumerate(_named(data.validation), start=len(data.train)))


def _named(sources: Sequence[Source]) -> list[str]:
    """What sources are called: their files, with a number where several are called so."""
    names = [
        Path(source.path).name if source.split == "train" else f"{source.path} {source.split}" for source in sources
    ]
    return [name if names.count(name) == 1 else f"{name} #{number}" for number, name in enumerate(names, start=1)]


def between_steps_of(run: RunDirectory, config: Config, plan: Plan) -> BetweenSteps:
    """What a run does between steps. Raises ``UserError`` for a scorer that cannot be imported."""
    is_asked = config.evaluate.prompts and run.prompts.exists()
    return BetweenSteps(
        config.evaluate.steps_between(plan.num_steps),
        config.checkpoint.steps_between,
        run.checkpoints,
        config.checkpoint.keep,
        plan.layout.saves_beside,
        _asking(run, run.prompts, config, plan) if is_asked else None,
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


def _asking(run: RunDirectory, prompts: Path, config: Config, plan: Plan) -> Asking:
    from transformers import AutoTokenizer

    recorded, layout = read_record(prompts, Prompts), plan.layout
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer, trust_remote_code=config.trust_remote_code)
    return Asking(
        tuple(recorded.prompts),
        frozenset(recorded.stop_tokens),
        layout.row_tokens,
        lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
        images=features_of(recorded.prompts, run, plan),
    )


def _go_on(
    checkpoint: Path, optimizer: ShardedOptimizer, stages: Stages, setting: WorkerSetting
) -> tuple[Cursor, bool]:
    """Fill parameters and optimizer from a checkpoint; returns how far the run was, and whether it was in fp16."""
    tensors, saves_all = optimizer.tensors(), trains_of_run(setting.config, setting.plan).all
    saved = {name: parameter for name, parameter in stages.parameters.items() if parameter.requires_grad or saves_all}
    state = restore(checkpoint, saved, tensors, setting.world, setting.log, stages.elsewhere, setting.phases.progress)
    optimizer.adopt(tensors)
    cursor = Cursor.of(state)
    optimizer.num_steps = cursor.num_updates
    setting.log(f"going on from {checkpoint.name}: step {cursor.step} is done, pack {cursor.position} is next")
    if stages.pages is not None:
        stages.pages.rest(list(stages.pages))
    return cursor, state["config"]["precision"] == "fp16"


def _loss_scale(config: Config, cursor: Cursor | None) -> LossScale:
    """What the loss is multiplied by so that fp16 holds its gradients: 1 for all other types. ``cursor``: where a run
    in fp16 goes on."""
    if config.precision != "fp16":
        return LossScale()
    scale = LossScale(config.optimizer.loss_scale, config.optimizer.loss_scale_growth)
    if cursor is not None:
        scale.value, scale.good_steps = cursor.loss_scale, cursor.good_steps
    return scale
