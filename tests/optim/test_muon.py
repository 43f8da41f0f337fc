"""Muon's state in every tier: the same bits as in memory, in every form; and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tonnage.kernels import widening
from tonnage.kernels.moments import Codec
from tonnage.kernels.muon import Muon, iteration_dtype, orthogonal_flops, orthogonalised
from tonnage.offload.residency import OPTIMIZER, Residency
from tonnage.optim.on_disk import StateOnDisk
from tonnage.optim.on_host import StateOnHost
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.tiers import Group, StateInMemory, StateTier, TrainedParameter

TILE_BYTES = 8192
SHAPES = {"embed": (37, 64), "a": (96, 64), "norm": (64,), "b": (64, 96), "c": (7, 300), "d": (96, 96)}
TURNS = {"embed": 0, "a": 1, "norm": 1, "b": 1, "c": 2, "d": 2}


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}


def make(
    named: dict[str, nn.Parameter],
    codec: Codec,
    tier: Callable[[Sequence[TrainedParameter], Codec], StateTier] = StateInMemory,
    turns: dict[str, int] | None = None,
) -> ShardedOptimizer:
    groups = {name: Group(0.1, muon=Muon()) for name in "abcd"}
    options: dict[str, Any] = {"moments": codec, "tier": tier, "turns": turns, "groups": groups, "seed": 5}
    return ShardedOptimizer(named, betas=(0.9, 0.95), eps=1e-8, decay=0.1, **options)


def small(tier: Any, where: str, trained: Sequence[TrainedParameter], codec: Codec, **options: Any) -> StateTier:
    """A tier whose tiles hold a part of a matrix."""
    with patch.dict(OPTIMIZER, {where: Residency(4, TILE_BYTES)}):
        made: StateTier = tier(trained, codec, **options)
        return made


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    for name, parameter in named.items():
        gradient = torch.randn(parameter.shape).to(parameter.dtype)
        parameter.grad = None if name == "b" and step == 2 else gradient


@pytest.mark.parametrize("turns", [None, TURNS])
@pytest.mark.parametrize("codec", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_elsewhere_equals_state_in_memory_bit_for_bit(
    dtype: torch.dtype, codec: Codec, turns: dict[str, int] | None, tmp_path: Path
) -> None:
    here, on_disk, on_host = (parameters(dtype) for _ in range(3))
    memory = make(here, codec)
    disk = make(on_disk, codec, partial(small, StateOnDisk, "disk", directories=[tmp_path / "a"]), turns)
    host = make(on_host, codec, partial(small, StateOnHost, "host", device=torch.device("cpu")), turns)
    for step in range(6):
        for named, optimizer in ((here, memory), (on_disk, disk), (on_host, host)):
            set_gradients(named, step)
            optimizer.prefetch()
            optimizer.step(1e-2, 1.0 / (1 + step))
            optimizer.finish()
        for name, value in here.items():
            assert torch.equal(value, on_disk[name]), (step, name)
            assert torch.equal(value, on_host[name]), (step, name)
    want = memory.tensors()
    for other in (disk, host):
        got = other.tensors()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        assert other.state_bytes == memory.state_bytes


def test_matrices_have_one_moment() -> None:
    adamw = ShardedOptimizer(parameters(torch.bfloat16), betas=(0.9, 0.95), eps=1e-8, decay=0.1)
    muon = make(parameters(torch.bfloat16), "fp32")
    numbers = sum(parameter.numel() for name, parameter in parameters(torch.float32).items() if name in "abcd")
    assert adamw.state_bytes - muon.state_bytes == 4 * numbers
    assert "a.v" not in muon.tensors()
    assert "embed.v" in muon.tensors()


@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
def test_singular_values_of_an_update_are_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape).bfloat16()).float())
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_where_products_of_bf16_are_slow_it_is_computed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same but for the rounding of bf16, and without its products; an update on a GPU stays in bf16."""
    torch.manual_seed(0)
    matrix, updates = torch.randn(64, 96).bfloat16(), []
    for slow, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        monkeypatch.setitem(widening._slow, torch.bfloat16, slow)
        assert iteration_dtype("cpu") == dtype
        with FlopCounterMode(display=False) as counted, Products() as products:
            updates.append(orthogonalised(matrix))
        assert counted.get_total_flops() == orthogonal_flops((64, 96))
        assert products.dtypes == {dtype}
    rounded, exact = updates
    assert exact.dtype == rounded.dtype == torch.bfloat16
    assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.03
    assert iteration_dtype("cuda") == torch.bfloat16


class Products(TorchDispatchMode):
    """The types of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_of_16_and_8_bits_stay_near_those_of_32(dtype: torch.dtype) -> None:
    weights = {}
    codecs: tuple[Codec, ...] = ("fp32", "bf16", "int8")
    for codec in codecs:
        named = parameters(dtype)
        optimizer = make(named, codec)
        for step in range(10):
            set_gradients(named, step)
            optimizer.step(1e-2)
        weights[codec] = named["d"].detach().float()
    moved = (weights["fp32"] - parameters(dtype)["d"].detach().float()).norm()
    for codec, most in (("bf16", 0.05), ("int8", 0.2)):
        assert float((weights[codec] - weights["fp32"]).norm() / moved) < most, codec
