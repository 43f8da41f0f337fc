"""State on disk: the bits of state in memory, whatever the tiles; copies that go out and come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numba
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tonnage.errors import DiskFailed, UserError
from tonnage.kernels.moments import Codec
from tonnage.offload.residency import OPTIMIZER, Residency
from tonnage.optim.on_disk import StateOnDisk
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.tiers import StateInMemory, StatePiece, StateTier, TrainedParameter
from tonnage.optim.tiles import lay_out

SHAPES = {"embed": (40, 300), "norm": (300,), "long": (2, 5000), "none": (0, 300), "experts": (3, 8, 100), "last": (7,)}
TILE_BYTES = 8192


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


def on_disk(directory: Path, resident_bytes: int = 0) -> Callable[[Sequence[TrainedParameter], Codec], StateOnDisk]:
    directories = [directory / "a", directory / "b"]
    return partial(sized, tile_bytes=TILE_BYTES, directories=directories, resident_bytes=resident_bytes)


def sized(trained: Sequence[TrainedParameter], codec: Codec, *, tile_bytes: int, **options: Any) -> StateOnDisk:
    with patch.dict(OPTIMIZER, disk=Residency(4, tile_bytes)):
        return StateOnDisk(trained, codec, **options)


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    for name, parameter in named.items():
        gradient = torch.randn(parameter.shape).to(parameter.dtype)
        parameter.grad = None if parameter.requires_grad is False or (name == "norm" and step % 2) else gradient


@pytest.mark.parametrize("codec", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_twenty_steps_equal_state_in_memory_bit_for_bit(dtype: torch.dtype, codec: Codec, tmp_path: Path) -> None:
    here, there = parameters(dtype), parameters(dtype)
    memory, disk = make(here, codec), make(there, codec, on_disk(tmp_path))
    assert isinstance(disk.tier, StateOnDisk)
    assert disk.state_bytes == memory.state_bytes
    assert disk.tier.host_bytes == 4 * TILE_BYTES < disk.state_bytes
    for step in range(20):
        set_gradients(here, step)
        set_gradients(there, step)
        if step % 3:
            disk.prefetch()
        scale = 1.0 / (1 + step % 4)
        memory.step(1e-2, scale)
        disk.step(1e-2, scale)
        for name in here:
            assert torch.equal(here[name], there[name]), (step, name)
    want, got = memory.tensors(), disk.tensors()
    assert list(want) == list(got)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    assert disk.tier.store.counters.bytes_written > 15 * disk.state_bytes


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_state_that_partly_stays_in_memory_changes_no_bit(codec: Codec, tmp_path: Path) -> None:
    here = parameters(torch.bfloat16)
    memory = make(here, codec)
    there = {tiles: parameters(torch.bfloat16) for tiles in (0, 1, 7, 1000)}
    disks = {
        tiles: make(named, codec, on_disk(tmp_path / f"{tiles}", resident_bytes=tiles * TILE_BYTES))
        for tiles, named in there.items()
    }
    for step in range(6):
        set_gradients(here, step)
        memory.step(1e-2)
        for tiles, disk in disks.items():
            set_gradients(there[tiles], step)
            if step % 2:
                disk.prefetch()
            disk.step(1e-2)
            assert all(torch.equal(here[name], there[tiles][name]) for name in here), (step, tiles)
    written = []
    for disk in disks.values():
        assert isinstance(disk.tier, StateOnDisk)
        want, got = memory.tensors(), disk.tensors()
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        disk.adopt({name: tensor + 1 for name, tensor in got.items()})
        assert all(torch.equal(disk.tensors()[name], tensor + 1) for name, tensor in want.items())
        disk.tier.store.flush()
        written.append(disk.tier.store.counters.bytes_written)
    assert written == sorted(written, reverse=True)
    assert len(set(written)) == 4
    assert written[-1] == 0


@pytest.mark.slow
def test_an_update_in_the_background_is_done_turn_by_turn(tmp_path: Path) -> None:
    """Slowed down, so that what is not waited for is not there; each turn is whole when it was waited for."""
    here, there = parameters(torch.bfloat16), parameters(torch.bfloat16)
    turns = {"long": 1, "embed": 2, "norm": 2}  # "experts" and "last" have turn 0
    memory, disk = make(here, "fp32"), make(there, "fp32", on_disk(tmp_path), turns)
    pieces = disk.tier.pieces

    def slowly(names: Sequence[str]) -> Iterator[StatePiece]:
        for piece in pieces(names):
            time.sleep(0.02)
            yield piece

    vars(disk.tier)["pieces"] = slowly
    for step in range(4):
        set_gradients(here, step)
        set_gradients(there, step)
        before = {name: parameter.detach().clone() for name, parameter in there.items()}
        memory.step(1e-2)
        disk.step(1e-2)
        disk.gradients.clear()
        assert all(parameter.grad is None for parameter in there.values())
        set_gradients(there, step + 100)  # those of the next step, which the update must not see
        for turn in range(3):
            disk.wait_for(turn)
            for name in here:
                if turns.get(name, 0) <= turn:
                    assert torch.equal(here[name], there[name]), (step, turn, name)
            if turn == 0:
                assert torch.equal(there["embed"], before["embed"])  # its turn comes later
        disk.finish()
    assert disk.waited_seconds > 0.1


def test_what_goes_wrong_in_the_background_is_raised(tmp_path: Path) -> None:
    named = parameters(torch.float32)
    disk = make(named, "fp32", on_disk(tmp_path), {})

    def broken(names: Sequence[str]) -> Iterator[StatePiece]:
        yield from ()
        raise DiskFailed("the disk is gone")

    vars(disk.tier)["pieces"] = broken
    set_gradients(named, 0)
    disk.step(1e-2)
    with pytest.raises(DiskFailed, match="gone"):
        disk.wait_for(0)
    with pytest.raises(DiskFailed, match="gone"):
        disk.finish()


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_copy_of_the_state_can_be_taken_over(codec: Codec, tmp_path: Path) -> None:
    named = [parameters(torch.bfloat16) for _ in range(3)]
    first = make(named[0], codec, on_disk(tmp_path / "first"))
    for step in range(3):
        set_gradients(named[0], step)
        first.step(1e-2)
    copy = first.tensors()
    set_gradients(named[0], 3)
    first.step(1e-2)
    assert not torch.equal(copy["embed.m"], first.tensors()["embed.m"])  # it is a copy as of then
    for number, other in ((1, on_disk(tmp_path / "second")), (2, StateInMemory)):
        second = make(named[number], codec, other)
        filled = second.tensors()
        for name, tensor in filled.items():
            tensor.copy_(copy[name])
        second.adopt(filled)
        for name, tensor in second.tensors().items():
            assert torch.equal(tensor, copy[name]), name


def test_the_number_of_threads_is_as_before_after_a_step(tmp_path: Path) -> None:
    named = parameters(torch.float32)
    adamw = make(named, "fp32", on_disk(tmp_path))
    set_gradients(named, 0)
    before = numba.get_num_threads(), torch.get_num_threads()
    adamw.step(1e-2)
    assert (numba.get_num_threads(), torch.get_num_threads()) == before


def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    adamw = make(parameters(torch.float32), "fp32", on_disk(tmp_path))
    kept = adamw.tensors()
    assert kept["embed.m"].shape == (40, 300)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_small_model_takes_a_small_ring(tmp_path: Path) -> None:
    named = {"w": nn.Parameter(torch.zeros(10, 300))}
    adamw = make(named, "fp32", partial(StateOnDisk, directories=[tmp_path]))
    assert isinstance(adamw.tier, StateOnDisk)
    assert adamw.tier.host_bytes == 6 * 4096  # 24,064 bytes of state
    named["w"].grad = torch.ones(10, 300)
    adamw.step(1e-2)
    frozen = make(
        {"f": nn.Parameter(torch.zeros(3), requires_grad=False)}, "fp32", partial(StateOnDisk, directories=[tmp_path])
    )
    frozen.step(1e-2)
    assert frozen.tensors() == {}


def test_tiles_too_small_for_a_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not hold a piece of embed"):
        make(parameters(torch.float32), "fp32", partial(sized, tile_bytes=1024, directories=[tmp_path]))


def test_tiles_of_parts_of_rows_end_where_the_part_ends() -> None:
    """Fifteen rows, of each of which this rank has half."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
        halves: list[tuple[Codec, int]] = [("fp32", 150), ("int8", 256)]
        for codec, half in halves:
            part = DTensor.from_local(torch.zeros(15, half), mesh, [Shard(1)], run_check=False)
            tiles = lay_out([TrainedParameter("w", nn.Parameter(part), decay=0.0, first=0)], codec, TILE_BYTES)
            places = [place for tile in tiles for place in tile]
            assert [place.start for place in places] == [0, *(place.stop for place in places[:-1])]
            assert places[-1].stop == 15 * half
            assert all(place.row == half for place in places)
    finally:
        dist.destroy_process_group()


def test_too_little_space_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = make(parameters(torch.float32), "fp32", on_disk(tmp_path))

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UserError, match="copy of the optimizer state"):
        adamw.tensors()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
