"""Seconds of a step: what is multiplied, moved in memory, updated, sent and read from disk, at a machine's rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tonnage.planning.calibration import Origin, TimedStep, parts_of
from tonnage.planning.catalogue import COMPILED, ROUNDED, ROUNDED_COMPILED, UPDATE_BYTES
from tonnage.planning.context import exchanged_bytes
from tonnage.planning.layout import Layout
from tonnage.planning.machine import Machine, of_cpu
from tonnage.planning.profile import BlockCost, HeadCost, Line, ModelProfile
from tonnage.planning.schedule import cut, idle_share
from tonnage.planning.stages import different_parts, workers_parts
from tonnage.planning.states import States, frozen_away, frozen_bytes, reduced_gradients, states, weights_on_disk
from tonnage.planning.tiling import blocks_in_tiles, vocabulary_in_tiles

DISPATCH_SECONDS = 1e-3
"""Of a block, forward and backward, however small the row: a hundred or two operations called from Python."""

FILLED_TOKENS = 100
"""On a CPU attention takes as long as if documents had so many tokens more: what fills up tiles, and what is done once
for a token. With 150, 512 and 1,024 tokens, three shapes of heads, two AVX-512 cores took 0.8 to 1.0 of that."""

SHARED_PASSES = 4
"""How often what workers on the CPUs of one machine send goes through memory: the sender reads and writes it, and so
does the receiver (``parallel.shared_memory``)."""

IN_TILES = 4 / 3
"""Products of a head and its loss that come in tiles, to those of one that is whole: four passes instead of three."""


@dataclass(frozen=True)
class Work:
    """What one worker does in a step, on average."""

    row_tokens: float
    """In one forward."""
    row_supervised: float
    document_tokens: float
    """Length of the document that a token is in, averaged over tokens."""


@dataclass(frozen=True)
class Seconds:
    """Of one step. The parts overlap, so the whole is less than their sum."""

    compute: float
    update: float
    communication: float
    disk: float
    """Reading and writing of what rests there."""
    total: float
    idle: float = 0.0
    """A pipeline's worker waits for the other stages."""
    host: float = 0.0
    """Copying of what rests in the host's memory, one way."""


def forward_backward_flops(layout: Layout, model: ModelProfile, work: Work) -> float:
    """Products of one worker's step, recompute included, attention's among them."""
    return product_flops(layout, model, work) + attention_flops(layout, model, work)


def product_flops(layout: Layout, model: ModelProfile, work: Work) -> float:
    """Those of linear layers."""
    of_text = _in_all(
        layout, model, work, lambda block: (block.forward_flops, block.backward_flops), lambda head: head.flops
    )
    return of_text + tower_flops(layout, model)


def fp8_flops(layout: Layout, model: ModelProfile, work: Work) -> float:
    """Those of linear layers that are computed in fp8."""
    return _of_blocks_in_fp8(layout, model, work, lambda block: block.fp8_flops)


def _of_blocks_in_fp8(layout: Layout, model: ModelProfile, work: Work, of_block: Callable[[BlockCost], Line]) -> float:
    """What products in fp8 cost in one worker's step, forward and backward."""
    if not model.in_fp8:
        return 0.0
    return _in_all(layout, model, work, lambda block: (of_block(block), Line(0, 0)), lambda _: Line(0, 0))


def tower_flops(layout: Layout, model: ModelProfile) -> float:
    """Products of what looks at images in one worker's step."""
    if (tower := model.tower) is None:
        return 0.0
    passes = tower.forward_flops + tower.backward_flops
    return layout.micro_batches * layout.mean_image_tokens * passes


def attention_flops(layout: Layout, model: ModelProfile, work: Work, filled_tokens: float = 0.0) -> float:
    """Queries with keys and weights with values, in documents that are longer by ``filled_tokens``.

    Forward 2 x 2 x size x length / 2 per token (causal), and backward 2.5 times that (FlashAttention-2, Dao 2023,
    section 4).
    """
    passes = 3.5 + layout.recomputed_part
    length = work.document_tokens + filled_tokens
    attention = 2 * model.attention_size * length * work.row_tokens * passes
    return layout.micro_batches * model.num_attending * attention


