"""The axes of the search: what may be chosen for each where the config leaves it open, and what goes together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product, starmap
from typing import Any, NamedTuple

from tonnage.config import Config
from tonnage.config.check import divides_rows
from tonnage.config.rules import OF_AXES, Setting
from tonnage.planning.context import divides
from tonnage.planning.layout import PACKED, Layout
from tonnage.planning.machine import Machine
from tonnage.planning.plan import Rows, RowSizes, Steps
from tonnage.planning.profile import ModelProfile
from tonnage.planning.rules import SEARCHED, setting_of, update_tier

MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens of a forward with which a machine's matrix units are busy, and on a GPU whoever launches its kernels is ahead
of it; ``micro_batch: auto`` goes no further."""


def searched(config: Config, machine: Machine, before: Layout | None) -> dict[str, Sequence[Any]]:
    """What may be chosen for each key of ``memory``: what the config says, what it was before, or all that can be. They
    are fields of ``Setting`` and of ``Layout``."""
    memory, on_cpu = config.memory, machine.kind == "cpu"
    trains_all = setting_of(config, machine).trains_all
    on_host = memory.parameter_tier == "host" and trains_all  # where they are updated, on any machine
    states = ("device", "disk") if on_cpu and not on_host else ("device", "host", "disk")
    otherwise: dict[str, Sequence[Any]] = {
        "zero": (3,) if config.data_workers == 1 else (0, 1, 2, 3),
        "recompute": ("none", "selective", "full"),
        "activation_tier": ("device",) if on_cpu else ("device", "host"),  # that is where they are on a CPU
        "moments": ("fp32", "int8") if config.parallel.tensor == 1 else ("fp32", "bf16"),
        "optimizer_tier": states,
        "gradient_tier": states,
        "parameter_tier": states,
        "tiles": (1,),
        "sequence_tiles": (1,),
    }
    values = {key: _values(key, getattr(memory, key), before, every) for key, every in otherwise.items()}
    return values | ({} if memory.recompute_blocks == "auto" else {"recompute": ("full",)})


def settings(config: Config, machine: Machine, before: Layout | None) -> Iterator[Setting]:
    """Everything that memory may hold, and how, as far as it goes together."""
    values, open_setting = searched(config, machine, before), setting_of(config, machine)
    for chosen in product(*values.values()):
        at = open_setting._replace(**dict(zip(values, chosen, strict=True)))
        if not any(rule.is_broken(at) for rule in SEARCHED):
            yield at


def _values(key: str, said: Any, before: Layout | None, otherwise: Iterable[Any]) -> Sequence[Any]:
    if said != "auto":
        return (said,)
    return (getattr(before, key),) if before is not None else tuple(otherwise)


def layouts(
    config: Config,
    steps: Steps,
    rows: Rows,
    machine: Machine,
    before: Layout | None = None,
    attention: str = PACKED,
    blocks: int = 0,
) -> Iterator[Layout]:
    """Every way to cut up the steps of a model of so many ``blocks`` that the config allows, computed with an
    ``attention``. The sizes of the axes are said."""
    memory, parallel, workers = config.memory, config.parallel, config.pack_groups
    packs_per_worker, on_cpu = math.ceil(steps.packs / workers), machine.kind == "cpu"
    context = int(parallel.context)
    if context > 1:  # whose slices of a row would have parts that others go on from
        steps = replace(steps, share_prefixes=False)
    apart = parallel.schedule == "zero_bubble" and parallel.pipeline != 1
    compiles = not on_cpu and config.compile != "off" and not apart and config.quantize_aware.scheme == "none"
    of_all: dict[str, Any] = {
        "workers": config.launch.num_workers,
        "tensor": parallel.tensor,
        "context": context,
        "pipeline": parallel.pipeline,
        "schedule": parallel.schedule,
        "precision": config.dtype,
        "optimizer": config.optimizer.kind,
        "share_prefixes": steps.share_prefixes,
        "arrangement": "padded" if steps.padded else "packed",
        "attention": attention,
        "device": machine.kind,
        "kernels_off": config.kernels_off,
    }
    most_tokens = int(parallel.tensor) * context * MICRO_BATCH_TOKENS[machine.kind]
    worth_trying = _micro_batches(packs_per_worker, partial(rows, steps, workers), most_tokens)
    micro_batches = _values("micro_batch", memory.micro_batch, before, worth_trying)
    of_rows = [_of_rows(min(number, packs_per_worker), steps, rows, workers, context) for number in micro_batches]
    uncompiled = {"selective", "full"} if config.precision.startswith("fp8") else {"selective"}
    chosen = searched(config, machine, before)
    for at in settings(config, machine, before):
        update = update_tier(at)
        stays = memory.optimizer_resident if at.optimizer_tier != "device" else 0
        of_memory: dict[str, Any] = {key: getattr(at, key) for key in chosen}
        of_memory |= {
            "replicate": config.data_workers if at.zero == 0 else parallel.replicate,
            "recomputed": recomputed_blocks(config, before, blocks) if at.recompute == "full" else None,
            "optimizer_resident": 0 if stays == "auto" or (update == "host" and at.optimizer_tier == "host") else stays,
            "update_tier": update,
            # Blocks whose parameters come and go are not, nor those whose operations are kept or computed again.
            "compiled": compiles and at.parameter_tier == "device" and at.tiles == 1 and at.recompute not in uncompiled,
        }
        for sizes, returns in product(of_rows, (False, True) if on_cpu else (False,)):
            yield Layout(**of_all, **of_memory, **sizes, returns_memory=returns)


