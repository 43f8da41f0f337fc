"""The model of a job: built on meta, divided and sharded, given memory, filled with weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.config import Config
from tonnage.data.images.processing import ImageRecipe
from tonnage.errors import UserError, user_error
from tonnage.kernels.fake_quantized import GROUPS, FakeQuantizers, Scheme
from tonnage.kernels.fp8 import check_card
from tonnage.kernels.quantized import pack, unpack
from tonnage.kernels.regions import fill_local, region_of
from tonnage.kernels.widening import processor_is_slow, settle
from tonnage.model import adapters, peft
from tonnage.model.adapter_files import factor_of
from tonnage.model.adapters import EVERYTHING, MAGNITUDE, NORMS, AdapterSpec, Ranked, Target, Trains
from tonnage.model.anatomy import Anatomy, dissect
from tonnage.model.build import build_on_meta, initialise_randomly, load_buffers, load_weights, on_meta, values_of
from tonnage.model.dropout import Drawn
from tonnage.model.dtypes import DTYPES
from tonnage.model.fake_quantized import fake_quantize
from tonnage.model.files import ModelFiles, find_model, read_model
from tonnage.model.fp8 import compute_in_fp8
from tonnage.model.groups import groups_of, matrices_of
from tonnage.model.kept import kept_in_fp32
from tonnage.model.matching import find_places, keeps_buffers
from tonnage.model.merging import Match
from tonnage.model.packed_layers import PackedLayer, packed_weight
from tonnage.model.starts import Origins
from tonnage.model.stored import place_of
from tonnage.model.tensor_plan import tensor_plan
from tonnage.model.vision import AttachedTower, attach_tower
from tonnage.offload.pages import FileRange, Pages, joined
from tonnage.parallel.block_inputs import BlockInputs
from tonnage.parallel.compile import Compile
from tonnage.parallel.homes import FileHome
from tonnage.parallel.host_blocks import BlocksElsewhere, has_no_room
from tonnage.parallel.host_masters import HostMasters
from tonnage.parallel.parallelize import Precision, Transforms, parallelize
from tonnage.parallel.stages import Stage, keep_stage
from tonnage.parallel.streaming import StreamedBlocks
from tonnage.parallel.tensor import Ranks
from tonnage.parallel.tiled import TiledWeight
from tonnage.parallel.world import World
from tonnage.planning.layout import PLAIN, Layout
from tonnage.planning.plan import Plan
from tonnage.planning.rules import shards_packed
from tonnage.planning.space import packed_directory
from tonnage.rundir.directory import RunDirectory
from tonnage.training.isolation import inexact_recompute, isolation_for
from tonnage.training.loss import LossModel
from tonnage.training.memory import Phases
from tonnage.training.packed_base import fill, packed_base, shards_of
from tonnage.training.placing import Placed, Placement, place
from tonnage.training.routing import Routing, num_experts, weight_of_router_loss
from tonnage.training.setting import WorkerSetting
from tonnage.training.sight import Sight, image_recipe
from tonnage.training.starting import begin
from tonnage.training.tiling import tile_model
from tonnage.training.trial import can_compile


@dataclass(frozen=True)
class Blueprint:
    """What a rank builds a model from, and how; by default whole, for training, with all of it on the rank's device."""

    files: ModelFiles
    config: PreTrainedConfig
    world: World
    precision: Precision
    layout: Layout = PLAIN
    trains: Trains = EVERYTHING
    """What is trained; the rest is frozen."""
    groups: Sequence[str] = ()
    """Patterns of parameters that are updated otherwise than the rest."""
    load: bool = True
    """Whether the weights that are trained are filled here, and not from a checkpoint."""
    evaluates: bool = False
    """Whether nothing is trained, so that blocks for which a worker's GPU has no room may rest in the host's memory."""
    random_weights: bool = False
    allow_missing: Sequence[str] = ()
    """As for ``matching.check_weights``, which has looked at the files before; so is the next."""
    allow_unexpected: Sequence[str] = ()
    vocab_size: int | None = None
    seed: int = 0
    compile: Compile = "off"
    router_loss: float | Literal["auto", "model"] = "auto"
    """Weight of the loss of a mixture's routers, as in the config."""
    sequence_tile: int | None = None
    """Tokens of which MLPs of blocks compute at a time; None is all of a row."""
    input_bytes: int = 0
    """Of the largest inputs of blocks, where they rest in the host's memory; else 0."""
    directories: Sequence[Path] | None = None
    """Where the parameters of the blocks rest on disk, and embedding and head if large weights come in tiles."""
    start: Path | None = None
    """Where it stands how additions began, if they began as a part of what is frozen."""
    packed_in: Path | None = None
    """Where packed weights rest in the cache, if they do."""
    recipe: ImageRecipe | None = None
    """How images become what a tower is given, where the model has its tower and looks at them itself."""
    log: Callable[[str], None] = lambda message: None
    phases: Phases | None = None

    @property
    def loads(self) -> bool:
        """Whether weights are filled here: what is frozen no checkpoint holds."""
        return self.load or not self.trains.all

    @property
    def blocks_come_and_go(self) -> bool:
        """Whether parameters of blocks come to the device for as long as a block runs."""
        through_host = self.layout.update_tier == "host" or self.world.device.type != "cpu"
        return self.layout.parameter_tier == "host" or (self.directories is not None and through_host)

    def enter(self, phase: str) -> None:
        if self.phases is not None:
            self.phases.enter(phase)

    def progress(self) -> None:
        if self.phases is not None:
            self.phases.progress()