def pack_costs(model: ModelProfile) -> tuple[float, float]:
    """What a supervised token costs in the head, and a pair of tokens of one document in attention. The unit is what a
    token costs in the blocks: products, forward and backward."""
    if model.outside is None or not model.blocks:
        return 0.0, 0.0
    block = model.blocks["none"]
    of_token = model.num_blocks * (block.forward_flops.per_token + block.backward_flops.per_token)
    head = model.outside.head(FILLED_TOKENS).flops.per_token
    return head / of_token, 2 * model.attention_size * 3.5 * model.num_attending / of_token


def attention_timed(layout: Layout, model: ModelProfile, work: Work) -> float:
    """Operations that attention takes as long as, at its rate (``Machine.attention_flops``)."""
    return attention_flops(layout, model, work, FILLED_TOKENS if layout.device == "cpu" else 0.0)


def _in_all(
    layout: Layout,
    model: ModelProfile,
    work: Work,
    of_block: Callable[[BlockCost], tuple[Line, Line]],
    of_head: Callable[[HeadCost], Line],
) -> float:
    """What blocks cost, forward and backward, and the head, in one worker's step."""
    assert model.outside is not None
    tokens, blocks = work.row_tokens, 0.0
    for kind, number in layout.kinds_of(model.num_blocks):
        forward, backward = of_block(model.blocks[kind])
        blocks += number * (forward(tokens) + backward(tokens))
    supervised = work.row_supervised
    head = of_head(model.outside.head(supervised))(supervised)
    if layout.tiles > 1:  # logits are computed twice
        head *= IN_TILES
    return layout.micro_batches * (blocks + head)


def traffic_bytes(layout: Layout, model: ModelProfile, work: Work) -> float:
    """Bytes that everything but products reads and writes in one worker's step, beside what ``copied_bytes`` counts."""
    moved = _in_all(
        layout, model, work, lambda block: (block.forward_traffic, block.backward_traffic), lambda head: head.traffic
    )
    if layout.compiled:
        rounded = _of_blocks_in_fp8(layout, model, work, lambda block: block.fp8_numbers)
        moved = COMPILED * max(0.0, moved - ROUNDED * rounded) + ROUNDED_COMPILED * rounded
    return moved + summing_bytes(layout, model)


def made_bytes(layout: Layout, model: ModelProfile, work: Work) -> float:
    """Bytes of all tensors that the operations of one worker's step make, beside the copies of ``copied_bytes``."""
    return _in_all(layout, model, work, lambda block: (block.forward_made, block.backward_made), lambda head: head.made)


def copied_bytes(layout: Layout, model: ModelProfile) -> float:
    """Bytes that one worker reads and writes in a step to put what it sends into one piece, and apart again.

    As FSDP2 does it: weights are cast from the fp32 shard, copied in, and copied out; gradients are copied in, in fp32.
    A GPU that need not send them has them divided, by one, and copied; on CPUs a worker copies its part of their sum.
    """
    if not layout.sharded:
        return 0.0
    times, width, shards = layout.micro_batches, layout.width, layout.shards
    gathers = {0: 1, 1: 1, 2: 1, 3: 2 * times}[layout.zero] if layout.gathers else 0
    reductions = {0: 1, 1: 1, 2: times, 3: times}[layout.zero]
    gathered = (4 + width + 2 * width) / shards + 2 * width
    on_cpu = layout.device == "cpu"
    besides = (0 if on_cpu else 16) if shards == 1 else (8 / shards if on_cpu else 0)
    reduced = width + 4 + besides
    copied = model.trained_parameters * (gathers * gathered + reductions * reduced)
    if layout.gathers_frozen:
        copied += model.frozen.num_bytes * gathers * (3 / shards + 2)
    return copied


def summing_bytes(layout: Layout, model: ModelProfile) -> float:
    """Bytes that a GPU reads and writes in a step to make gradients of 16 bits fp32, and to add up those of several
    micro-batches; what is reduced between workers is counted there."""
    if layout.device != "cuda" or layout.sharded:
        return 0.0
    widened = 0 if layout.width == 4 else layout.width + 4
    times = layout.micro_batches
    return model.trained_parameters * (times * widened + 12.0 * (times - 1))


