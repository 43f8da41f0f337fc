"""The optimizer over parameters: which decay, what it keeps, and its state by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from tonnage.kernels.adamw import join
from tonnage.kernels.regions import region_of
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.tiers import Group


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        "weight": nn.Parameter(torch.randn(7, 5).to(dtype)),
        "norm": nn.Parameter(torch.ones(5, dtype=dtype)),
        "frozen": nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False),
    }


def optimizer(named: dict[str, nn.Parameter], decay: float = 0.5) -> ShardedOptimizer:
    return ShardedOptimizer(named, betas=(0.9, 0.95), eps=1e-8, decay=decay)


def test_decay_spares_vectors_and_frozen_parameters() -> None:
    named = parameters(torch.float32)
    before = {name: p.detach().clone() for name, p in named.items()}
    adamw = optimizer(named)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    adamw.step(lr=0.1)
    torch.testing.assert_close(named["weight"].detach(), before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(named["norm"], before["norm"])
    assert torch.equal(named["frozen"], before["frozen"])


def test_decay_spares_what_is_named() -> None:
    named = {name: nn.Parameter(torch.ones(4, 3)) for name in ("weight", "experts_bias")}
    adamw = ShardedOptimizer(named, betas=(0.9, 0.95), eps=1e-8, decay=0.5, groups={"experts_bias": Group(0.0)})
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    adamw.step(lr=0.1)
    torch.testing.assert_close(named["weight"].detach(), torch.full((4, 3), 0.95))
    assert torch.equal(named["experts_bias"], torch.ones(4, 3))


def test_state_is_named_and_weighs_what_it_says() -> None:
    fp32, bf16, fp16 = (optimizer(parameters(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    assert set(fp32.tensors()) == {"weight.m", "weight.v", "norm.m", "norm.v"}
    assert set(bf16.tensors()) == set(fp32.tensors()) | {"weight.low", "norm.low"}
    assert fp32.state_bytes == 8 * 40
    assert bf16.state_bytes == 10 * 40
    assert set(fp16.tensors()) == set(bf16.tensors())
    assert fp16.state_bytes == 12 * 40


def test_bf16_and_fp32_parameters_share_one_master_trajectory() -> None:
    low, plain = parameters(torch.bfloat16), parameters(torch.bfloat16)
    wide = {name: nn.Parameter(p.detach().float(), p.requires_grad) for name, p in plain.items()}
    a, b = optimizer(low), optimizer(wide)
    for step in range(20):
        torch.manual_seed(step)
        for name in ("weight", "norm"):
            gradient = torch.randn(low[name].shape)
            low[name].grad, wide[name].grad = gradient.bfloat16(), gradient.bfloat16().float()
        a.step(lr=0.01, scale=0.5)
        b.step(lr=0.01, scale=0.5)
    for name in ("weight", "norm"):
        assert torch.equal(join(low[name].detach(), a.tensors()[f"{name}.low"]), wide[name].detach())


def test_clearing_gradients_frees_them_and_a_parameter_without_gradient_stays() -> None:
    named = parameters(torch.float32)
    adamw = optimizer(named)
    named["weight"].grad = torch.ones(7, 5)
    before = named["norm"].detach().clone()
    adamw.step(lr=0.1)
    adamw.gradients.clear()
    assert all(parameter.grad is None for parameter in named.values())
    assert torch.equal(named["norm"], before)
    assert adamw.num_steps == 1


def test_squared_norm_equals_torch() -> None:
    torch.manual_seed(0)
    named = parameters(torch.float32)
    adamw = optimizer(named)
    assert adamw.gradients.squared_norm().item() == 0.0
    gradients = {"weight": torch.randn(7, 5), "norm": torch.randn(5)}
    for name, gradient in gradients.items():
        named[name].grad = gradient
    want = torch.nn.utils.get_total_norm(list(gradients.values()))
    torch.testing.assert_close(adamw.gradients.squared_norm().sqrt().float(), want)


def test_state_of_a_shard_is_sharded_as_its_parameter() -> None:
    """Seven rows over four ranks, in a world that only the last joins: shapes and first row as torch counts them."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
        shape = torch.Size((7, 300))
        placements = [Replicate(), Shard(0)]
        size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        parameter = nn.Parameter(
            DTensor.from_local(torch.zeros(size), mesh, placements, run_check=False, shape=shape, stride=(300, 1))
        )
        assert offset[0] == 6
        adamw = ShardedOptimizer({"w": parameter}, betas=(0.9, 0.95), eps=1e-8, decay=0.0, moments="int8")
        for name, tensor in adamw.tensors().items():
            assert isinstance(tensor, DTensor)
            assert list(tensor.placements) == placements
            assert tensor.shape == ((7, 2) if "scale" in name else (7, 300))
            assert compute_local_shape_and_global_offset(tensor.shape, mesh, placements)[0] == tensor.to_local().shape
        (piece,) = adamw.tier.pieces(["w"])
        assert piece.trained.first == 6 * 300

        def of_columns(number: int) -> dict[str, nn.Parameter]:
            local = torch.zeros(7, number)
            return {"w": nn.Parameter(DTensor.from_local(local, mesh, [Replicate(), Shard(1)], run_check=False))}

        between = ShardedOptimizer(of_columns(512), betas=(0.9, 0.95), eps=1e-8, decay=0.0, moments="int8").tensors()
        assert between["w.m"].shape == (7, 2048)
        assert between["w.m_scale"].shape == (7, 8)
        assert region_of(between["w.m_scale"])[1] == (slice(0, 7), slice(6, 8))
        with pytest.raises(NotImplementedError, match="parts of blocks"):
            ShardedOptimizer(of_columns(75), betas=(0.9, 0.95), eps=1e-8, decay=0.0, moments="int8")
    finally:
        dist.destroy_process_group()
