"""Where strangers are introduced: from a plan to the parts of a running job.

Order: build on meta, shard, allocate the shard, fill it, give it an optimizer. Nothing is decided here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.checkpoint.resume import restore
from tonnage.checkpoint.save import Cursor
from tonnage.config import Config, as_json
from tonnage.data import PackedDataset
from tonnage.errors import Problem, UserError
from tonnage.kernels.moments import Codec
from tonnage.kernels.threads import use_threads
from tonnage.kernels.widening import processor_is_slow, settle
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly, load_weights
from tonnage.model.files import ModelFiles, read_model
from tonnage.model.matching import find_places
from tonnage.model.tensor_plan import tensor_plan
from tonnage.optim import gradients
from tonnage.optim.adamw import AdamW
from tonnage.optim.loss_scale import LossScale
from tonnage.optim.on_disk import OnDisk
from tonnage.optim.on_host import OnHost
from tonnage.optim.schedule import Schedule
from tonnage.optim.tiers import InMemory, Tier, Trained
from tonnage.parallel.block_inputs import BlockInputs
from tonnage.parallel.compile import Compile
from tonnage.parallel.deferred import WeightGradients
from tonnage.parallel.parallelize import Precision, parallelize
from tonnage.parallel.recompute import Recompute
from tonnage.parallel.stages import keep_stage
from tonnage.parallel.streaming import StreamedBlocks, over_pages, stream_blocks
from tonnage.parallel.tensor import copies_of
from tonnage.parallel.world import World
from tonnage.planning.memory import Layout
from tonnage.planning.plan import Plan
from tonnage.planning.space import offload_directories
from tonnage.training.batch import Deal, round_to
from tonnage.training.loss import LossModel
from tonnage.training.memory import Phases, set_up_heap
from tonnage.training.moves import DiskUse, HostUse
from tonnage.training.pipeline import Pipeline
from tonnage.training.trial import can_compile


@dataclass(frozen=True)
class Job:
    """The parts of a running job, as one rank holds them."""

    world: World
    pipeline: Pipeline
    """The model, or this rank's stages of it, ending in its loss; what the loop runs."""
    parameters: Mapping[str, nn.Parameter]
    """Of this rank's stages by name, sharded; an evaluation may leave gathered ones in their place there."""
    optimizer: AdamW
    schedule: Schedule
    clip: float
    """Largest global gradient norm; 0 is none."""
    train_data: PackedDataset
    validation_data: PackedDataset | None
    deal: Deal
    num_packs: int
    seed: int
    loss_scale: LossScale = field(default_factory=LossScale)
    skip_limit: int = 0
    """Steps in a row that may be skipped for not being finite."""
    adds_up: bool = True
    """Whether a gradient takes up every micro-batch. Below ZeRO 2 they are summed elsewhere and reduced once."""
    cursor: Cursor = field(default_factory=Cursor)
    """How far the run is: where the loop goes on."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What checkpoints say of the run besides: config, data, layout."""
    streamed: StreamedBlocks | None = None
    """Blocks whose parameters rest on disk."""

    disk: DiskUse | None = None
    host: HostUse | None = None
    saved_elsewhere: frozenset[str] = frozenset()
    """Names of parameters that are in another stage too, which saves them."""

    def moved(self) -> dict[str, Any]:
        """What came and went since the last call, for the metrics; nothing if all rests on the device."""
        uses = {"disk": self.disk, "host": self.host}
        return {name: use.take() for name, use in uses.items() if use is not None}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and optimizer state that this rank has a part of in a checkpoint."""
        model: dict[str, Tensor] = {
            name: one for name, one in self.parameters.items() if name not in self.saved_elsewhere
        }
        optimizer = self.optimizer.tensors()
        return model, {name: one for name, one in optimizer.items() if name.rpartition(".")[0] in model}

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
        """``state``, and the names in a checkpoint of those that are copies as of now."""
        model, optimizer = self.state()
        copies = {f"optimizer.{name}" for name in optimizer} if self.optimizer.tensors_are_copies else set()
        if self.streamed is not None:
            copied = over_pages(self.parameters, self.streamed.pages.copy())
            model |= copied
            copies |= {f"model.{name}" for name in copied}
        return model, optimizer, copies


@dataclass(frozen=True)
class Assembled:
    """A model, or a stage of one, with its weights."""

    model: PreTrainedModel
    loss_model: LossModel
    streamed: StreamedBlocks | None = None
    """Blocks whose parameters rest on disk."""
    inputs: BlockInputs | None = None
    """Inputs of blocks, where they rest in the host's memory."""
    elsewhere: frozenset[str] = frozenset()
    """Names of parameters that are in other stages alone."""
    shared: frozenset[str] = frozenset()
    """Names of those that are in another stage too."""


