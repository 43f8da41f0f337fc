"""The memory of one worker's step by category, as torch's own trackers see it on tensors without content.

Told ``CONFIG OFF KIND RANKS:ZERO:RECOMPUTE:MICRO_BATCHES:GRADIENT_TIER:ACTIVATION_TIER[:TILES] [...]`` (CONFIG is a
folder, OFF names kernels that are off, such as ``norms,sums``; ``-`` is none; KIND is
``ARRANGEMENT:ATTENTION:ADAPTER:PRECISION:TENSOR:STAGE:AHEAD``: ARRANGEMENT is ``packed`` or ``padded``; ADAPTER a rank,
and ``+`` where all is trained that may be beside an adapter, or ``e`` where the embedding has an addition; ``0`` is
none, and ``@int4`` behind it where layers are fake-quantised; TENSOR is how many compute every block together, for each
of the RANKS; STAGE is the number of one of two stages with half of the blocks each; ``-`` is all of them; AHEAD is how
many blocks are gathered while one runs; RECOMPUTE is a
kind, or a number of blocks that are recomputed whole, the first ones or, below zero, the last ones; TILES are those of
the largest weight), it prints bytes for each setting, as
JSON. The real model, loss and ``parallelize``, forward and backward; other ranks are a ``fake`` process group.
Gradients whose tier is ``disk`` vanish as they become whole, and gradients and inputs of blocks whose tier is ``host``
as they have left. For each setting: ``peak``, and with one micro-batch ``forward`` and ``backward`` (most while the
last and the first block run), ``turn`` (the same of the last that is recomputed, where others are not), ``loss`` (most
in the forward pass), ``kept`` (what the last block left for its backward pass) and ``evaluation`` (most in a forward
pass alone); with tiles, ``tile``: what is gathered of the largest.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPState
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from transformers import AutoConfig, PreTrainedConfig

from planning.fake_ranks import real_meshes
from tonnage.kernels.fake_quantized import GROUPS, Scheme
from tonnage.kernels.regions import local_part
from tonnage.kernels.switches import switch_off
from tonnage.model.adapters import EVERYTHING, AdapterSpec, Trains, Whole, prepare
from tonnage.model.anatomy import dissect
from tonnage.model.build import build_on_meta
from tonnage.model.fake_quantized import fake_quantize
from tonnage.model.fp8 import compute_in_fp8
from tonnage.model.tensor_plan import tensor_plan
from tonnage.offload.ring import Pairs, Ring
from tonnage.optim.gradients import GradientsInMemory, GradientsOnHost
from tonnage.optim.tiers import TrainedParameter
from tonnage.parallel import parallelize as order
from tonnage.parallel.block_inputs import BlockInputs
from tonnage.parallel.parallelize import Precision, Transforms, before_micro_batch, parallelize
from tonnage.parallel.stages import keep_stage
from tonnage.parallel.tensor import Ranks
from tonnage.parallel.tiled import TiledWeight
from tonnage.parallel.world import device_mesh
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel
from tonnage.training.resting import accumulate_in_fp32
from tonnage.training.tiling import tile_model

TOKENS, DOCUMENT, SUPERVISED = 2048, 128, 700
CATEGORIES = {
    "Parameter": "weights",
    "Sharded Param": "weights",
    "Unsharded Param": "gathered",
    "All Gather": "gathered",
    "Total": "total",
    "Buffer": "",
}
"""The trackers' names; all others come and go with a step."""


