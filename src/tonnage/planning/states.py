"""Bytes of what stays through a step (weights, masters, moments, gradients), wherever it rests."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from tonnage.host.moments import LOW_BYTES, MOMENT_BYTES, MUON_BYTES, UPDATE_BYTES, UPDATE_ELEMENTS
from tonnage.offload.residency import BLOCKS, GRADIENTS, OPTIMIZER, TILES, blocks_in_memory
from tonnage.planning.layout import Layout
from tonnage.planning.profile import ModelProfile, share_of
from tonnage.planning.stages import different_parts
from tonnage.planning.tiling import block_in_tiles, blocks_in_tiles, largest_tile, vocabulary_in_tiles


@dataclass(frozen=True)
class States:
    """Bytes of a worker's states, wherever they rest."""

    weights: int
    """The shard at rest: of the precision on one worker, else the fp32 master."""
    gathered: int
    """Weights in the compute type that stay beside them through a step."""
    gradients: int
    optimizer: int


def states(layout: Layout, model: ModelProfile) -> States:
    """Bytes of states that a worker keeps.

    What is frozen takes its bytes alone: whole on every worker, or its share under ZeRO 3, and gathered there.

    One worker in bf16: 2 + 2 + 10 bytes a parameter (low half of the master and two fp32 moments), in fp16 2 + 2 + 12
    (no half of the master is an fp16 number); gradients take 4 where micro-batches are summed. Several workers: an fp32
    master, fp32 gradients and the moments, of the largest of ``shards``, and below ZeRO 3 the gathered weights in the
    compute type besides; ZeRO 1 sums micro-batches before it reduces, so it holds whole fp32 gradients.
    """
    parameters, frozen = model.trained_parameters, model.frozen
    moments = MOMENT_BYTES[layout.moments]
    if not layout.sharded:
        sums = layout.micro_batches > 1
        low = LOW_BYTES[layout.precision]
        return States(
            weights=layout.width * parameters + frozen.num_bytes,
            gathered=0,
            gradients=(4 if sums else layout.width) * parameters,
            optimizer=round((low + moments) * parameters - without_second_moments(layout, model, layout.shards)),
        )
    part = model.part(layout.shards)
    # FSDP2 makes room for as many shards as large as the largest.
    padded = model.trained_outside - vocabulary_in_tiles(layout, model)
    if layout.zero < 3:
        padded += round((parameters - padded) * layout.shards * model.share(layout.shards))
    stays = layout.width * padded
    whole_gradients = layout.zero == 1 and layout.micro_batches > 1
    return States(
        weights=4 * part + frozen_bytes(layout, model),
        gathered=(stays if layout.gathers else 0) + (frozen.outside_bytes if layout.gathers_frozen else 0),
        gradients=4 * (parameters if whole_gradients else part),
        optimizer=round(moments * part - without_second_moments(layout, model, layout.shards)),
    )


def without_second_moments(layout: Layout, model: ModelProfile, shards: int) -> float:
    """Bytes that the fullest of ``shards`` does not have of matrices which Muon updates: they have one moment."""
    return MOMENT_BYTES[layout.moments] / 2 * model.matrices_part(shards) if layout.optimizer == "muon" else 0.0