def assemble(
    config: Config,
    plan: Plan,
    world: World,
    log: Callable[[str], None],
    phases: Phases,
    checkpoint: Path | None = None,
) -> Job:
    """Build everything that ``plan`` says, on this rank; with a ``checkpoint``, as it was when that was saved."""
    if world.device.type == "cpu":
        use_threads(plan.threads_per_worker)
        set_up_heap(returns=plan.layout.returns_memory)
    directories = offload_directories(config, world.rank)
    if (on_disk := plan.layout.tiers_on_disk) and world.device.type != "cpu":
        problem = Problem(
            where=", ".join(on_disk),
            found=f"disk, with parameters on {world.device.type}",
            needed="parameters on the CPU, where the disk tier works so far",
            change=" ".join(f"{key}=device" for key in on_disk),
        )
        raise UserError(problem)
    precision, layout = Precision.of(config.precision, world.data_size), plan.layout
    later = layout.pipeline > 1 and layout.schedule == "zero_bubble"
    multiple = round_to(layout.row_tokens, world.device, precision.compute)
    largest_input = -(-layout.row_tokens // multiple) * multiple * layout.width * plan.model.hidden_size
    is_random = config.init == "random"
    files, model_config = read_model(
        config.model,
        revision=config.revision,
        random_weights=is_random or checkpoint is not None,
        trust_remote_code=config.trust_remote_code,
        untied=plan.weights.untied,
    )
    stages = {
        number: assemble_model(
            files,
            copy.deepcopy(model_config),
            world,
            precision,
            random_weights=is_random,
            allow_missing=config.allow_missing,
            allow_unexpected=config.allow_unexpected,
            vocab_size=plan.model.vocab_size,
            zero=layout.zero,
            recompute=layout.recompute,
            compile="off" if later else config.compile,
            seed=config.seed,
            load=checkpoint is None,
            stream_from=directories if layout.parameter_tier == "disk" else None,
            input_bytes=largest_input if layout.activation_tier == "host" else None,
            stage=(number, layout.stages) if layout.pipeline > 1 else None,
            log=log,
            phases=phases,
        )
        for number in range(world.mesh.get_local_rank("pipeline"), len(layout.stages) or 1, layout.pipeline)
    }
    if layout.returns_memory:
        for stage in stages.values():
            stage.loss_model.give_memory_back()
    if later:
        log("blocks are not compiled: zero_bubble takes their backward passes apart")
    parameters = {name: one for stage in stages.values() for name, one in stage.model.named_parameters()}
    elsewhere = reduce(frozenset.__and__, (stage.elsewhere for stage in stages.values()))
    shared = {name for stage in stages.values() for name in stage.shared}
    pipeline = Pipeline(
        {number: stage.loss_model for number, stage in stages.items()},
        world,
        precision.compute,
        schedule=layout.schedule,
        zero=layout.zero,
        shared=[parameters[name] for name in sorted(shared)],
        later=WeightGradients([block for one in stages.values() for block in one.loss_model.anatomy.blocks])
        if later
        else None,
    )
    tensor_copies = copies_of(parameters)
    copies = {name: tensor_copies.get(name, 1) * (2 if name in shared else 1) for name in parameters}
    streamed, inputs = next((stage.streamed, stage.inputs) for stage in stages.values())
    phases.enter("optimizer")
    if layout.micro_batches > 1:
        accumulate_in_fp32(parameters.values())
    optimizer = AdamW(
        parameters,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        decay=config.optimizer.weight_decay,
        moments=layout.moments,
        tier=_tier(layout, world, directories, log),
        gradients=_gradients(layout, world, directories, log),
        pages=streamed.pages if streamed else None,
        turns=turns_of(pipeline.stages[0]) if layout.optimizer_tier != "device" else None,
        copies=copies,
        seed=config.seed,
    )
    if layout.optimizer_tier != "device":
        wait_for_turns(pipeline.stages[0], optimizer)
    cursor = Cursor()
    if checkpoint is not None:
        phases.enter("load")
        tensors = optimizer.tensors()
        state = restore(checkpoint, parameters, tensors, world, log, elsewhere)
        optimizer.adopt(tensors)
        if streamed is not None:
            streamed.pages.rest(list(streamed.pages))
        cursor = Cursor.of(state)
        optimizer.num_steps = cursor.num_updates
        log(f"going on from {checkpoint.name}: step {cursor.step} is done, pack {cursor.position} is next")
    loss_scale = LossScale()
    if config.precision == "fp16":
        loss_scale = LossScale(config.optimizer.loss_scale, config.optimizer.loss_scale_growth)
        if cursor.loss_scale != 1:
            loss_scale.value, loss_scale.good_steps = cursor.loss_scale, cursor.good_steps
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
        ),
        loss_scale=loss_scale,
        clip=config.optimizer.clip,
        skip_limit=config.optimizer.skips,
        adds_up=layout.zero >= 2 or not layout.sharded,
        train_data=PackedDataset.open(Path(plan.data.train_path)),
        validation_data=PackedDataset.open(Path(plan.data.validation_path)) if plan.data.validation_path else None,
        deal=Deal(
            plan.packs_per_step,
            layout.micro_batch,
            world.data_rank,
            world.data_size,
            round_to=multiple,
            share_prefixes=layout.share_prefixes,
        ),
        num_packs=plan.num_packs,
        seed=config.seed,
        cursor=cursor,
        facts={**plan.facts(), "config": as_json(config)},
        streamed=streamed,
        disk=DiskUse(optimizer, streamed) if on_disk else None,
        host=HostUse(optimizer, inputs) if layout.uses_host else None,
        saved_elsewhere=frozenset(shared) if len(layout.stages) - 1 in stages else frozenset(),
    )


