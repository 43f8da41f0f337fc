"""The order in which a model is transformed before it has memory.

A model arrives on the meta device and leaves sharded, still without memory. Every technique is a setting here, and
the order is the same whatever the settings, because each needs what comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tonnage.host.quantized import Format
from tonnage.model.dropout import Drawn
from tonnage.model.packed_layers import UNDIVIDED, PackedLayer, pack_layers
from tonnage.model.tensor_plan import TensorPlan
from tonnage.parallel.block_inputs import BlockInputs
from tonnage.parallel.compile import compile_blocks
from tonnage.parallel.cpu_collectives import CpuCollectives, sums_in_place
from tonnage.parallel.recompute import RecomputeMode, recompute_blocks
from tonnage.parallel.sequence_tiles import tile_sequence
from tonnage.parallel.tensor import divide
from tonnage.parallel.tiled import TiledWeight
from tonnage.parallel.units import UnitInFp32, units_in_fp32


@dataclass(frozen=True)
class Precision:
    """Data types of a run."""

    compute: torch.dtype
    """Of the forward and backward pass."""
    storage: torch.dtype
    """Of the parameters at rest. On one rank a weight of 16 bits is what its fp32 master rounds to, and the rest of the
    master is the optimizer's (``kernels.adamw``). Elsewhere the shard *is* the master, in fp32, and is gathered in the
    compute dtype."""

    @staticmethod
    def of(name: str, data_size: int) -> Precision:
        """The data types of ``precision: name`` where ``data_size`` ranks take packs of their own."""
        compute = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
        return Precision(compute, compute if data_size == 1 else torch.float32)


@dataclass(frozen=True)
class Transforms:
    """What is done to a model, or to a stage of one; by default nothing but ZeRO 3."""

    tensor_plan: TensorPlan | None = None
    """How matrices are divided along ``tensor``."""
    tiled: Sequence[TiledWeight] = ()
    """Weights that come in tiles."""
    quantize: Format | None = None
    """The form in which what is frozen is packed; None: each weight in its own, if it keeps one."""
    sequence_tile: int | None = None
    """Tokens of which MLPs of blocks compute at a time; None is all of a row."""
    drawn: Drawn | None = None
    """What has the keys of tokens by which adapters drop, where they do."""
    compile: bool = False
    recompute: RecomputeMode = "none"
    recomputed: int | None = None
    """How many blocks recompute, the first ones; None is all."""
    keep_inputs: Callable[[Sequence[nn.Module]], BlockInputs] | None = None
    """Where inputs of the blocks that recompute rest in the host's memory: what takes care of them."""
    zero: int = 3
    in_fp32: Collection[nn.Parameter] = ()
    """Parameters that are computed with in fp32, whatever the others are."""
    blocks_ahead: int = 1
    """Blocks that are gathered while one runs."""


