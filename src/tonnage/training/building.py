"""The model of a job: built on meta, divided and sharded, given memory, filled with weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.config import Config
from tonnage.errors import Problem, UserError
from tonnage.host.cachedir import default_directory
from tonnage.kernels.widening import processor_is_slow, settle
from tonnage.model import adapters, peft
from tonnage.model.adapters import EVERYTHING, Adapter, Trains
from tonnage.model.anatomy import dissect
from tonnage.model.build import build_on_meta, initialise_randomly, load_buffers, load_weights, on_meta
from tonnage.model.dropout import Drawn
from tonnage.model.files import ModelFiles, find_model, read_model
from tonnage.model.kept import kept_in_fp32
from tonnage.model.matching import Match, find_places, keeps_buffers
from tonnage.model.merging import DTYPES
from tonnage.model.stored import place_of
from tonnage.model.tensor_plan import tensor_plan
from tonnage.offload.pages import Place
from tonnage.parallel.block_inputs import BlockInputs
from tonnage.parallel.compile import Compile
from tonnage.parallel.host_blocks import has_no_room
from tonnage.parallel.parallelize import Precision, parallelize
from tonnage.parallel.recompute import Recompute
from tonnage.parallel.stages import keep_stage
from tonnage.parallel.tiled import TiledWeight
from tonnage.parallel.world import World
from tonnage.planning.layout import PACKED, Arrangement
from tonnage.planning.plan import Plan
from tonnage.planning.space import packed_directory
from tonnage.training.isolation import inexact_recompute, isolation_of, outgrows
from tonnage.training.loss import LossModel
from tonnage.training.memory import Phases
from tonnage.training.packed_base import fill, packed_base, shards_of
from tonnage.training.placing import Placed, place
from tonnage.training.routing import Routing, num_experts, weight_of_router_loss
from tonnage.training.setting import Setting
from tonnage.training.tiling import tile_model
from tonnage.training.trial import can_compile


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


def stages_of(setting: Setting, *, load: bool) -> dict[int, Assembled]:
    """The stages of the model that this rank holds, by their numbers: one, or several whose turns alternate.

    Without ``load`` the weights that are trained are left for a checkpoint to fill.
    """
    config, plan, world, layout = setting.config, setting.plan, setting.world, setting.layout
    is_random, trains = config.init == "random", trains_of(config)
    files, model_config = read_model(
        config.model,
        revision=config.revision,
        random_weights=is_random or (trains.all and not load),
        tokenizer=False,
        trust_remote_code=config.trust_remote_code,
        untied=plan.weights.untied,
    )
    _check_isolation(model_config, plan, world)
    largest_row = -(-layout.row_tokens // setting.multiple) * setting.multiple
    compile: Compile = config.compile
    if compile == "auto" and not layout.compiled:
        compile = "off"
    if compile != "off" and setting.takes_passes_apart:
        compile = "off"
        setting.log("blocks are not compiled: zero_bubble takes their backward passes apart")
    stages = {
        number: assemble_model(
            files,
            copy.deepcopy(model_config),
            world,
            setting.precision,
            random_weights=is_random,
            allow_missing=config.allow_missing,
            allow_unexpected=config.allow_unexpected,
            vocab_size=plan.model.vocab_size,
            zero=layout.zero,
            recompute=layout.recompute,
            recomputed=layout.recomputed[0] if layout.recomputed else None,
            compile=compile,
            seed=config.seed,
            load=load,
            stream_from=setting.directories if layout.parameter_tier == "disk" else None,
            tiles=layout.tiles,
            blocks_ahead=layout.blocks_ahead,
            blocks_on_host=layout.parameter_tier == "host",
            updates_on_host=layout.update_tier == "host",
            input_bytes=largest_row * layout.width * plan.model.hidden_size
            if layout.activation_tier == "host"
            else None,
            stage=(number, layout.stages) if layout.pipeline > 1 else None,
            packed_in=packed_directory(config, plan),
            arrangement=layout.arrangement,
            attention=layout.attention,
            router_loss=config.router_loss,
            trains=trains,
            log=setting.log,
            phases=setting.phases,
        )
        for number in range(world.mesh.get_local_rank("pipeline"), len(layout.stages) or 1, layout.pipeline)
    }
    if layout.returns_memory:
        for stage in stages.values():
            stage.loss_model.give_memory_back()
    return stages


def _check_isolation(config: PreTrainedConfig, plan: Plan, world: World) -> None:
    """Ask the model once more, where the run is: the plan may have been made on another machine.

    Raises:
        UserError: its documents are to be laid out in another way here, or recompute as planned changes gradients.
    """
    asked = isolation_of(
        config,
        device=world.device,
        long_documents=outgrows(config, plan.data.max_length),
        cache=default_directory(),
    )
    layout = plan.layout
    if (asked.arrangement, asked.attention) != (layout.arrangement, layout.attention):
        raise UserError(
            Problem(
                where=f"model type {config.model_type}",
                found=f"rows that are {asked.arrangement} ({asked.attention}) on this machine, and "
                f"{layout.arrangement} ({layout.attention}) in the plan",
                needed="the same versions of torch and transformers, and the same kind of device, where a run is "
                "planned and where it runs",
                change="make the plan where the run will be (tonnage plan CONFIG), or install the same versions",
            )
        )
    if layout.recompute in asked.inexact_recompute:
        raise UserError(inexact_recompute("the plan", layout.recompute, config, asked))


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
    recomputed: int | None = None,
    seed: int = 0,
    load: bool = True,
    compile: Compile = "off",
    stream_from: Sequence[Path] | None = None,
    tiles: int = 1,
    blocks_ahead: int = 1,
    blocks_on_host: bool = False,
    updates_on_host: bool = False,
    evaluates: bool = False,
    input_bytes: int | None = None,
    stage: tuple[int, tuple[int, ...]] | None = None,
    packed_in: Path | None = None,
    arrangement: Arrangement = "packed",
    attention: str = PACKED,
    router_loss: float | Literal["auto", "model"] = "auto",
    trains: Trains = EVERYTHING,
    log: Callable[[str], None] = lambda message: None,
    phases: Phases | None = None,
) -> Assembled:
    """The model that ``model_config`` describes, with the weights in ``files``: built on meta, sharded over ``world``,
    loaded.

    ``allow_missing`` and ``allow_unexpected`` are as for ``matching.check_weights``, which has looked at the files
    before. Blocks ``recompute``, all or the first ``recomputed``. Without ``load`` the weights that are trained are
    left for a checkpoint to fill. ``stream_from`` are directories in which the parameters of the blocks rest, and
    embedding and head if large weights come in ``tiles``; ``blocks_ahead`` are gathered while one runs;
    ``blocks_on_host`` says that those of blocks rest in the host's memory, those that are frozen or, where all are
    trained, which it ``updates_on_host`` then, all. Where the model only ``evaluates``, nothing is trained, and what
    outgrows a worker's GPU rests there as well. ``input_bytes`` is the size of their largest inputs, which rest in the
    host's memory then. ``stage`` is the number of a stage of it, and how many blocks each stage has. ``packed_in`` is
    where its packed weights rest in the cache, if they do. ``arrangement`` and ``attention`` are as ``isolation`` found
    them; ``router_loss`` is the weight of the loss of a mixture's routers, as in the config. ``trains`` says what is
    trained; the rest is frozen.
    """
    if phases is not None:
        phases.enter("build")

    def tell() -> None:
        if phases is not None:
            phases.progress()

    come_and_go = blocks_on_host or (stream_from is not None and (updates_on_host or world.device.type != "cpu"))
    if come_and_go and compile != "off":
        log("blocks are not compiled: their parameters come and go")
        compile = "off"
    compiled = compile != "off" and can_compile(
        compile, model_config, world, precision.compute, log, arrangement, attention
    )
    load = load or not trains.all  # no checkpoint holds what is frozen
    model = build_on_meta(model_config, precision.storage if trains.all else precision.compute, vocab_size, attention)
    if world.device.type == "cpu" and products_widen(world, precision.compute):
        dtype = str(precision.compute).removeprefix("torch.")
        log(f"products of {dtype} are computed in fp32, and rounded: that is faster on this processor")
    anatomy, part, found = dissect(model), None, None
    all_blocks = anatomy.blocks
    if not random_weights and (load or keeps_buffers(model)):  # no checkpoint holds those
        files = files if load else find_model(str(files.directory), tokenizer=False)
        found = find_places(model, files, allow_missing, allow_unexpected)
    halves = precision.compute != torch.float32
    drawn = Drawn() if trains.adapter is not None and trains.adapter.dropout else None
    targets = adapters.prepare(model, anatomy, trains, precision.storage, drawn)
    trained_names = [name for name, one in model.named_parameters() if one.requires_grad]
    if evaluates and world.size == 1 and has_no_room(model, world.device):
        model.requires_grad_(requires_grad=False)
        come_and_go = blocks_on_host = True
    in_fp32 = kept_in_fp32(model, on_meta(copy.deepcopy(model_config), precision.compute)) if halves else []
    divided = tensor_plan(model, anatomy) if world.mesh["tensor"].size() > 1 else None
    experts = num_experts(model)
    weight = weight_of_router_loss(router_loss, model, pipeline=len(stage[1]) if stage else 1)
    if stage is not None:
        part = keep_stage(model, anatomy, *stage)
        anatomy = part.anatomy
    routing = Routing(model, all_blocks, experts, weight) if experts or weight else None
    loss_model = LossModel(model, anatomy, part.doors if part else None, routing, drawn)
    tiled: list[TiledWeight] = []
    if tiles > 1:
        data = world.mesh["replicate", "shard"]
        tiled, loss_model.tiled = tile_model(anatomy, data, tiles, precision.compute, in_fp32)
        most = max(one.number for one in tiled)
        log(f"weights in tiles: {len(tiled)}, in {most} at most; embedding and head in {tiled[0].number}")
    packed = parallelize(
        loss_model,
        anatomy.blocks,
        world.mesh,
        precision,
        tensor_plan=divided,
        zero=zero,
        recompute=recompute,
        recomputed=recomputed,
        compile=compiled,
        in_fp32=in_fp32,
        quantize=trains.quantize,
        tiled=tiled,
        blocks_ahead=blocks_ahead,
    )
    packed = [replace(one, path=one.path.removeprefix("model.")) for one in packed]  # of the model in the loss model
    lying, kept = dict[str, Place](), dict[str, Place]()
    if stream_from is not None:
        lying = {} if trains.all or found is None else as_they_are(model, found)
        if packed and packed_in and found is not None and not {one.path for one in packed} & {*found.missing}:
            if phases is not None:
                phases.enter("load")
            kept = shards_of(model, packed_base(packed_in, model, found, packed, tell, log))
            packed = []
    placed = place(
        model,
        anatomy.blocks,
        world.device,
        come_and_go=come_and_go,
        updates_on_host=updates_on_host,
        trains_all=trains.all,
        recomputed=len(anatomy.blocks[:recomputed]) if recompute != "none" else 0,
        directories=stream_from,
        stored=lying | kept,
        tiled=tiled,
        evaluates=evaluates,
        log=log,
    )
    if found is not None:
        load_buffers(model, found)
    fill(model, {name: there for name, there in kept.items() if name not in placed.mapped})
    if placed.on_disk is not None:
        cached = sum(there.num_bytes for name, there in kept.items() if name in placed.mapped)
        if own := placed.on_disk.pages.stored_bytes - cached:
            log(f"and {own / 1e9:.2f} GB read from the model's own files")
        if cached:
            log(f"and {cached / 1e9:.2f} GB read from {packed_in}")
    inputs = BlockInputs(anatomy.blocks[:recomputed], input_bytes, world.device, log=log) if input_bytes else None
    elsewhere, shared = (part.elsewhere, part.shared) if part else (frozenset(), frozenset())
    assembled = Assembled(model, loss_model, placed, inputs, tiled, elsewhere, shared)
    if not load:
        placed.begin(loss_model, anatomy.blocks)
        return assembled
    if phases is not None:
        phases.enter("load")

    def progress() -> None:
        tell()
        placed.rest()

    if found is None:
        log(f"initialising {model_config.model_type} randomly")
        initialise_randomly(model, seed, progress, packed={one.path: one for one in packed})
    else:
        log(f"loading {len(files.weights)} weight file(s), {files.weight_bytes / 1e9:.2f} GB")
        load_weights(model, found, seed, progress, packed, placed.mapped)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if files.adapter is None or trains.adapter is None:
        adapters.initialise(trained, seed)
    else:
        log(f"going on with the adapter in {files.adapter.directory}")
        peft.fill(dict(model.named_parameters()), targets, files.adapter, trained_names)
    placed.begin(loss_model, anatomy.blocks)
    return assembled


def as_they_are(model: PreTrainedModel, found: Match) -> dict[str, Place]:
    """Where frozen parameters lie in the model's files, of those that have there the type and shape that they have
    here."""
    parameters = dict(model.named_parameters())
    return {
        name: Place(one.file, *place_of(one))
        for one, name in found.places
        if (parameter := parameters.get(name)) is not None
        and not parameter.requires_grad
        and name not in found.zeroed
        and not isinstance(parameter, DTensor)  # of which a rank has a part
        and one.view() is None
        and DTYPES.get(one.dtype) == parameter.dtype
        and one.shape == tuple(parameter.shape)
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


def trains_of(config: Config) -> Trains:
    """What a run trains of its model."""
    assert config.adapter != "auto", "planning.ways says what it is"
    if isinstance(config.adapter, str):
        return Trains(patterns=config.train)
    said = config.adapter
    factor = peft.factor_of(said.rank, said.alpha, rank_stabilised=said.scaling == "rank_stabilised")
    quantize = None if said.quantize == "none" else said.quantize
    return Trains(Adapter(said.rank, factor, said.targets, said.also, said.dropout), quantize=quantize)


def products_widen(world: World, dtype: torch.dtype) -> bool:
    """Whether the run's products go through fp32: on every worker if on any, as all wait for the slowest."""
    widen = world.sum(float(processor_is_slow(dtype)))[0] > 0
    settle(dtype, widen)
    return widen
