"""State in host memory: the bits of state beside the parameters, whatever the tiles and whenever copies are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tape import Tape, put_on_tapes
from tonnage.errors import UserError
from tonnage.kernels import adamw as kernels
from tonnage.kernels.adamw import update
from tonnage.kernels.moments import Codec
from tonnage.offload.residency import OPTIMIZER, Residency
from tonnage.optim import on_host
from tonnage.optim.on_host import StateOnHost
from tonnage.optim.optimizer import ShardedOptimizer, _like
from tonnage.optim.tiers import StateInMemory, StateTier, TrainedParameter
from tonnage.optim.tiles import locked_tensors

SHAPES = {"embed": (40, 300), "norm": (300,), "long": (2, 5000), "none": (0, 300), "experts": (3, 8, 100), "last": (7,)}
TURNS = {"embed": 0, "norm": 1, "long": 2, "experts": 2, "last": 3}
TILE_BYTES = 8192
CPU = torch.device("cpu")


def small(trained: Sequence[TrainedParameter], codec: Codec, resident_bytes: int = 0) -> StateOnHost:
    """With tiles of ``TILE_BYTES``."""
    with patch.dict(OPTIMIZER, host=Residency(4, TILE_BYTES)):
        return StateOnHost(trained, codec, device=CPU, resident_bytes=resident_bytes)


class Taped(StateOnHost):
    """Its copies, and the updates of its pieces, are on tapes; ``prompt`` says which tapes: in, update, out."""

    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        codec: Codec,
        *,
        prompt: Sequence[bool],
        num_buffers: int = 4,
        **options: Any,
    ) -> None:
        tiles = patch.dict(OPTIMIZER, host=Residency(num_buffers, TILE_BYTES))
        with tiles, patch.object(on_host, "Stream", Tape):
            super().__init__(trained, codec, device=CPU, **options)
        work: Any = self._work
        inward, work.prompt, outward = prompt
        self.work = work
        put_on_tapes(self._ring, (outward, inward))


PROMPT = list(product([False, True], [False, True], [False, True]))


def taped(
    named: dict[str, nn.Parameter],
    prompt: Sequence[bool],
    monkeypatch: pytest.MonkeyPatch,
    turns: dict[str, int] | None = None,
    **options: Any,
) -> ShardedOptimizer:
    adamw = make(named, "fp32", partial(Taped, prompt=prompt, **options), turns)
    assert isinstance(adamw.tier, Taped)
    work = adamw.tier.work
    of_this = {parameter.untyped_storage().data_ptr() for parameter in named.values()}

    def later(weight: torch.Tensor, *others: Any) -> None:
        if weight.untyped_storage().data_ptr() in of_this:
            work.put(partial(update, weight, *others))
        else:
            update(weight, *others)

    monkeypatch.setattr(kernels, "update", later)
    return adamw


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    named = {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}
    return named | {"frozen": nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)}


def make(
    named: dict[str, nn.Parameter],
    codec: Codec,
    tier: Callable[[Sequence[TrainedParameter], Codec], StateTier] = StateInMemory,
    turns: dict[str, int] | None = None,
) -> ShardedOptimizer:
    return ShardedOptimizer(
        named, betas=(0.9, 0.95), eps=1e-8, decay=0.1, moments=codec, tier=tier, turns=turns, seed=5
    )


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    for name, parameter in named.items():
        gradient = torch.randn(parameter.shape).to(parameter.dtype)
        missing = parameter.requires_grad is False or (name == "norm" and step % 2) or (name == "long" and step == 4)
        parameter.grad = None if missing else gradient


def assert_same_states(got: ShardedOptimizer, want: ShardedOptimizer) -> None:
    ours, theirs = got.tensors(), want.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("turns", [None, TURNS])
def test_twenty_steps_equal_state_beside_the_parameters_bit_for_bit(
    dtype: torch.dtype, codec: Codec, turns: dict[str, int] | None
) -> None:
    here, there = parameters(dtype), parameters(dtype)
    memory, host = make(here, codec), make(there, codec, small, turns)
    assert isinstance(host.tier, StateOnHost)
    assert host.state_bytes == memory.state_bytes
    assert not host.tensors_are_copies
    for step in range(20):
        set_gradients(here, step)
        set_gradients(there, step)
        if step % 3:
            host.prefetch()
        scale = 1.0 / (1 + step % 4)
        memory.step(1e-2, scale)
        host.step(1e-2, scale)
        host.finish()
        for name in here:
            assert torch.equal(here[name], there[name]), (step, name)
    assert_same_states(host, memory)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_the_rule_of_other_devices_gives_the_same_bits_tile_by_tile(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "update", kernels.update_torch)
    here, there = parameters(torch.bfloat16), parameters(torch.bfloat16)
    memory, host = make(here, codec), make(there, codec, small, TURNS)
    for step in range(5):
        for adamw, named in ((memory, here), (host, there)):
            set_gradients(named, step)
            adamw.step(1e-2)
    assert_same_states(host, memory)
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPT)
@pytest.mark.parametrize("tiles", [0, 3])
@pytest.mark.parametrize("num_buffers", [1, 2, 4])
def test_copies_are_waited_for_whenever_they_are_made(
    prompt: Sequence[bool], tiles: int, num_buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and updates come as late, or as early, as what is waited for allows: a mark too few changes bits."""
    here, there = parameters(torch.bfloat16), parameters(torch.bfloat16)
    memory = make(here, "fp32")
    host = taped(there, prompt, monkeypatch, TURNS, num_buffers=num_buffers, resident_bytes=tiles * TILE_BYTES)
    for step in range(9):
        set_gradients(here, step)
        set_gradients(there, step)
        if step % 3:
            host.prefetch()
        memory.step(1e-2)
        host.step(1e-2)
        host.finish()
        for name in here:
            assert torch.equal(here[name], there[name]), (step, name)
        if step == 5:
            host.prefetch()
            changed = {name: tensor.clone() + 1 for name, tensor in memory.tensors().items()}
            memory.adopt(changed)
            host.adopt(changed)
        if step in (2, 5, 6):
            assert_same_states(host, memory)
    assert_same_states(host, memory)