class OfOneMode(MemTracker):
    """Torch's before 2.13 counts what is made in another mode too: what a DTensor tries, and the host's memory.

    No version looks into an operation on a tensor of a class of its own: what torchao's emulated product in fp8 makes
    for a moment in fp32 it would not see. As torch's does with a DTensor, this one lets the class take it apart.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._mode = active_fake_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _track(self, kind: Any, made: torch.Tensor) -> None:
        if active_fake_mode() is self._mode:
            super()._track(kind, made)


class Tracker(OfOneMode, FSDPMemTracker):
    """Torch's holds a unit's last gradient while the unit is reduced; this one does not look at gradients."""

    def _fsdp_param_group_post_backward(self, module: Any, reduce: Callable[..., Any]) -> Callable[..., None]:
        def seen(*args: Any, **others: Any) -> None:
            self._fsdp_state = _FSDPState.POST_BW
            reduce(*args, **others)

        return seen


order.sums_in_place = lambda mesh: False  # type: ignore[attr-defined]  # as on a GPU (``test_tracked``)


def named(snapshot: dict[Any, dict[Any, int]]) -> dict[str, int]:
    """A tracker's snapshot in the words of plans."""
    (found,) = snapshot.values()
    bytes_of: Counter[str] = Counter()
    for key, held in found.items():
        bytes_of[CATEGORIES.get(getattr(key, "value", key), "rest")] += held
    return bytes_of