def sent_bytes(layout: Layout, model: ModelProfile) -> float:
    """Bytes that one worker sends in a step (the table of ``parallel.parallelize``; gradients travel in fp32)."""
    if layout.data_workers == 1:
        return 0.0
    parameters, times = model.trained_parameters, layout.micro_batches
    frozen = model.frozen.num_bytes if layout.gathers_frozen else 0
    weights, gradients = float(layout.width * parameters + frozen), 4 * parameters
    if layout.tiles > 1:
        weights += layout.width * _a_third_time(layout, model) / 2
    in_group = (layout.shards - 1) / layout.shards
    between = 2 * (layout.replicate - 1) / layout.replicate * gradients / layout.shards
    gathered = {0: 0, 1: weights, 2: weights, 3: 2 * times * weights}[layout.zero]
    reduced = {0: 0, 1: gradients, 2: times * gradients, 3: times * gradients}[layout.zero]
    return in_group * (gathered + reduced) + between


def _a_third_time(layout: Layout, model: ModelProfile) -> float:
    """Parameters of tiles that come a third time in a micro-batch: those of an embedding that is the head, and of
    blocks that are computed again."""
    both = model.head_parameters if model.is_tied else 0
    return both + layout.recomputed_part * blocks_in_tiles(layout, model)


def summed_bytes(layout: Layout, model: ModelProfile, work: Work) -> float:
    """Bytes that one worker sends in a step to sum what those of its tensor axis have of the same tokens.

    Two sums forward and two backward in a block (``parallel.tensor``), two more in one that is recomputed whole. Where
    ranks divide tokens, half of each is sent before a product and half after it: ``selective`` keeps what comes after.
    """
    if layout.tensor == 1:
        return 0.0
    sums, divides = 4 + 2 * layout.recomputed_part, model.token_ranks > 1
    if divides and layout.recompute == "selective":
        sums += 1
    tokens = work.row_tokens * (sums * model.num_blocks + 1) + (1 + divides) * work.row_supervised
    part = 2 * (layout.tensor - 1) / layout.tensor
    return part * layout.micro_batches * layout.width * model.hidden_size * tokens


def handed_on_bytes(layout: Layout, model: ModelProfile, work: Work) -> float:
    """Bytes that a pipeline's worker sends in a step: hidden states to the next stage, gradients to the one before."""
    return 2.0 * layout.stages_per_worker * layout.micro_batches * layout.width * model.own_hidden * work.row_tokens


def idle_of(layout: Layout) -> float:
    """Time in which a pipeline's worker waits for others, as a part of that in which it computes."""
    if not layout.stages:
        return 0.0
    weights = 1 / (3 + layout.recomputed_part)
    share = idle_share(layout.schedule, layout.pipeline, layout.stages_per_worker, layout.micro_batches, weights)
    return share / (1 - share)


def disk_bytes(layout: Layout, model: ModelProfile, whole: States | None = None) -> float:
    """Bytes that one worker reads and writes in a step for what rests on disk; ``whole`` are its states, by default
    those of ``model``."""
    whole, moved = whole or states(layout, model), 0.0
    if layout.optimizer_tier == "disk":
        moved += 2 * max(0, whole.optimizer - layout.optimizer_resident)
    if layout.parameter_tier == "disk":  # forward and backward, then read and written by the update
        written = 0 if model.frozen.parameters else 2  # what is frozen is only read
        moved += (2 * layout.micro_batches + written) * weights_on_disk(layout, model)
        if layout.tiles > 1:
            again = _a_third_time(layout, model) / model.num_parameters
            moved += layout.micro_batches * again * whole.weights
    if layout.gradient_tier == "disk":  # micro-batches add up on disk
        moved += (2 * layout.micro_batches) * whole.gradients
    return moved