def recomputed_blocks(config: Config, before: Layout | None, blocks: int) -> tuple[int, int] | None:
    """How many of so many blocks are recomputed, if the config says it or it was chosen before; None is all of them."""
    number = config.memory.recompute_blocks
    if number != "auto":
        return (number, blocks) if number < blocks else None
    return before.recomputed if before is not None and config.memory.recompute == "auto" else None


def _of_rows(micro_batch: int, steps: Steps, rows: Rows, workers: int, context: int) -> dict[str, Any]:
    """What a layout says of rows of so many packs, or of a worker's part of them."""
    sizes = rows(steps, workers, micro_batch)
    return {
        "micro_batch": micro_batch,
        "micro_batches": math.ceil(sizes.forwards or math.ceil(steps.packs / workers) / micro_batch),
        "row_tokens": math.ceil(sizes.most_tokens / context),
        "row_supervised": math.ceil(sizes.most_supervised / context),
        "row_image_tokens": sizes.most_image_tokens,
        "mean_image_tokens": sizes.mean_image_tokens,
        "mean_row_tokens": sizes.mean_tokens / context,
        "spared_tokens": max(0.0, 1 - sizes.mean_tokens / sizes.mean_document_tokens),
        "padding": max(0.0, 1 - sizes.mean_document_tokens / sizes.mean_tokens),
    }


def _micro_batches(packs_per_worker: int, rows: Callable[[int], RowSizes], most_tokens: int) -> list[int]:
    """Sizes worth trying: powers of two, up to the tokens that keep the machine busy.

    ``rows`` tells the sizes of rows of so many packs.
    """
    sizes = [1]
    while sizes[-1] < packs_per_worker:
        larger = min(2 * sizes[-1], packs_per_worker)
        tokens = rows(larger).mean_tokens
        if tokens > most_tokens:
            fits = int(larger * most_tokens / tokens)
            return [*sizes, fits] if fits > sizes[-1] else sizes
        sizes.append(larger)
    return sizes


class Axes(NamedTuple):
    """Workers that compute the same packs."""

    tensor: int
    pipeline: int
    context: int

    @property
    def together(self) -> int:
        return self.tensor * self.pipeline * self.context


def divisions(
    config: Config, packs_per_step: int, models: Mapping[int, ModelProfile], machine: Machine, before: Layout | None
) -> list[Axes]:
    """Sizes of the tensor and the pipeline axis, and numbers of workers that divide rows, that the config allows.

    Where it leaves them open: a tensor axis stays inside a node, for its ranks talk all the time, and so do those that
    divide rows; a pipeline has two to the power of something workers, each with a block at least; every group of
    workers has a pack.
    """
    workers, parallel = config.launch.num_workers, config.parallel
    per_node = machine.workers_on_node(workers)
    most = models[1].num_blocks // config.stages_per_worker
    open_setting = setting_of(config, machine)

    def goes(axes: Axes) -> bool:
        groups = max(1, workers // (axes.tensor * axes.pipeline))
        at = open_setting._replace(**axes._asdict(), groups=groups)
        return divides(models[axes.tensor], axes.context) and not any(rule.is_broken(at) for rule in OF_AXES)

    tensors = _values("tensor", parallel.tensor, before, (degree for degree in models if per_node % degree == 0))
    powers = (2**power for power in range(most.bit_length()) if 2**power <= most)
    pipelines = _values("pipeline", parallel.pipeline, before, powers)
    near = (size for size in range(1, per_node + 1) if per_node % size == 0) if divides_rows(config) else (1,)
    contexts = _values("context", parallel.context, before, near)
    fitting = [axes for axes in starmap(Axes, product(tensors, pipelines, contexts)) if goes(axes)]
    enough = [axes for axes in fitting if workers // axes.together <= packs_per_step]
    return enough or fitting[-1:]