@dataclass(frozen=True)
class Assembled:
    """A model, or a stage of one, with its weights."""

    model: PreTrainedModel
    loss_model: LossModel
    placed: Placed
    """What of its parameters rests elsewhere than on its device."""
    inputs: BlockInputs | None = None
    """Inputs of blocks, where they rest there."""
    tiled: Sequence[TiledWeight] = ()
    """Weights that come in tiles."""
    elsewhere: frozenset[str] = frozenset()
    """Names of parameters that are in other stages alone."""
    shared: frozenset[str] = frozenset()
    """Names of those that are in another stage too."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Of the whole model's parameters, those that a pattern of ``Blueprint.groups`` decides for, and its number."""
    matrices: frozenset[str] = frozenset()
    """Of the whole model's parameters, the trained matrices of its blocks."""


@dataclass(frozen=True)
class Stages:
    """The stages of a model that a rank holds, one or several whose turns alternate, and what they have together."""

    by_number: Mapping[int, Assembled]
    parameters: Mapping[str, nn.Parameter]
    """By name; of those that the host updates, what it has."""
    shared: Set[str]
    """Names of those that are in another rank's stage too."""
    on_disk: Sequence[StreamedBlocks | FileHome]
    masters: Sequence[HostMasters]
    on_host: Sequence[BlocksElsewhere]
    pages: Pages | None
    """What parameters rest in on disk."""

    @staticmethod
    def of(by_number: Mapping[int, Assembled]) -> Stages:
        """What is in stages that are built."""
        stages = list(by_number.values())
        placed = [stage.placed for stage in stages]
        on_disk = [of_stage.on_disk for of_stage in placed if of_stage.on_disk is not None]
        masters = [of_stage.masters for of_stage in placed if of_stage.masters is not None]
        parameters = {name: parameter for stage in stages for name, parameter in stage.model.named_parameters()}
        for on_host in masters:
            parameters |= on_host.parameters
        return Stages(
            by_number,
            parameters,
            {name for stage in stages for name in stage.shared},
            on_disk,
            masters,
            [of_stage.on_host for of_stage in placed if of_stage.on_host is not None],
            joined([blocks.pages for blocks in on_disk]),
        )

    @property
    def first(self) -> Assembled:
        return next(iter(self.by_number.values()))

    @property
    def loss_models(self) -> list[LossModel]:
        return [stage.loss_model for stage in self.by_number.values()]

    @property
    def inputs(self) -> list[BlockInputs]:
        """Of blocks, where they rest in the host's memory."""
        return [stage.inputs for stage in self.by_number.values() if stage.inputs is not None]

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of parameters that no stage of this rank has."""
        return reduce(frozenset.__and__, (stage.elsewhere for stage in self.by_number.values()))


def stages_of(setting: WorkerSetting, *, load: bool) -> Stages:
    """Build the stages of the model that this rank holds.

    Without ``load`` the weights that are trained are left for a checkpoint to fill.
    """
    layout, mesh = setting.layout, setting.world.mesh
    blueprint = blueprint_of(setting, load=load)
    _check_isolation(blueprint.config, setting.plan, setting.world)
    if load and blueprint.start is not None:
        _begin(blueprint, blueprint.start)
    numbers = range(mesh.get_local_rank("pipeline"), len(layout.stages) or 1, layout.pipeline)
    stages = Stages.of({number: assemble_model(blueprint, number) for number in numbers})
    if layout.returns_memory:
        for loss_model in stages.loss_models:
            loss_model.give_memory_back()
    return stages


def blueprint_of(setting: WorkerSetting, *, load: bool) -> Blueprint:
    """What a run's config and plan say of its model."""
    config, plan, layout = setting.config, setting.plan, setting.layout
    is_random, trains = config.init == "random", trains_of_run(config, plan)
    files, model_config = read_model(
        config.model,
        revision=config.revision,
        random_weights=is_random or (trains.all and not load),
        tokenizer=False,
        trust_remote_code=config.trust_remote_code,
        untied=plan.weights.untied,
        scores=config.objective.scores,
        rope=config.rope.parameters if config.rope else None,
    )
    largest_row = -(-layout.row_tokens // setting.multiple) * setting.multiple
    largest_input = largest_row * layout.width * plan.model.hidden_size
    return Blueprint(
        files,
        model_config,
        setting.world,
        setting.precision,
        layout,
        trains,
        groups=[group.match for group in config.optimizer.groups],
        load=load,
        random_weights=is_random,
        allow_missing=config.allow_missing,
        allow_unexpected=config.allow_unexpected,
        vocab_size=plan.model.vocab_size,
        seed=config.seed,
        compile=_compile_of(setting),
        router_loss=config.router_loss,
        sequence_tile=-(-largest_row // layout.sequence_tiles) if layout.sequence_tiles > 1 else None,
        input_bytes=largest_input if layout.activation_tier == "host" else 0,
        directories=setting.directories if layout.parameter_tier == "disk" else None,
        start=None if trains.adapter is None or trains.adapter.init == "zero" else RunDirectory(config.output).start,
        packed_in=packed_directory(config, plan),
        recipe=image_recipe(files, trusts=config.trust_remote_code, pixels=config.data.pixels)
        if plan.data.sees
        else None,
        log=setting.log,
        phases=setting.phases,
    )


def _compile_of(setting: WorkerSetting) -> Compile:
    """Whether blocks are compiled, or where that works (``auto``)."""
    mode: Compile = setting.config.compile
    if mode == "auto" and not setting.layout.compiled:
        return "off"
    if mode != "off" and setting.takes_passes_apart:
        setting.log("blocks are not compiled: zero_bubble takes their backward passes apart")
        return "off"
    return mode


def _check_isolation(config: PreTrainedConfig, plan: Plan, world: World) -> None:
    """Ask the model once more, where the run is: the plan may have been made on another machine.

    Raises:
        UserError: its documents are to be laid out in another way here, or recompute as planned changes gradients.
    """
    layout, isolation = plan.layout, isolation_for(config, world.device, plan.data.max_length)
    if (isolation.arrangement, isolation.attention) != (layout.arrangement, layout.attention):
        raise user_error(
            where=f"model type {config.model_type}",
            found=f"rows that are {isolation.arrangement} ({isolation.attention}) on this machine, and "
            f"{layout.arrangement} ({layout.attention}) in the plan",
            needed="the same versions of torch and transformers, and the same kind of device, where a run is "
            "planned and where it runs",
            change="make the plan where the run will be (tonnage plan CONFIG), or install the same versions",
        )
    if layout.recompute in isolation.inexact_recompute:
        raise UserError(inexact_recompute("the plan", layout.recompute, config, isolation))


@dataclass(frozen=True)
class _Draft:
    """A whole model on the meta device, with the parameters that training gives it."""

    model: PreTrainedModel
    anatomy: Anatomy
    weights: Match | None
    """Where its weights lie in files; None if none are read."""
    dropout: Drawn | None
    quantizers: FakeQuantizers | None
    """By which linear layers round what they multiply."""
    targets: Sequence[Target]
    """What has an adapter's additions."""
    trained_names: Sequence[str]
    groups: Mapping[str, int]
    matrices: frozenset[str]
    """As in ``Assembled``."""
    come_and_go: bool
    """Whether parameters of its blocks do."""


def assemble_model(blueprint: Blueprint, stage: int = 0) -> Assembled:
    """A model, or a ``stage`` of one in a pipeline: built on meta, sharded, given memory, filled with weights.

    Raises:
        UserError: weights that do not fit the config, too little space, or memory that cannot be locked.
    """
    blueprint.enter("build")
    compiled = _compiles(blueprint)
    draft = _draft(blueprint)
    loss_model, transforms, part = _in_loss_model(blueprint, draft, stage, compiled)
    blocks = loss_model.anatomy.blocks
    layers, inputs = parallelize(loss_model, blocks, blueprint.world.mesh, blueprint.precision, transforms)
    packed = [replace(layer, path=layer.path.removeprefix("model.")) for layer in layers]  # as the model names them
    in_cache = _packed_in_cache(blueprint, draft, packed)
    placed = _give_memory(blueprint, draft, blocks, transforms.tiled, in_cache)
    elsewhere, shared = (part.elsewhere, part.shared) if part else (frozenset(), frozenset())
    if blueprint.loads:
        blueprint.enter("load")
        _fill(blueprint, draft, [] if in_cache else packed, placed)
    placed.begin(loss_model, blocks)
    return Assembled(
        draft.model,
        loss_model,
        placed,
        inputs,
        transforms.tiled,
        elsewhere,
        shared,
        draft.groups,
        draft.matrices,
    )


def _compiles(blueprint: Blueprint) -> bool:
    if blueprint.compile == "off":
        return False
    if blueprint.blocks_come_and_go:
        blueprint.log("blocks are not compiled: their parameters come and go")
        return False
    world, compute = blueprint.world, blueprint.precision.compute
    return can_compile(
        blueprint.compile, blueprint.config, world, compute, blueprint.log, blueprint.layout, blueprint.trains.fp8
    )


def _draft(blueprint: Blueprint) -> _Draft:
    trains, precision, world, files = blueprint.trains, blueprint.precision, blueprint.world, blueprint.files
    dtype = precision.storage if trains.all else precision.compute
    config = copy.deepcopy(blueprint.config)
    model = build_on_meta(config, dtype, blueprint.vocab_size, blueprint.layout.attention)
    if world.device.type == "cpu" and products_widen(world, precision.compute):
        compute = str(precision.compute).removeprefix("torch.")
        blueprint.log(f"products of {compute} are computed in fp32, and rounded: that is faster on this processor")
    if world.device.type == "cpu" and blueprint.layout.optimizer == "muon":
        products_widen(world, torch.bfloat16)  # those that make an update orthogonal, alike on all workers
    anatomy, weights = dissect(model), None
    if blueprint.recipe is not None:
        attach_tower(model, blueprint.files, precision.compute)
    if not blueprint.random_weights and (blueprint.loads or keeps_buffers(model)):  # no checkpoint holds those
        files = files if blueprint.loads else find_model(str(files.directory), tokenizer=False)
        weights = find_places(model, files, blueprint.allow_missing, blueprint.allow_unexpected)
    dropout = Drawn() if trains.adapter is not None and trains.adapter.dropout else None
    targets = adapters.prepare(model, anatomy, trains, precision.storage, dropout)
    quantizers = None if trains.aware is None else fake_quantize(model, anatomy, trains.aware)
    if trains.fp8 is not None:
        check_card(trains.fp8, world.device)
        blueprint.log(str(compute_in_fp8(model, anatomy, trains.fp8)))
    trained_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups, matrices = groups_of(model, anatomy, blueprint.groups), matrices_of(model, anatomy)
    has_room = not (blueprint.evaluates and world.size == 1 and has_no_room(model, world.device))
    if not has_room:
        model.requires_grad_(requires_grad=False)
    come_and_go = blueprint.blocks_come_and_go or not has_room
    return _Draft(model, anatomy, weights, dropout, quantizers, targets, trained_names, groups, matrices, come_and_go)


def _in_loss_model(
    blueprint: Blueprint, draft: _Draft, number: int, compiled: bool
) -> tuple[LossModel, Transforms, Stage | None]:
    """The model, or the stage of it, ending in its loss; what is to be done to it; and what other stages have."""
    layout, model, anatomy, mesh = blueprint.layout, draft.model, draft.anatomy, blueprint.world.mesh
    compute = blueprint.precision.compute
    in_fp32: Sequence[nn.Parameter] = ()
    if compute != torch.float32:
        in_fp32 = kept_in_fp32(model, on_meta(copy.deepcopy(blueprint.config), compute))
        in_fp32 += [one for name, one in model.named_parameters() if name.endswith((MAGNITUDE, NORMS))]
    divided = tensor_plan(model, anatomy) if mesh["tensor"].size() > 1 else None
    token_ranks = Ranks.along(mesh["tensor"]) if divided is not None and divided.divides_tokens else None
    experts, num_stages = num_experts(model), len(layout.stages) if layout.pipeline > 1 else 1
    weight = weight_of_router_loss(blueprint.router_loss, model, pipeline=num_stages, context=layout.context)
    part = keep_stage(model, anatomy, number, layout.stages) if layout.pipeline > 1 else None
    routing = Routing(model, anatomy.blocks, experts, weight) if experts or weight else None
    anatomy = part.anatomy if part else anatomy
    loss_model = LossModel(model, anatomy, part.doors if part else None, routing, draft.dropout)
    loss_model.token_ranks = token_ranks
    if blueprint.recipe is not None:
        assert isinstance(model.tower, AttachedTower)
        loss_model.sight = Sight(model.tower, blueprint.recipe)
    loss_model.quantizers = draft.quantizers
    tiled: list[TiledWeight] = []
    if layout.tiles > 1:
        tiled, loss_model.tiled = tile_model(anatomy, mesh["replicate", "shard"], layout.tiles, compute, in_fp32)
        most = max(tiles.number for tiles in tiled)
        blueprint.log(f"weights in tiles: {len(tiled)}, in {most} at most; embedding and head in {tiled[0].number}")
    keep_inputs = None
    if num_bytes := blueprint.input_bytes // (token_ranks.size if token_ranks is not None else 1):
        passes = layout.passes_under_way(mesh["pipeline"].get_local_rank())
        keep_inputs = partial(
            BlockInputs, input_bytes=num_bytes, device=blueprint.world.device, passes=passes, log=blueprint.log
        )
    transforms = Transforms(
        tensor_plan=divided,
        tiled=tiled,
        quantize=blueprint.trains.quantize,
        sequence_tile=blueprint.sequence_tile,
        drawn=draft.dropout,
        compile=compiled,
        recompute=layout.recompute,
        recomputed=layout.recomputed[0] if layout.recomputed else None,
        keep_inputs=keep_inputs,
        zero=layout.zero,
        in_fp32=in_fp32,
        blocks_ahead=layout.blocks_ahead,
    )
    return loss_model, transforms, part


def _packed_in_cache(blueprint: Blueprint, draft: _Draft, packed: Sequence[PackedLayer]) -> dict[str, FileRange]:
    """Where this rank's part of packed weights lies in the cache, by name; nothing if they do not rest there."""
    weights, directory = draft.weights, blueprint.packed_in
    if blueprint.directories is None or directory is None or weights is None or not packed:
        return {}
    if {layer.path for layer in packed} & {*weights.missing}:
        return {}
    blueprint.enter("load")
    whole = packed_base(directory, draft.model, weights, packed, blueprint.progress, blueprint.log)
    return shards_of(draft.model, whole)


def _give_memory(
    blueprint: Blueprint,
    draft: _Draft,
    blocks: Sequence[nn.Module],
    tiled: Sequence[TiledWeight],
    in_cache: Mapping[str, FileRange],
) -> Placed:
    """Memory for all parameters, where they are to rest; what is read where it lies is filled, and so are buffers."""
    layout, model = blueprint.layout, draft.model
    stored = dict(in_cache)
    if blueprint.directories is not None and not blueprint.trains.all and draft.weights is not None:
        changed = {target.weight for target in draft.targets} if blueprint.start is not None else set[str]()
        mapped = as_they_are(model, draft.weights)
        stored = {name: place for name, place in mapped.items() if name not in changed} | stored
    recomputed = len(blocks[: layout.recomputed[0] if layout.recomputed else None])
    placement = Placement(
        model,
        blocks,
        blueprint.world.device,
        tiled,
        come_and_go=draft.come_and_go,
        updates_on_host=layout.update_tier == "host",
        trains_all=blueprint.trains.all,
        recomputed=recomputed if layout.recompute != "none" else 0,
        directories=blueprint.directories,
        stored=stored,
        evaluates=blueprint.evaluates,
    )
    placed = place(placement, blueprint.log)
    if draft.weights is not None:
        load_buffers(model, draft.weights)
    fill(model, {name: where for name, where in in_cache.items() if name not in placed.mapped})
    if placed.on_disk is not None:
        cached = sum(where.num_bytes for name, where in in_cache.items() if name in placed.mapped)
        if own := placed.on_disk.pages.stored_bytes - cached:
            blueprint.log(f"and {own / 1e9:.2f} GB read from the model's own files")
        if cached:
            blueprint.log(f"and {cached / 1e9:.2f} GB read from {blueprint.packed_in}")
    return placed


def _fill(blueprint: Blueprint, draft: _Draft, packed: Sequence[PackedLayer], placed: Placed) -> None:
    """Weights from files, or random ones, and the additions of an adapter."""
    files, model, seed = blueprint.files, draft.model, blueprint.seed

    def progress() -> None:
        blueprint.progress()
        placed.rest()

    if draft.weights is None:
        blueprint.log(f"initialising {blueprint.config.model_type} randomly")
        initialise_randomly(model, seed, progress, packed={layer.path: layer for layer in packed})
    else:
        blueprint.log(f"loading {len(files.weights)} weight file(s), {files.weight_bytes / 1e9:.2f} GB")
        origins = _origins(blueprint)
        by_weight = {target.weight: target for target in draft.targets}

        def changed(name: str, value: Tensor) -> Tensor:
            target = by_weight.get(name)
            taken = None if origins is None or target is None else origins.taken(target)
            return value if taken is None else value.float() - taken

        load_weights(model, draft.weights, seed, progress, packed, placed.mapped, changed)
        if origins is not None:
            _take(draft, origins, progress)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    is_new = files.adapter is None or blueprint.trains.adapter is None
    if blueprint.trains.adapter is not None and blueprint.trains.adapter.magnitudes:
        _fill_norms(blueprint, draft, (NORMS, MAGNITUDE) if is_new else (NORMS,))
    if is_new:
        adapters.initialise(trained, seed)
        if (origins := _origins(blueprint)) is not None:
            _fill_additions(draft, origins)
    else:
        assert files.adapter is not None
        blueprint.log(f"going on with the adapter in {files.adapter.directory}")
        peft.fill(dict(model.named_parameters()), draft.targets, files.adapter, draft.trained_names)


def _begin(blueprint: Blueprint, directory: Path) -> None:
    """Write how the additions of a new run begin."""
    draft = _draft(replace(blueprint, log=lambda message: None))
    adapter, form = blueprint.trains.adapter, blueprint.trains.quantize
    assert adapter is not None
    assert draft.weights is not None, "config.check_adapter refuses random weights"
    blueprint.log(f"decomposing {len(draft.targets):,} matrices, a part of which additions begin as: {directory}")
    how = adapter, form, blueprint.precision.compute, blueprint.seed
    begin(directory, draft.model, draft.weights, draft.targets, how, blueprint.world, blueprint.progress)


def _origins(blueprint: Blueprint) -> Origins | None:
    """Where the additions began, if they began as a part of what is frozen."""
    if blueprint.start is None:
        return None
    assert blueprint.trains.adapter is not None
    return Origins(blueprint.start, blueprint.trains.adapter)


@torch.no_grad()
def _take(draft: _Draft, origins: Origins, progress: Callable[[], None]) -> None:
    """Take from this rank's parts of frozen weights that are not packed what additions begin as."""
    parameters = dict(draft.model.named_parameters())
    for target in draft.targets:
        weight = parameters.get(target.weight)
        if weight is not None and (taken := origins.taken(target)) is not None:
            local, region = region_of(weight.data)
            if local.numel():
                local.copy_(local.float() - taken[region].to(local.device))
            progress()


@torch.no_grad()
def _fill_additions(draft: _Draft, origins: Origins) -> None:
    """Let this rank's parts of additions begin where they do."""
    parameters = dict(draft.model.named_parameters())
    for target in draft.targets:
        for name, value in zip(target.names(), origins.addition(target.path), strict=True):
            if name in parameters:
                fill_local(parameters[name], value)


def _fill_norms(blueprint: Blueprint, draft: _Draft, names: Sequence[str]) -> None:
    """Fill the lengths of rows of frozen weights, as they are computed with: they are read once more, a whole one at a
    time, whatever part of it this rank has."""
    assert draft.weights is not None, "config.check_adapter refuses random weights"
    compute, form = blueprint.precision.compute, blueprint.trains.quantize
    parameters = dict(draft.model.named_parameters())
    held = {target.weight: target for target in draft.targets if f"{target.path}.{NORMS}" in parameters}
    for name, value in values_of(draft.weights, held, draft.model):
        is_packed = form is not None and packed_weight(held[name].owner, "weight") is not None
        weight = unpack(pack(value, form), compute) if form is not None and is_packed else value.to(compute)
        adapters.fill_norms(held[name], weight, parameters, names)
        blueprint.progress()


def as_they_are(model: PreTrainedModel, match: Match) -> dict[str, FileRange]:
    """Where frozen parameters lie in the model's files, of those that have there the type and shape that they have
    here."""
    parameters = dict(model.named_parameters())
    return {
        name: FileRange(stored.file, *place_of(stored))
        for stored, name in match.places
        if (parameter := parameters.get(name)) is not None
        and not parameter.requires_grad
        and name not in match.zeroed
        and not isinstance(parameter, DTensor)  # of which a rank has a part
        and stored.view() is None
        and DTYPES.get(stored.dtype) == parameter.dtype
        and stored.shape == tuple(parameter.shape)
    }


def trains_of_files(files: ModelFiles, config: PreTrainedConfig) -> Trains:
    """What an adapter's directory adds to its model, which ``config`` describes; everything where there is none.

    Raises:
        UserError: it is another model's.
    """
    if files.adapter is None:
        return EVERYTHING
    model = on_meta(copy.deepcopy(config), torch.float32)
    return Trains(peft.adapter_in(files.adapter, model, dissect(model)))


def trains_of_run(config: Config, plan: Plan) -> Trains:
    """As ``trains_of``; where the model looks at images itself, that of all is the whole model of text."""
    trains = keeping(trains_of(config), config, plan.weights.stored)
    return replace(trains, patterns=("*",)) if plan.data.sees and trains.all else trains


def keeping(trains: Trains, config: Config, stored: tuple[tuple[str, str], ...]) -> Trains:
    """The same over weights that keep the forms in which a quantised checkpoint has them, by their paths, if the config
    lets them: under additions that begin at zero, where nothing else quantises or rounds them."""
    adapter = config.adapter
    keeps = not isinstance(adapter, str) and adapter.quantize == "none" and adapter.init == "zero"
    keeps = keeps and config.quantize_aware.scheme == "none" and shards_packed()
    return replace(trains, stored=stored if keeps else ())


def trains_of(config: Config) -> Trains:
    assert config.adapter != "auto", "planning.ways says what it is"
    aware = scheme_of(config)
    if isinstance(config.adapter, str):
        return Trains(patterns=config.train, aware=aware, fp8=config.fp8)
    own = config.adapter
    factor = partial(factor_of, rank_stabilised=own.scaling == "rank_stabilised")
    sizes = [(named.match, named.rank or own.rank, named.alpha or own.alpha) for named in own.patterns]
    patterns = tuple(Ranked(match, rank, alpha, factor(rank, alpha)) for match, rank, alpha in sizes)
    quantize = None if own.quantize in ("none", "widened") else own.quantize
    also = (*own.also, "head") if config.objective.scores and "head" not in own.also else own.also
    rotates = own.kind == "oft"
    spec = AdapterSpec(
        0 if rotates else own.rank,
        1.0 if rotates else factor(own.rank, own.alpha),
        own.targets,
        also,
        own.dropout,
        patterns,
        magnitudes=own.kind == "dora",
        oft_block_size=own.oft_block_size if rotates else 0,
        init=own.init,
        rounds=own.rounds,
    )
    return Trains(spec, quantize=quantize, aware=aware, fp8=config.fp8)


def scheme_of(config: Config) -> Scheme | None:
    """How a run rounds what its linear layers multiply; None if it does not."""
    own = config.quantize_aware
    if own.scheme == "none":
        return None
    return Scheme(own.scheme, own.group_size or GROUPS.get(own.scheme, 0))


def products_widen(world: World, dtype: torch.dtype) -> bool:
    """Whether the run's products go through fp32: on every worker if on any, as all wait for the slowest."""
    widen = world.sum(float(processor_is_slow(dtype)))[0] > 0
    settle(dtype, widen)
    return widen