def of_a_matrix(layout: Layout, model: ModelProfile) -> int:
    """Bytes between the operations of Muon's update of the largest matrix: the update in bf16, what an iteration makes
    of it, and the parts that come and go where several workers have them; or before that, its momentum and the last
    update in bf16, and what a part of it takes in fp32."""
    if layout.optimizer != "muon":
        return 0
    largest = layout.tensor * (model.largest_matrix or model.block_parameters)
    copies = 1 + 2 * (layout.shards > 1) + 2 * (layout.tensor > 1)
    iterating = (2 * copies + 4 * model.orthogonal_width) * largest
    return max(iterating, 2 * (2 * largest + MUON_BYTES // 2 * min(UPDATE_ELEMENTS, largest)))


def held_states(layout: Layout, model: ModelProfile) -> States:
    """Bytes of states that a worker holds in memory through a step, where some of them rest on disk."""
    whole, part = states(layout, model), max(1, model.trained_parameters)
    if layout.update_tier == "host":
        return _beside_a_host(layout, model, whole)
    weights, gradients, optimizer = whole.weights, whole.gradients, whole.optimizer
    if layout.parameter_tier == "disk" and layout.device == "cpu":  # what no block holds, the block that runs, and some
        blocks = blocks_in_memory(gathered=layout.data_workers > 1) * layout.stages_per_worker
        frozen = model.frozen
        if frozen.parameters:  # which rests there alone
            present = (frozen.outside_bytes + blocks * frozen.block_bytes) / frozen.num_bytes
            resting = frozen_bytes(layout, model)
            weights = min(weights, round(weights - resting + resting * present))
        else:
            outside = model.outside_parameters - vocabulary_in_tiles(layout, model)
            some = blocks * (model.block_parameters - block_in_tiles(layout, model))
            some += TILES.slots * largest_tile(layout, model)
            weights = min(weights, round(weights / part * (outside + some)))
    if away := frozen_away(layout, model):  # of what is frozen, the blocks that there is room for
        present = min(away, _rooms(layout) * _frozen_block_bytes(layout, model))
        weights += present - (away if layout.device != "cpu" else 0)  # whose memory is the host's
    if layout.gradient_tier != "device":
        # Come a few ahead of their update: with tiles, those that no block holds first.
        outside = model.trained_outside
        if layout.optimizer_tier == "device":
            outside = model.head_parameters if not model.frozen.head else 0
        if layout.tiles > 1:  # those of tiles are counted where they are wanted
            outside = model.trained_outside - vocabulary_in_tiles(layout, model)
        some = max(outside, model.trained_block - block_in_tiles(layout, model))
        if layout.gradient_tier == "host":
            some = outside + model.trained_block  # a few of the first block's as well, in memory of their own
        gradients = round(reduced_gradients(layout, model) / part * some)
    if layout.optimizer_tier == "disk":
        optimizer = OPTIMIZER["disk"].ring_bytes(optimizer, layout.optimizer_resident)
    if layout.optimizer_tier == "host":
        streams = OPTIMIZER["host"].ring_bytes(optimizer, layout.optimizer_resident)
        optimizer = streams + (optimizer if layout.device == "cpu" else 0)  # whose memory is the host's
    return States(weights, whole.gathered, gradients, optimizer)


def _beside_a_host(layout: Layout, model: ModelProfile, whole: States) -> States:
    """What a device holds whose parameters are updated in the host's memory: copies of them or, of what several share,
    of its shard; of blocks that come and go, and of tiles, the two that there is room for. On a CPU that is the same
    memory."""
    weights, of_blocks = whole.weights, layout.width * blocks_in_tiles(layout, model)
    weights -= of_blocks + layout.width * vocabulary_in_tiles(layout, model) - _tiles_bytes(layout, model)
    if away := frozen_away(layout, model):
        weights -= max(0, away - _rooms(layout) * _frozen_block_bytes(layout, model))
    elif layout.parameter_tier != "device" and model.num_blocks:
        others = round(whole.weights * model.share_of_blocks) - of_blocks
        weights -= max(0, others - _rooms(layout) * _block_bytes(layout, model))
    if layout.device != "cpu":
        return States(weights, whole.gathered, 0, 0)
    masters = masters_bytes(layout, model)
    return States(weights + masters, whole.gathered, 0, updated_on_host(layout, model) - masters)


def _rooms(layout: Layout) -> int:
    """Blocks of a worker that there is room for on its device, where the others are elsewhere."""
    return BLOCKS.slots * layout.stages_per_worker


def _tiles_bytes(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the tiles that there is room for where they come from elsewhere."""
    return TILES.slots * layout.width * largest_tile(layout, model)


def _block_bytes(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the largest block as it rests on a worker, but for what comes in tiles."""
    if not layout.sharded:
        return layout.width * (model.trained_block - block_in_tiles(layout, model))
    return math.ceil(4 * model.share(layout.shards) * model.trained_block)


def masters_bytes(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the host's memory for parameters that it updates: all or, where those of blocks rest on disk, the others
    and as many blocks, and tiles, as are on their way, and read ahead."""
    if layout.update_tier == "device":
        return 0
    weights = states(layout, model).weights - frozen_bytes(layout, model)
    if layout.parameter_tier != "disk" or model.frozen.parameters:
        return weights
    some = 2 * (_rooms(layout) * _block_bytes(layout, model) + _tiles_bytes(layout, model))
    return weights - max(0, weights_on_disk(layout, model) - some)


def updated_on_host(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the host's memory for an update that is made there: parameters, and state or, where that rests on disk,
    the buffers through which it goes; those through which gradients go to disk."""
    if layout.update_tier == "device":
        return 0
    whole = states(layout, model)
    optimizer = whole.optimizer
    if layout.optimizer_tier == "disk":
        optimizer = OPTIMIZER["disk"].ring_bytes(optimizer, layout.optimizer_resident)
    largest = math.ceil(model.share(layout.shards) * max(model.head_parameters, model.largest_matrix))
    if layout.tiles > 1:
        largest = min(largest, largest_tile(layout, model))
    leaving = GRADIENTS["disk"].buffer_bytes(4 * largest)
    total = masters_bytes(layout, model) + optimizer + (leaving if layout.gradient_tier == "disk" else 0)
    return total + (between_operations(layout, model) if layout.device != "cpu" else 0)


def between_operations(layout: Layout, model: ModelProfile) -> int:
    """Bytes that lie between the operations of an update, where no loops make it."""
    return 0 if layout.updates_by_loops else UPDATE_BYTES * min(UPDATE_ELEMENTS, model.part(layout.shards))


def host_bytes(layout: Layout, model: ModelProfile, *, copies: bool = True) -> int:
    """Bytes of the host's memory that a worker of another device takes: for states that rest there, for gradients and
    for inputs of blocks, and for ``copies`` from which checkpoints are saved beside training, which alone need not be
    locked, if slower then."""
    if layout.device == "cpu":
        return 0
    parts = different_parts(model, layout.stages, layout.pipeline)
    return max(_host_bytes(layout, part, copies=copies) for part in parts)


def _host_bytes(layout: Layout, model: ModelProfile, *, copies: bool) -> int:
    """Those of the worker that has ``model``."""
    on_device = layout.update_tier == "device"
    there = states(layout, model).optimizer if on_device and layout.optimizer_tier == "host" else 0
    saved = _copied_to_save(layout, model) if copies and layout.saves_beside else 0
    there += updated_on_host(layout, model) + saved
    return there + frozen_on_host(layout, model) + of_a_step(layout, model)


def fullest_states(layout: Layout, model: ModelProfile) -> States:
    """Of each kind those of the worker that has most of it, wherever they rest."""
    of_workers = (astuple(states(layout, part)) for part in different_parts(model, layout.stages, layout.pipeline))
    return States(*map(max, zip(*of_workers, strict=True)))


def _copied_to_save(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the host's memory for a copy from which a checkpoint is saved; what rests on disk is copied there."""
    copied = saved_bytes(layout, model)
    if layout.optimizer_tier == "disk":
        copied -= states(layout, model).optimizer
    if layout.parameter_tier == "disk" and layout.update_tier == "host" and not model.frozen.parameters:
        copied -= weights_on_disk(layout, model)
    return copied


def frozen_on_host(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the host's memory for the blocks' frozen parameters, where these alone rest there or, beside another
    device, on disk: for as many as are on their way then, and read ahead."""
    away = frozen_away(layout, model)
    return (
        min(away, 2 * _rooms(layout) * _frozen_block_bytes(layout, model)) if layout.parameter_tier == "disk" else away
    )


def frozen_away(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the blocks' frozen parameters of a worker, where these alone rest in the host's memory or, beside
    another device, on disk."""
    streams = layout.parameter_tier == "host" or (layout.parameter_tier == "disk" and layout.device != "cpu")
    return _frozen_in_blocks(layout, model) if streams and model.frozen.num_bytes else 0


def _frozen_in_blocks(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the blocks' frozen parameters of a worker."""
    return round(frozen_bytes(layout, model) * (1 - model.frozen.outside_bytes / model.frozen.num_bytes))


def _frozen_block_bytes(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the largest block's frozen parameters as they rest on a worker."""
    shards = layout.shards if layout.gathers_frozen else 1
    return math.ceil(model.frozen.block_bytes * share_of(model.frozen.rows, shards))


def of_a_step(layout: Layout, model: ModelProfile) -> int:
    """Bytes of the host's memory for what a step computes: gradients and inputs of blocks, where they rest there."""
    gradients = reduced_gradients(layout, model) if layout.gradient_tier == "host" else 0
    one = round(layout.width * model.own_hidden * layout.row_tokens)
    inputs = layout.recomputed[0] if layout.recomputed else model.num_blocks
    return gradients + (layout.passes_under_way() * inputs * one if layout.activation_tier == "host" else 0)


def reduced_gradients(layout: Layout, model: ModelProfile) -> int:
    """Bytes of a worker's gradients when they are reduced."""
    if not layout.sharded:
        return states(layout, model).gradients
    return 4 * model.part(layout.shards)


def weights_on_disk(layout: Layout, model: ModelProfile) -> int:
    """Bytes of a worker's weights that rest on disk with ``parameter_tier: disk``: of the blocks, where some are frozen
    those alone, and of what comes in tiles."""
    if model.frozen.parameters:
        return _frozen_in_blocks(layout, model)
    in_tiles = vocabulary_in_tiles(layout, model) / model.num_parameters
    return round(states(layout, model).weights * (model.share_of_blocks + in_tiles))


def resting_on_disk(layout: Layout, model: ModelProfile, whole: States, *, caches: bool) -> int:
    """Bytes that a worker of such ``whole`` states has on disk for itself while it trains and saves, a packed base in
    the cache left out, where the run ``caches`` one. Whatever is saved, state is copied for it, out of its tiles;
    parameters are only where a checkpoint is saved beside training, which the last one is not."""
    needed = 0
    if layout.optimizer_tier == "disk":
        needed += 2 * whole.optimizer - min(layout.optimizer_resident, whole.optimizer)
    if layout.parameter_tier == "disk" and not (caches and is_packed(layout, model)):
        trained = not model.frozen.parameters  # else it is only read, and in no checkpoint
        divided = layout.tensor * layout.pipeline > 1  # of a part, no more than all of it
        weights = whole.weights if trained or divided else weights_on_disk(layout, model)
        needed += (2 if layout.saves_beside and trained else 1) * weights
    if layout.gradient_tier == "disk":
        needed += whole.gradients
    return needed


def is_packed(layout: Layout, model: ModelProfile) -> bool:
    """Whether what is frozen is packed, and rests on disk whole, as no parts of matrices and stages do."""
    whole = layout.tensor == layout.pipeline == 1
    packed = model.frozen.num_bytes < layout.width * model.frozen.parameters
    return layout.parameter_tier == "disk" and packed and whole


def packed_on_disk(model: ModelProfile) -> int:
    """Bytes of a packed base in the cache: of the blocks, which every worker streams its part of."""
    return model.frozen.num_bytes - model.frozen.outside_bytes


def frozen_bytes(layout: Layout, model: ModelProfile) -> int:
    """Bytes of a worker's weights that are not trained, and that no checkpoint has."""
    return model.frozen.part(layout.shards if layout.gathers_frozen else 1)


def saved_bytes(layout: Layout, model: ModelProfile) -> int:
    """Bytes that a checkpoint has of a worker."""
    whole = states(layout, model)
    return whole.weights - frozen_bytes(layout, model) + whole.optimizer