def disk_seconds(layout: Layout, parts: Sequence[ModelProfile], machine: Machine) -> float:
    """How long what rests on disk takes in a step, on the node whose workers have most there; workers of a node share
    its disk, and those of one stage of a pipeline follow one another. ``parts`` are those of the stages' workers."""
    if not layout.tiers_on_disk:
        return 0.0
    per_node, per_part = machine.workers_on_node(layout.workers), layout.workers // len(parts)
    there = max(1, min(len(parts), per_node // per_part))
    moved = [disk_bytes(layout, part) for part in parts]
    most = max(sum(moved[first : first + there]) for first in range(len(parts) - there + 1))
    return most / there / (machine.disk_mixed_bytes_per_second / per_node)


def moved_seconds(layout: Layout, machine: Machine, moved: float, *, returns: bool = True) -> float:
    """How long bytes take between a device and its host's memory, one way; on a CPU, to other memory and, where what
    goes ``returns``, back."""
    if layout.device == "cpu":
        return (4 if returns else 2) * moved / (machine.memory_bytes_per_second * machine.share(layout.workers))
    return moved / host_link_rate(layout, machine)


def host_seconds(layout: Layout, model: ModelProfile, machine: Machine) -> float:
    """How long a worker's optimizer state takes from the host's memory to its device, or back, which goes on at the
    same time; on a CPU, to other memory and back, one after the other."""
    if layout.optimizer_tier != "host" or layout.update_tier == "host":
        return 0.0
    return moved_seconds(layout, machine, max(0, states(layout, model).optimizer - layout.optimizer_resident))


def gradient_seconds(layout: Layout, model: ModelProfile, machine: Machine) -> float:
    """How long a micro-batch's gradients take to the host's memory, to stay there or on their way to disk, or, to be
    added to or used, back; on a CPU, to other memory and back."""
    if layout.gradient_tier != "host" and (layout.update_tier == "device" or layout.device == "cpu"):
        return 0.0
    return moved_seconds(layout, machine, reduced_gradients(layout, model))


def exposed_copies(
    layout: Layout,
    state: float,
    gradients: float,
    inputs: float,
    update: float,
    forward: float,
    backward: float,
    weights: float = 0.0,
) -> float:
    """How long a device waits for what comes from its host's memory or goes there: given how long state, a
    micro-batch's gradients, a step's inputs of blocks and the ``weights`` of one pass of it take in one direction, and
    an update, and a step's forward and backward passes. Both directions go on at once.

    State goes both ways beside the update and the next step's first forward pass; in every one inputs leave and weights
    come. Gradients leave beside the backward pass, in which inputs, weights and earlier sums come. To an update that
    the host makes nothing comes back.
    """
    times = layout.micro_batches
    weights *= times
    if layout.update_tier == "host":
        sums = (times - 1) * gradients if layout.gradient_tier == "host" else 0.0
        in_backward = max(0.0, max(times * gradients, sums + inputs + weights) - backward)
        return max(0.0, max(inputs, weights) - forward) + in_backward
    in_backward = max(0.0, max(times * gradients, (times - 1) * gradients + inputs + weights) - backward)
    if layout.optimizer_tier == "host":
        first = max(0.0, state + max(gradients + weights / times, inputs / times) - update - forward / times)
        return first + max(0.0, max(inputs, weights) - forward) * (times - 1) / times + in_backward
    return max(0.0, gradients - update) + max(0.0, max(inputs, weights) - forward) + in_backward


def weights_seconds(layout: Layout, model: ModelProfile, machine: Machine) -> float:
    """How long the blocks' parameters that rest in the host's memory take to the device, once, and what comes in tiles;
    on a CPU, to other memory."""
    moved: float = frozen_away(layout, model)
    if layout.update_tier == "host" and layout.parameter_tier != "device" and not model.frozen.parameters:
        moved = states(layout, model).weights * (model.share_of_blocks + _share_in_tiles(layout, model))
        moved += layout.width * _a_third_time(layout, model) / 2 if layout.tiles > 1 else 0
    return moved_seconds(layout, machine, moved, returns=False)


def _share_in_tiles(layout: Layout, model: ModelProfile) -> float:
    """Of all parameters, those of embedding and head if they come in tiles."""
    return vocabulary_in_tiles(layout, model) / model.num_parameters


def renewed_seconds(layout: Layout, model: ModelProfile, machine: Machine) -> float:
    """How long what stays on a device of the weights that its host updates takes there, once a step."""
    if layout.update_tier == "device" or layout.device == "cpu":
        return 0.0
    goes = model.share_of_blocks + _share_in_tiles(layout, model)
    stays = 1.0 if layout.parameter_tier == "device" or model.frozen.parameters else 1 - goes
    return stays * (states(layout, model).weights - frozen_bytes(layout, model)) / host_link_rate(layout, machine)


def inputs_seconds(layout: Layout, model: ModelProfile, work: Work, machine: Machine) -> float:
    """How long a step's inputs of blocks take to the host's memory or back; on a CPU, to other memory and back."""
    if layout.activation_tier != "host":
        return 0.0
    number = layout.recomputed_part * model.num_blocks
    moved = layout.micro_batches * number * layout.width * model.own_hidden * work.row_tokens
    return moved_seconds(layout, machine, moved)


def seconds_besides(layout: Layout, model: ModelProfile, work: Work, made_bytes_per_second: float) -> float:
    """What a step's operations take on a CPU beside products and traffic: to be called, however small they are, and
    where memory is given back, to get it anew, as much a second as one worker does. A GPU computes while they are
    called."""
    if layout.device != "cpu":
        return 0.0
    called = calling_seconds(layout, model)
    if not layout.returns_memory:
        return called
    return called + made_bytes(layout, model, work) / made_bytes_per_second


def calling_seconds(layout: Layout, model: ModelProfile) -> float:
    """How long it takes to call the operations of a step, however small they are."""
    return layout.micro_batches * model.num_blocks * DISPATCH_SECONDS


def copying_seconds(layout: Layout, model: ModelProfile, machine: Machine) -> float:
    """How long a worker takes for ``copied_bytes``, half of which are written, on a CPU to memory that comes anew from
    the system, in huge pages."""
    copied, share = copied_bytes(layout, model), machine.share(layout.workers)
    seconds = copied / (machine.memory_bytes_per_second * share)
    if layout.device == "cpu":
        seconds += copied / 2 / (machine.fresh_bytes_per_second * machine.cores * share)
    return seconds


def compute_seconds(layout: Layout, model: ModelProfile, work: Work, machine: Machine) -> float:
    """How long a worker that has the whole model computes in a step."""
    share = machine.share(layout.workers)
    of_products, of_traffic = parts_of(machine, layout.precision)
    in_fp8 = fp8_flops(layout, model, work)
    seconds = (product_flops(layout, model, work) - in_fp8) / machine.flops[layout.precision]
    seconds += in_fp8 / (machine.fp8_flops or machine.flops[layout.precision])
    seconds += attention_timed(layout, model, work) / machine.attention_flops(layout.precision)
    seconds /= share * of_products
    seconds += traffic_bytes(layout, model, work) / (machine.memory_bytes_per_second * share * of_traffic)
    seconds += seconds_besides(layout, model, work, machine.made_bytes_per_second * machine.cores * share)
    return max(seconds, calling_seconds(layout, model))


def timed_step(
    layout: Layout, model: ModelProfile, work: Work, origin: Origin, besides: float, seconds: float
) -> TimedStep:
    """That a step took so many ``seconds``, beside what ``compute_seconds`` counts of it."""
    return TimedStep(
        origin,
        layout.precision,
        product_flops(layout, model, work),
        attention_timed(layout, model, work),
        traffic_bytes(layout, model, work),
        besides,
        seconds,
    )


def update_rate(layout: Layout, machine: Machine) -> float:
    """Parameters that a machine updates a second; where the loops of a CPU are switched off, as many as memory is fast
    enough for, through which every operation of their twin goes."""
    measured = machine.optimizer_parameters_per_second[layout.moments]
    if machine.kind != "cpu" or layout.updates_by_loops:
        return measured
    return min(measured, machine.memory_bytes_per_second / UPDATE_BYTES["operations"][layout.moments])


def host_link_rate(layout: Layout, machine: Machine) -> float:
    """Bytes a second between a device and its host's memory, one way: each has a link of its own, and all of a node
    share what that memory gives, where it was seen to what rate an update comes there."""
    per_node, link = machine.workers_on_node(layout.workers), machine.host_device_bytes_per_second
    if per_node == 1 or not machine.host_parameters_per_second:
        return link
    return min(link, machine.host_parameters_per_second["fp32"] * UPDATE_BYTES["cpu"]["fp32"] / per_node)


def orthogonal_seconds(layout: Layout, model: ModelProfile, machine: Machine) -> float:
    """How long a machine's device takes to make a worker's matrices orthogonal for Muon: its share of them, where
    workers have rows of each, else all; ranks of a tensor axis compute the same."""
    if layout.optimizer != "muon":
        return 0.0
    return model.orthogonal_flops * model.matrices_part(layout.shards) / machine.flops["bf16"]


def host_update_rate(layout: Layout, machine: Machine) -> float:
    """Parameters that one worker's part of a host updates a second: as expected of any processor where nobody has
    measured it."""
    host = of_cpu(machine.cores, machine.host_bytes)
    rate = (machine.host_parameters_per_second or host.optimizer_parameters_per_second)[layout.moments]
    if not layout.updates_by_loops:
        rate = min(rate, host.memory_bytes_per_second / UPDATE_BYTES["operations"][layout.moments])
    return rate / machine.workers_on_node(layout.workers)


def stages_of(layout: Layout, model: ModelProfile, work: Work, machine: Machine, per_worker: int) -> tuple[int, ...]:
    """Blocks of each stage of a pipeline, cut by how long a block and the head compute."""
    head, with_a_block = (
        compute_seconds(layout, replace(model, num_blocks=number), work, machine) for number in (0, 1)
    )
    return cut(model.num_blocks, layout.pipeline * per_worker, with_a_block - head, head)


def step_seconds(layout: Layout, model: ModelProfile, work: Work, machine: Machine) -> Seconds:
    """How long a step takes on a machine.

    Workers of one CPU share its rates. What rests on disk comes and goes beside computing, which waits only for the
    part that is longer. A pipeline goes at the pace of its slowest worker.
    """
    of_workers = workers_parts(model, layout.stages, layout.pipeline)
    parts = different_parts(model, layout.stages, layout.pipeline)
    model = max(parts, key=lambda part: compute_seconds(layout, part, work, machine))
    per_node, share = machine.workers_on_node(layout.workers), machine.share(layout.workers)
    compute = compute_seconds(layout, model, work, machine)
    idle = idle_of(layout) * compute
    parameters = max(part.trained_parameters for part in parts) / layout.shards
    update = parameters / (update_rate(layout, machine) * share)
    if layout.update_tier == "host" and machine.kind != "cpu":
        update = parameters / host_update_rate(layout, machine)
    update += max(orthogonal_seconds(layout, part, machine) for part in parts) / share
    link = inside = machine.link_bytes_per_second
    if machine.nodes > 1:  # a ring enters and leaves a node once; the rings of a node share all its adapters
        link = min(link, machine.network_bytes_per_second * max(1, machine.devices_per_node // layout.tensor))
    if layout.tensor * layout.context > per_node:
        inside = min(inside, machine.network_bytes_per_second)
    exchanged = exchanged_bytes(layout, model, work.row_tokens)
    summed = summed_bytes(layout, model, work) + exchanged
    summed = summed / inside if summed else 0.0  # nothing else goes on meanwhile
    sent = max(sent_bytes(layout, part) for part in parts)
    shares_memory = machine.kind == "cpu" and machine.nodes == 1
    between = machine.memory_bytes_per_second * share / SHARED_PASSES if shares_memory else link
    communication = sent / between if sent else 0.0
    if layout.optimizer == "muon" and layout.shards > 1:  # rows of updates to whoever has the matrix, and back, in bf16
        communication += max(4 * part.matrices_part(layout.shards) for part in parts) / link
    if layout.optimizer == "muon" and layout.tensor > 1:
        communication += 2 * (layout.tensor - 1) * max(part.matrices_part(layout.shards) for part in parts) / inside
    communication += max(copying_seconds(layout, part, machine) for part in parts)
    if layout.stages:  # stages are neighbours in a node only where a node has several
        apart = layout.workers // layout.pipeline >= per_node and machine.nodes > 1
        lane = min(machine.link_bytes_per_second, machine.network_bytes_per_second if apart else math.inf)
        communication += handed_on_bytes(layout, model, work) / lane
    disk = disk_seconds(layout, of_workers, machine)
    inputs = inputs_seconds(layout, model, work, machine)
    state = max(host_seconds(layout, part, machine) for part in parts)
    gradients = max(gradient_seconds(layout, part, machine) for part in parts)
    weights = max(weights_seconds(layout, part, machine) for part in parts)
    hidden = 0.0
    copying = host = state + layout.micro_batches * (gradients + 2 * weights) + inputs
    if machine.kind == "cpu":
        exposed = communication
    else:
        exposed = max(0.0, communication - 0.7 * compute)
        forward = compute / (3 + layout.recomputed_part)
        renewed = max(renewed_seconds(layout, part, machine) for part in parts)
        host += renewed
        backward = compute - forward
        copying = exposed_copies(layout, state, gradients, inputs, update, forward, backward, weights)
        if layout.update_tier == "host":  # goes on beside the next step's first pass, which takes up what it changed
            first = forward / layout.micro_batches
            hidden = update + first - max(update, first + renewed)
    total = max(compute + idle + update - hidden + copying + exposed + summed, disk)
    return Seconds(compute, update, communication + summed, disk, total, idle, host)