def micro_batch(arrangement: str) -> MicroBatch:
    ids, supervised = torch.zeros(1, TOKENS, dtype=torch.int64), torch.zeros(SUPERVISED, dtype=torch.int64)
    lengths = (DOCUMENT,) * (TOKENS // DOCUMENT)
    if arrangement == "padded":
        ids = ids.view(len(lengths), DOCUMENT)
    padded = arrangement == "padded"
    return MicroBatch(ids, lengths, supervised, supervised, torch.ones(SUPERVISED), is_padded=padded)


class NoTrips(Ring[Any]):
    """Nothing is copied: a tracker would count the host's memory too."""

    def copy_out(self, pairs: Pairs) -> None:
        """They have no content."""

    copy_in = copy_out


class Vanishing(BlockInputs):
    """Inputs that nobody copies."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.ring.__class__ = NoTrips


class Leaving(GradientsOnHost):
    """Gradients that nobody copies."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.ring.__class__ = NoTrips


def kind_of(recompute: str) -> tuple[Any, int | None]:
    """The kind of recompute, and of how many blocks, if not of all."""
    return ("full", int(recompute)) if recompute.lstrip("-").isdigit() else (recompute, None)


@contextmanager
def tracked(
    config: PreTrainedConfig,
    attention: str,
    trains: Trains,
    ranks: int,
    zero: int,
    recompute: Any,
    activation_tier: str,
    precision_name: str,
    tensor: int,
    stage: str,
    tiles: int,
    ahead: int,
) -> Iterator[tuple[Any, LossModel, list[TiledWeight]]]:
    """A tracker, the model of a rank that it looks at, and what of it comes in tiles."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks * tensor)
    precision = Precision.of(precision_name, ranks)
    mesh = device_mesh(torch.device("cpu"), ranks * tensor, ranks if zero == 0 else 1, tensor=tensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with unset_fake_temporarily():  # it tries norms with real numbers
            dtype = precision.storage if trains.all else precision.compute
            model = build_on_meta(config, dtype, attention_name=attention)
            prepare(model, dissect(model), trains, precision.storage)
            if trains.aware is not None:
                fake_quantize(model, dissect(model), trains.aware)
            if trains.fp8 is not None:
                compute_in_fp8(model, dissect(model), trains.fp8)
        anatomy, doors = dissect(model), None
        plan = tensor_plan(model, anatomy) if tensor > 1 else None
        if stage != "-":
            with unset_fake_temporarily():
                part = keep_stage(model, anatomy, int(stage), 2 * (config.num_hidden_layers // 2,))
            anatomy, doors = part.anatomy, part.doors
        root = LossModel(model, anatomy, doors)
        if plan is not None and plan.divides_tokens:
            root.token_ranks = Ranks.along(mesh["tensor"])
        root.give_memory_back()
        tiled: list[TiledWeight] = []
        if tiles > 1:
            with real_meshes(), unset_fake_temporarily():
                data = mesh["replicate", "shard"]
                tiled, root.tiled = tile_model(anatomy, data, tiles, precision.compute)
        with real_meshes():
            kind, number = kind_of(recompute)
            blocks = anatomy.blocks
            if number is not None and number < 0:
                blocks, number = blocks[::-1], -number
            how: dict[str, Any] = {"tensor_plan": plan, "zero": zero, "recompute": kind, "recomputed": number}
            parallelize(root, blocks, mesh, precision, Transforms(tiled=tiled, blocks_ahead=ahead, **how))
        root.to_empty(device="cpu")
        if config.tie_word_embeddings and ranks == 1:
            model.tie_weights()
        if activation_tier == "host":
            with unset_fake_temporarily():
                Vanishing(anatomy.blocks[:number], 2 * TOKENS * config.hidden_size, torch.device("cpu"))
        tracker = Tracker(root) if ranks > 1 else OfOneMode()
        if ranks == 1:
            tracker.track_external(root)
        with tracker:
            yield tracker, root, tiled
    dist.destroy_process_group()


def trains_of(adapter: str) -> Trains:
    """What is trained, as this module is told it; ``8+@int4`` is with layers that are fake-quantised, and
    ``8@fp8-emulated`` with layers in fp8."""
    adapter, _, scheme = adapter.partition("@")
    if scheme == "fp8-emulated":
        return replace(trains_of(adapter), fp8="fp8-emulated")
    if scheme:
        assert scheme in GROUPS
        return replace(trains_of(adapter), aware=Scheme(scheme, 32))
    if adapter.endswith("e"):
        return Trains(AdapterSpec(int(adapter[:-1]), 2.0, targets=("all-linear", "embed_in")))
    rank, plus, _ = adapter.partition("+")
    also: tuple[Whole, ...] = ("embeddings", "head", "norms") if plus else ()
    return Trains(AdapterSpec(int(rank), 2.0, also=also)) if int(rank) else EVERYTHING


def let_hooks_be_on_frozen_ones() -> None:
    """Trackers put hooks on all parameters; on one that is frozen a hook is never called."""
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        register = getattr(torch.Tensor, name)
        nothing: Any = contextlib.nullcontext()
        nothing.remove = lambda: None

        def hook(tensor: Any, called: Any, register: Any = register, nothing: Any = nothing) -> Any:
            return register(tensor, called) if tensor.requires_grad else nothing

        setattr(torch.Tensor, name, hook)


def run(root: LossModel, batch: MicroBatch, hidden_size: int) -> None:
    """Both passes, or the forward pass alone; a stage is given what others would send."""
    received = None
    if not root.doors.first:
        wanted = torch.is_grad_enabled()
        received = torch.zeros(*batch.input_ids.shape, hidden_size, dtype=torch.bfloat16, requires_grad=wanted)
    output = root(batch, 1.0, received)
    if torch.is_grad_enabled():
        output.backward(None if root.doors.last else torch.zeros_like(output))


def watch_tiles(tracker: Any) -> list[int]:
    """Bytes by which all that there is grows with each tile, as the tracker sees it."""
    sizes, gathered = list[int](), TiledWeight._gathered

    def seen(weight: TiledWeight, number: int) -> torch.Tensor:
        local_part(weight.parameter) + 0  # which the tracker may not have seen before
        before = named(tracker.get_tracker_snapshot("current"))["total"]
        tile = gathered(weight, number)
        sizes.append(named(tracker.get_tracker_snapshot("current"))["total"] - before)
        return tile

    TiledWeight._gathered = seen  # type: ignore[assignment, method-assign]
    return sizes


def vanish(parameter: torch.Tensor) -> None:
    parameter.grad = None


def traced(
    config: PreTrainedConfig,
    arrangement: str,
    attention: str,
    trains: Trains,
    ranks: int,
    zero: int,
    recompute: Any,
    micro_batches: int,
    gradient_tier: str,
    activation_tier: str,
    precision: str,
    tensor: int,
    stage: str,
    tiles: int,
    ahead: int,
) -> dict[str, Any]:
    how = (config, attention, trains, ranks, zero, recompute, activation_tier, precision, tensor, stage, tiles, ahead)
    with tracked(*how) as (tracker, root, tiled):
        if gradient_tier == "disk":
            for parameter in (one for one in root.parameters() if one.requires_grad):
                parameter.register_post_accumulate_grad_hook(vanish)
        if gradient_tier == "host":
            with unset_fake_temporarily():
                named_ones = [(name, one) for name, one in root.named_parameters() if one.requires_grad]
                trained = [TrainedParameter(name, one, decay=0.0, first=0) for name, one in named_ones]
                leaving = Leaving(trained, device=torch.device("cpu"))
        if tiled:
            kept = GradientsInMemory(
                [TrainedParameter(name, one, decay=0.0, first=0) for name, one in root.named_parameters()]
            )
            for one in tiled:
                one.begin(kept.add_part if gradient_tier == "device" else lambda *_: None)
            sizes = watch_tiles(tracker)
        if ranks == 1 and micro_batches > 1:
            accumulate_in_fp32(root.parameters())
        for number in range(micro_batches):
            before_micro_batch(root, zero=zero, last=number == micro_batches - 1)
            run(root, micro_batch(arrangement), config.hidden_size)
            if number < micro_batches - 1:
                tracker.reset_mod_stats()
        if gradient_tier == "host":
            leaving.clear()
    found: dict[str, Any] = {"peak": named(tracker.get_tracker_snapshot("peak"))}
    if tiles > 1:
        found["tile"] = max(sizes)
    if micro_batches == 1:
        seen = {
            (stats.mod_fqn, state.value.replace("-", " ")): named(snapshots[0])
            for stats in tracker.memory_tracking.values()
            for state, snapshots in stats.snapshots.items()
        }
        whole_model, blocks = stage == "-", config.num_hidden_layers
        begins, ends = (
            (0, blocks - 1) if whole_model else (int(stage) * blocks // 2, (int(stage) + 1) * blocks // 2 - 1)
        )
        (last,) = {name for name, _ in seen if name.endswith(f".{ends}")}
        first = last.rpartition(".")[0] + f".{begins}"
        found |= {"forward": seen[last, "Peak Forward"], "backward": seen[first, "Peak Backward"]}
        recomputed = kind_of(recompute)[1]
        if recomputed is not None and 0 < recomputed < config.num_hidden_layers:
            found |= {"turn": seen[f"{last.rpartition('.')[0]}.{recomputed - 1}", "Peak Backward"]}
        if (whole := (type(root).__name__, "Peak Forward")) in seen:  # a root that shards nothing is not looked at
            found |= {"loss": seen[whole]}
        found |= {"kept": seen[last, "After Post Forward" if ranks > 1 else "Post Forward"]}
        with (
            tracked(*how) as (tracker, alone, _),
            torch.no_grad(),
        ):
            run(alone, micro_batch(arrangement), config.hidden_size)
        found |= {"evaluation": named(tracker.get_tracker_snapshot("peak"))}
    return found


def main(told: list[str]) -> None:
    config = AutoConfig.from_pretrained(told[0])
    let_hooks_be_on_frozen_ones()
    arrangement, attention, adapter, precision, tensor, stage, ahead = told[2].split(":")
    trains = trains_of(adapter)
    switch_off(told[1].split(",") if told[1] != "-" else ())
    settings = [setting.split(":") for setting in told[3:]]
    print(
        json.dumps(
            [
                traced(
                    config,
                    arrangement,
                    attention,
                    trains,
                    int(ranks),
                    int(zero),
                    kind,
                    int(times),
                    grads,
                    inputs,
                    precision,
                    int(tensor),
                    stage,
                    int(tiles[0]) if tiles else 1,
                    int(ahead),
                )
                for ranks, zero, kind, times, grads, inputs, *tiles in settings
            ],
        )
    )
