"""A worker that runs steps under every ZeRO stage and prints what was communicated; it is told MODEL.

Counted are the collectives that reach the back end, by the bytes of what is gathered or reduced, whole.
"""

import json
from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tiny import load
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta
from tonnage.model.files import find_model, read_model_config
from tonnage.parallel import cpu_collectives
from tonnage.parallel import parallelize as order
from tonnage.parallel.parallelize import Precision, Transforms, before_micro_batch, parallelize
from tonnage.parallel.world import World, device_mesh, join_world
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel

KINDS = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "reduce"}


class Counting(TorchDispatchMode):
    """Adds up the bytes of every collective: of the whole tensor, before it is scattered or after it is gathered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            if name in KINDS:
                flat = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
                self.bytes[KINDS[name]] += max(t.numel() * t.element_size() for t in flat)
            else:
                self.unknown.add(name)
        return func(*args, **(kwargs or {}))


def count(model_path: str, world: World, zero: int, num_micro_batches: int, precision: Precision) -> dict[str, Any]:
    files = find_model(model_path)
    model = build_on_meta(read_model_config(files), precision.storage)
    anatomy = dissect(model)
    root = LossModel(model, anatomy)
    parallelize(root, anatomy.blocks, world.mesh, precision, Transforms(zero=zero))
    allocate(model, world.device)
    load(model, files.directory)
    ids = torch.arange(20).unsqueeze(0)
    batch = MicroBatch(ids, (20,), torch.arange(19), ids[0, 1:], torch.ones(19))
    for _ in range(2):  # the first step gathers what later ones find gathered: the second one counts
        with Counting() as counting:
            for number in range(num_micro_batches):
                before_micro_batch(root, zero=zero, last=number == num_micro_batches - 1)
                root(batch, 19.0).backward()
        for parameter in model.parameters():
            parameter.grad = None
    blocks = sum(p.numel() for block in anatomy.blocks for p in block.parameters())
    return {
        "zero": zero,
        "micro_batches": num_micro_batches,
        "compute_bytes": precision.compute.itemsize,
        "parameters": sum(p.numel() for p in model.parameters()),
        "block_parameters": blocks,
        "bytes": dict(counting.bytes),
        "unknown": sorted(counting.unknown),
    }


def answer(in_place: bool, mesh: DeviceMesh) -> bool:
    return in_place


def main(told: list[str]) -> None:
    (model_path,) = told
    cpu_collectives.share_memory = lambda group: None  # type: ignore[attr-defined]  # as between machines, whose messages are counted
    with join_world() as world:
        found = []
        for zero in (0, 1, 2, 3):
            mesh = device_mesh(world.device, world.size, world.size if zero == 0 else 1)
            here = World(world.rank, world.size, world.device, world.backend, mesh)
            for micro_batches in (1, 3):
                for name, in_place in product(("fp32", "bf16"), (True, False)):  # or as on GPUs
                    order.sums_in_place = partial(answer, in_place)  # type: ignore[attr-defined]
                    case = count(model_path, here, zero, micro_batches, Precision.of(name, world.size))
                    found.append(case | {"in_place": in_place})
        if world.rank == 0:
            print(json.dumps(found))