@pytest.mark.parametrize("missing", ["_inward", "_outward", "_work"])
def test_a_lane_that_waits_for_nothing_would_be_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test above: where one stream does not wait, some schedule gives other bits."""

    def same(prompt: Sequence[bool]) -> bool:
        here, there = parameters(torch.bfloat16), parameters(torch.bfloat16)
        memory, host = make(here, "fp32"), taped(there, prompt, monkeypatch, num_buffers=2)
        monkeypatch.setattr(getattr(host.tier, missing), "wait", lambda mark: None)
        for step in range(2):
            set_gradients(here, step)
            set_gradients(there, step)
            memory.step(1e-2)
            host.step(1e-2)
        ours = host.tensors()
        return all(torch.equal(ours[name], tensor) for name, tensor in memory.tensors().items())

    assert not all(map(same, PROMPT))


def test_a_turn_is_whole_when_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = parameters(torch.bfloat16), parameters(torch.bfloat16)
    memory, host = make(here, "fp32"), taped(there, (False, False, False), monkeypatch, TURNS)
    for step in range(3):
        set_gradients(here, step)
        set_gradients(there, step)
        memory.step(1e-2)
        host.step(1e-2)
        host.gradients.clear()
        for turn in range(4):
            host.wait_for(turn)
            for name in [name for name, its in TURNS.items() if its <= turn]:
                assert torch.equal(here[name], there[name]), (step, turn, name)


def test_state_goes_out_and_comes_back_through_other_tiers() -> None:
    first_named, second_named = parameters(torch.bfloat16), parameters(torch.bfloat16)
    first = make(first_named, "int8")
    for step in range(3):
        set_gradients(first_named, step)
        first.step(1e-2)
    second = make(second_named, "int8", partial(small, resident_bytes=20_000))
    filled = second.tensors()
    for name, tensor in first.tensors().items():
        filled[name].copy_(tensor)
    second.adopt(filled)
    second.num_steps = first.num_steps
    for name, parameter in second_named.items():
        parameter.data.copy_(first_named[name])
    for step in range(3, 6):
        for adamw, named in ((first, first_named), (second, second_named)):
            set_gradients(named, step)
            adamw.step(1e-2)
    assert_same_states(second, first)


def test_memory_is_of_the_size_of_the_state() -> None:
    named = {"w": nn.Parameter(torch.zeros(10, 300)), "b": nn.Parameter(torch.zeros(3))}
    tier = make(named, "fp32", partial(StateOnHost, device=CPU)).tier
    assert isinstance(tier, StateOnHost)
    assert tier.state_bytes == 8 * 3003
    whole = tier.tensors()["w.m"].untyped_storage()
    assert len(whole) == 2 * (12032 + 64)
    nothing = make({"f": nn.Parameter(torch.zeros(3), requires_grad=False)}, "fp32", partial(StateOnHost, device=CPU))
    nothing.step(1e-2)
    assert nothing.tensors() == {}


class Cudart:
    """Of CUDA's library, what locks memory; it allows so many bytes."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if num_bytes > self.allowed:
            return 2
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.locked[address]


def test_memory_is_locked_to_the_byte_for_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(2 * 12032 + 64)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    forms = {"w.m": (torch.float32, (10, 300)), "w.v": (torch.float32, (10, 300)), "b.m": (torch.float32, (3,))}
    named = locked_tensors("memory.optimizer_tier", forms, torch.device("cuda"), "")
    assert list(cudart.locked.values()) == [2 * 12032 + 64]
    kept = named["b.m"]
    del named
    assert cudart.locked
    del kept
    assert not cudart.locked


def test_memory_that_cannot_be_locked_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(0))
    with pytest.raises(UserError, match=r"CUDA error 2 when 0\.02 GB"):
        locked_tensors("memory.optimizer_tier", {"w.m": (torch.float32, (5_000_000,))}, torch.device("cuda"), "")


def test_state_of_a_device_stays_on_the_host() -> None:
    """Named as a tensor that is distributed over GPUs, for checkpoints, and not copied there."""
    fake_gpu_mesh = DeviceMesh("cuda", list(range(4)), _init_backend=False, _rank=1)
    parameter = DTensor.from_local(torch.empty(2, 6, device="meta"), fake_gpu_mesh, [Shard(0)], run_check=False)
    assert parameter.shape == (8, 6)
    moment, scale = torch.ones(2, 6), torch.ones(2, 1)
    for tensor, shape in ((moment, (8, 6)), (scale, (8, 1))):
        named = _like(parameter, tensor)
        assert isinstance(named, DTensor)
        assert named.shape == shape
        assert named.device_mesh.device_type == "cuda"
        assert named.to_local().data_ptr() == tensor.data_ptr()