def assemble_model(
    files: ModelFiles,
    model_config: PreTrainedConfig,
    world: World,
    precision: Precision,
    *,
    random_weights: bool = False,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    vocab_size: int | None = None,
    zero: int = 3,
    recompute: Recompute = "none",
    seed: int = 0,
    load: bool = True,
    compile: Compile = "off",
    stream_from: Sequence[Path] | None = None,
    input_bytes: int | None = None,
    stage: tuple[int, tuple[int, ...]] | None = None,
    log: Callable[[str], None] = lambda message: None,
    phases: Phases | None = None,
) -> Assembled:
    """The model that ``model_config`` describes, with the weights in ``files``: built on meta, sharded over ``world``,
    loaded.

    ``allow_missing`` and ``allow_unexpected`` are as for ``matching.check_weights``, which has looked at the files
    before. Without ``load`` the weights are left for a checkpoint to fill. ``stream_from`` are directories in which the
    parameters of the blocks rest, ``input_bytes`` the size of their largest inputs, which rest in the host's memory
    then. ``stage`` is the number of a stage of it, and how many blocks each stage has.
    """
    if phases is not None:
        phases.enter("build")
    compiled = compile != "off" and can_compile(compile, model_config, world, precision.compute, log)
    model = build_on_meta(model_config, precision.storage, vocab_size)
    if world.device.type == "cpu" and products_widen(world, precision.compute):
        dtype = str(precision.compute).removeprefix("torch.")
        log(f"products of {dtype} are computed in fp32, and rounded: that is faster on this processor")
    anatomy, part = dissect(model), None
    found = find_places(model, files, allow_missing, allow_unexpected) if load and not random_weights else None
    divided = tensor_plan(model, anatomy) if world.mesh["tensor"].size() > 1 else None
    if stage is not None:
        part = keep_stage(model, anatomy, *stage)
        anatomy = part.anatomy
    loss_model = LossModel(model, anatomy, part.doors if part else None)
    parallelize(
        loss_model,
        anatomy.blocks,
        world.mesh,
        precision,
        tensor_plan=divided,
        zero=zero,
        recompute=recompute,
        compile=compiled,
    )
    allocate(model, world.device)
    streamed = stream_blocks(model, anatomy.blocks, stream_from) if stream_from is not None else None
    if streamed is not None:
        log(f"parameters of the blocks on disk: {streamed.pages.num_bytes / 1e9:.2f} GB")
    inputs = BlockInputs(anatomy.blocks, input_bytes, world.device, log=log) if input_bytes else None
    elsewhere, shared = (part.elsewhere, part.shared) if part else (frozenset(), frozenset())
    assembled = Assembled(model, loss_model, streamed, inputs, elsewhere, shared)
    if not load:
        return assembled
    if phases is not None:
        phases.enter("load")

    def progress() -> None:
        if phases is not None:
            phases.progress()
        if streamed is not None:
            streamed.pages.rest(list(streamed.pages))

    if found is None:
        log(f"initialising {model_config.model_type} randomly")
        initialise_randomly(model, seed, progress)
    else:
        log(f"loading {len(files.weights)} weight file(s), {files.weight_bytes / 1e9:.2f} GB")
        load_weights(model, found, seed, progress)
    return assembled


