"""One rank of many that are not there: the real ``parallelize`` on tensors without content, under torch's own tracker.

Told ``CONFIG SIZE:ZERO:TENSOR [...]``, it prints bytes by category for each, as JSON.

The process group is torch's ``fake`` one, so the rank believes in all the others; the model of ``CONFIG`` (a folder
with ``config.json``) is built on the meta device, sharded as in a run and taken through one forward and backward
pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, PreTrainedConfig

from tonnage.model.anatomy import dissect
from tonnage.model.attention import PackedRow
from tonnage.model.build import build_on_meta
from tonnage.model.tensor_plan import tensor_plan
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.parallel.parallelize import Precision, Transforms, before_micro_batch, parallelize
from tonnage.parallel.world import device_mesh

TOKENS = 256


@contextmanager
def real_meshes() -> Iterator[None]:
    """Sharding puts meshes together, and looks into tensors for where this rank is in them."""
    concatenate = DeviceMesh._concatenate

    def really(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return concatenate(meshes)

    with mock.patch.object(DeviceMesh, "_concatenate", really):
        yield


def measured(config: PreTrainedConfig, size: int, zero: int, tensor: int) -> dict[str, int]:
    """Bytes after the backward pass, by torch's categories, and of the optimizer's moments."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    precision = Precision.of("bf16", size // tensor)
    mesh = device_mesh(torch.device("cpu"), size, size // tensor if zero == 0 else 1, tensor=tensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with unset_fake_temporarily():  # it tries norms with real numbers
            model = build_on_meta(config, precision.storage)
        anatomy = dissect(model)
        plan = tensor_plan(model, anatomy) if tensor > 1 else None
        with real_meshes():
            transforms = Transforms(tensor_plan=plan, zero=zero, recompute="full")
            parallelize(model, anatomy.blocks, mesh, precision, transforms)
        model.to_empty(device="cpu")
        tracker = FSDPMemTracker(model)
        before_micro_batch(model, zero=zero, last=True)
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        with tracker:
            model(ids, use_cache=False, position_ids=ids, row=PackedRow((TOKENS,), None)).logits.sum().backward()
        (found,) = tracker.get_tracker_snapshot("current").values()
        adamw = ShardedOptimizer(dict(model.named_parameters()), betas=(0.9, 0.95), eps=1e-8, decay=0.0, moments="fp32")
    dist.destroy_process_group()
    return {str(getattr(key, "value", key)): held for key, held in found.items()} | {"OptState": adamw.state_bytes}


def main(told: list[str]) -> None:
    config = AutoConfig.from_pretrained(told[0])
    settings = [[int(part) for part in setting.split(":")] for setting in told[1:]]
    print(json.dumps([measured(config, *setting) for setting in settings]))