def parallelize(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: Precision,
    transforms: Transforms,
) -> tuple[Sequence[PackedLayer], BlockInputs | None]:
    """Transform ``root``, the whole model or a stage that was cut out of it (``stages``), in place. Returns the layers
    whose weights are packed, for whoever fills them, and what has inputs of blocks in the host's memory.

    1. Tensor: divide matrices first, as this changes what a block computes and which parameters it has, on which all
       else depends.
    2. Tiles: weights that come in tiles are sharded already, and whatever follows leaves them alone.
    3. Pack what is frozen, if it is to be: of each matrix what this rank has.
    4. Tiles of the sequence: an MLP as it has become runs once for each. What one of them computes is compiled by
       itself, since Dynamo does not compile a backward pass that computes anew.
    5. Compile what a block computes, without the recompute that is put around it: Dynamo does not compile what
       ``torch.utils.checkpoint`` calls. Blocks with ``selective`` recompute stay uncompiled: it keeps results of single
       operations, which a compiled block fuses.
    6. Recompute: what a block saves for its backward pass is the block's own affair, and it must be settled before
       anything else is wrapped around the block, so that a recomputed forward does not gather parameters again.
    7. Inputs of blocks that recompute leave for the host's memory, around that: they are what such a block saves.
    8. Shard last: it wraps whatever the blocks have become. Blocks before the root, so that the root unit holds only
       what no block does (embedding, final norm, head).

    What rests on the host or on disk is attached when the model has memory (``training.placing``).
    """
    token_parts = 1
    if (plan := transforms.tensor_plan) is not None:
        divide(root, plan, mesh["tensor"])
        token_parts = plan.token_ranks(mesh["tensor"].size())
    packed = pack_layers(root, blocks, transforms.quantize)
    compiled = transforms.compile and transforms.recompute != "selective"
    if transforms.sequence_tile is not None:
        tile = -(-transforms.sequence_tile // token_parts)
        tile_sequence(blocks, tile, transforms.drawn, compiled=compiled, parts=token_parts)
    if compiled:
        compile_blocks(blocks)
    recomputed = blocks[: transforms.recomputed]
    recompute_blocks(recomputed, transforms.recompute)
    inputs = transforms.keep_inputs(recomputed) if transforms.keep_inputs is not None else None
    parts = [part for layer in packed for part in layer.parameters().items()]
    in_fp32 = {part for _, part in parts if part.dtype == torch.float32}.union(transforms.in_fp32)
    undivided = {part for name, part in parts if name in UNDIVIDED}
    shard_parameters(root, blocks, mesh, precision, replace(transforms, in_fp32=in_fp32), undivided)
    return packed, inputs


def shard_parameters(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: Precision,
    transforms: Transforms,
    undivided: Collection[nn.Parameter] = (),
) -> None:
    """Shard every parameter along ``shard``, hold it again along ``replicate`` (FSDP2).

    Where both have a size of one nothing is applied, unless parameters are computed with in another type than they are
    stored in.

    The ZeRO stages are settings of this one mechanism (here and in ``before_micro_batch``):

    ===== ============================ =========================== ==========================================
    stage parameters after forward     gradients reduced           bytes sent per step (P parameters, M micro-batches)
    ===== ============================ =========================== ==========================================
    0     stay (nothing is sharded)    after the last micro-batch  2 P (all-reduce)
    1     stay                         after the last micro-batch  P + P
    2     stay                         after every micro-batch     P + M P
    3     are freed, gathered again    after every micro-batch     2 M P + M P
    ===== ============================ =========================== ==========================================

    What is frozen is gathered in the type in which it is stored. Below ZeRO 3, and where there is nobody to share it
    with, every rank has it whole, as it has what is ``undivided``: FSDP2 does not see that, nor what comes in tiles.

    Gradients are *summed* over ranks, in fp32: the loss of a micro-batch is already divided by the step's global
    number of supervised tokens, so an average would divide twice. How CPUs send all that: ``cpu_collectives``.
    """
    data = mesh["replicate", "shard"]
    if data.size() == 1 and precision.storage == precision.compute:
        return
    whole, zero = set(undivided), transforms.zero
    if zero < 3 or data["shard"].size() == 1:
        whole = {parameter for parameter in root.parameters() if not parameter.requires_grad}
    whole.update(weight.parameter for weight in transforms.tiled)
    # Inputs keep their types: the weights of the targets are fp32 numbers that no rounding may touch.
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    in_place, replicated = sums_in_place(mesh), data["replicate"].size() > 1
    by_hook = in_place and data["shard"].size() == 1  # FSDP2 has nothing to reduce
    on_cpus = CpuCollectives(data["replicate" if by_hook else "shard"], is_whole=by_hook) if in_place else None

    def shard(module: nn.Module, policy: MixedPrecisionPolicy, others: set[nn.Parameter]) -> None:
        fully_shard(
            module,
            mesh=data if replicated and not by_hook else data["shard"],
            mp_policy=policy,
            reshard_after_forward=zero == 3 and module is not root,
            ignored_params=others,
        )
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)
        if on_cpus is not None:
            on_cpus.serve(module)
        if not by_hook:
            module.set_gradient_divide_factor(1.0)

    units = units_in_fp32(root, blocks, frozenset(transforms.in_fp32) - whole)
    learn = [any(parameter.requires_grad for parameter in block.parameters()) for block in blocks]
    for unit in units.values():
        shard(unit, replace(policy, param_dtype=torch.float32), {*unit.parameters()} - unit.kept)
    theirs = {parameter for unit in units.values() for parameter in unit.kept} | whole
    for module in (*blocks, root):
        shard(module, policy, theirs)
    if transforms.blocks_ahead > 1:
        gather_ahead([(block, units.get(block)) for block in blocks], learn, transforms.blocks_ahead)


def gather_ahead(blocks: Sequence[tuple[nn.Module, UnitInFp32 | None]], learn: Sequence[bool], num_ahead: int) -> None:
    """While a block runs, gather the next ``num_ahead``, forward and backward. ``blocks`` are pairs of a block and its
    unit in fp32, if it has one; ``learn`` says of which any parameters are trained.

    Left alone, FSDP2 gathers a block when the host comes to it: on a device one block is on its way while another runs,
    and every message that takes longer than a block is waited for. With more ahead a long one may use some of the next
    block's time. That takes memory for each block ahead and, forward, for what was received of the block that runs,
    which FSDP2 holds as well (``planning.memory``).

    Not for blocks that take turns in limited memory (``host_blocks``, ``tiled``) or are updated while the next step
    begins, as each waits for its own update alone (``training.resting``), nor for CPUs, where gloo gathers while its
    caller waits. What no block holds is gathered as ever, and one block while its backward pass begins: at the loss
    memory is scarcest.
    """
    first = learn.index(True) if True in learn else 0  # those before may have no backward pass
    units = [[cast(FSDPModule, unit) for unit in both if unit is not None] for both in blocks]
    for number, (block, *_) in enumerate(units):
        after = units[number + 1 : number + 1 + num_ahead]
        before = units[max(first, number - num_ahead) : number]
        block.set_modules_to_forward_prefetch(list(chain.from_iterable(after)))
        block.set_modules_to_backward_prefetch(list(chain.from_iterable(reversed(before))))


def before_micro_batch(root: nn.Module, *, zero: int, last: bool) -> None:
    """Set what a micro-batch's backward pass communicates: no more than its ZeRO stage must.

    ``last``: whether it is the last one of its step. Sums over ``replicate`` always wait for the last one.
    """
    if not isinstance(root, FSDPModule):
        return
    root.set_requires_gradient_sync(last or zero >= 2)
    root.set_requires_all_reduce(last)
    root.set_reshard_after_backward(last or zero == 3)
    root.set_is_last_backward(last)