def _tier(
    layout: Layout, world: World, directories: Sequence[Path], log: Callable[[str], None]
) -> Callable[[Sequence[Trained], Codec], Tier]:
    """Where the optimizer's state rests."""
    resident = layout.optimizer_resident
    match layout.optimizer_tier:
        case "device":
            return InMemory
        case "host":
            return partial(OnHost, device=world.device, log=log, resident_bytes=resident)
        case "disk":
            return partial(OnDisk, directories=directories, log=log, resident_bytes=resident)


def _gradients(
    layout: Layout, world: World, directories: Sequence[Path], log: Callable[[str], None]
) -> Callable[[Sequence[Trained]], gradients.Gradients]:
    """Where gradients rest."""
    match layout.gradient_tier:
        case "device":
            return gradients.InMemory
        case "host":
            return partial(gradients.OnHost, device=world.device, log=log)
        case "disk":
            return partial(gradients.OnDisk, directories=directories)


def turns_of(loss_model: LossModel) -> dict[str, int]:
    """In which order a forward pass needs the parameters: those outside the blocks, then block after block."""
    turn_of = {
        id(parameter): turn
        for turn, block in enumerate(loss_model.anatomy.blocks, start=1)
        for parameter in block.parameters()
    }
    return {name: turn_of.get(id(parameter), 0) for name, parameter in loss_model.model.named_parameters()}


def wait_for_turns(loss_model: LossModel, optimizer: AdamW) -> None:
    """Let every block, and before them the whole, wait until its parameters are updated; before they are gathered."""
    for turn, module in enumerate((loss_model, *loss_model.anatomy.blocks)):
        module.register_forward_pre_hook(lambda *_, turn=turn: optimizer.wait_for(turn), prepend=True)


def products_widen(world: World, dtype: torch.dtype) -> bool:
    """Whether the run's products go through fp32: on every worker if on any, as all wait for the slowest."""
    widen = world.sum(float(processor_is_slow(dtype)))[0] > 0
    settle(dtype, widen)
    return widen


def accumulate_in_fp32(parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of several micro-batches add up in fp32 (sharded parameters are fp32 already)."""
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            parameter.grad_dtype = torch.float32
