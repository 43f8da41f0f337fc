"""Parameters over the memory of files: the same shards, which stay in the host's memory whatever gathers them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from tonnage.offload.pages import Pages
from tonnage.parallel.streaming import over_pages


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_shards_in_files_stay_in_files(kind: str, tmp_path: Path) -> None:
    """A mesh of GPUs has shards whose bytes rest on the host: a copy of them for a checkpoint must not be on the GPUs,
    which have no room for it. Devices of the kind ``meta`` stand for these: what is copied there is without content."""
    mesh = DeviceMesh(kind, torch.arange(2), _init_backend=False, _rank=1)
    meta = TensorMeta(torch.Size((8, 3)), (3, 1), torch.float32)
    shard = nn.Parameter(DTensor(torch.zeros(4, 3), DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False))
    pages = Pages({"a": 48, "b": 12}, [tmp_path], "numbers")
    made = over_pages({"a": shard, "b": nn.Parameter(torch.zeros(3), requires_grad=False)}, pages)
    sharded = made["a"]
    assert isinstance(sharded, DTensor)
    assert (sharded.shape, sharded.placements, sharded.device_mesh) == (shard.shape, (Shard(0),), mesh)
    assert sharded.requires_grad
    assert not made["b"].requires_grad
    for name, local in (("a", sharded.to_local().detach()), ("b", made["b"])):
        assert local.device.type == "cpu"
        local.fill_(1.5)
        assert torch.frombuffer(pages.memory(name), dtype=torch.float32).eq(1.5).all()
