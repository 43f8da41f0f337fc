"""Looks on, and spares real memory: for models of real shapes, of which no number is needed.

Weights stay as they are allocated, nothing is saved or exported, and the host's locked memory is taken without being
written to: the host updates nothing. Files are as long as they would be, and hold nothing. What would write to them is
left out: they are not reserved, as those of runs are, and a disk without room for it would end the process (SIGBUS).
"""

from __future__ import annotations

import mmap
import os
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tonnage.checkpoint.save import Saver
from tonnage.decide import exports
from tonnage.host import locked
from tonnage.kernels import adamw
from tonnage.offload import files, pages, store
from tonnage.offload.ring import Pairs
from tonnage.optim import on_disk, tiers
from tonnage.parallel import homes
from tonnage.training import building

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux."""


def nothing(*_: Any, **__: Any) -> None:
    """Done instead of work that only fills memory."""


def lock(memory: Tensor) -> int:
    """``locked.lock``, without zeros written first."""
    if not memory.numel():
        return 0
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    status = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
    if status == 0:
        weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False
    return status


def arena(num_bytes: int) -> mmap.mmap:
    """``arena.arena``, of memory that need not be there."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)


def update(weight: Tensor, *rest: Any) -> None:
    """``adamw.update``, of what is on a device alone."""
    if weight.device.type != "cpu":
        on_device(weight, *rest)


def reserve(descriptor: int, num_bytes: int, **_: Any) -> None:
    """``files.reserve``, of the size alone."""
    os.ftruncate(descriptor, num_bytes)


def tensors(self: Any) -> dict[str, Tensor]:
    """``on_disk.StateOnDisk.tensors``, as long as they would be."""
    return self._map_copy()  # type: ignore[no-any-return]


def pairs(self: homes.FileHome, unit: homes.Block, memory: Tensor) -> Pairs:
    """``homes.FileHome.pairs``, of which nothing is copied."""
    buffer, block = self._staging.take(), self._blocks[unit[0]]
    self.pages.bring(block)
    self.pages.rest(block)
    end = max(stop for _, stop in block.values())
    return [(buffer[:end], memory[:end])]


def zeros(size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.zeros``, of the host's memory that need not be there."""
    shape = torch.empty(size, device="meta").shape
    if device.type != "cpu" or not shape.numel():
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(arena(shape.numel() * dtype.itemsize), dtype=dtype).view(shape)


def zeros_like(one: Tensor, *, dtype: torch.dtype) -> Tensor:
    """``torch.zeros_like``, in the same way."""
    return zeros(one.shape, dtype=dtype, device=one.device)


def hold(self: tiers.StateInMemory, *given: Any) -> None:
    """``tiers.StateInMemory.__init__``, of the host's memory that need not be there."""
    with patch.object(torch, "zeros", zeros), patch.object(torch, "zeros_like", zeros_like):
        held(self, *given)


on_device, held = adamw.update, tiers.StateInMemory.__init__

for module, name, instead in (
    (building, "initialise_randomly", nothing),
    (Saver, "save", nothing),
    (exports, "export_run", lambda *_: []),
    (exports, "step_of_export", lambda *_: 0),
    (locked, "lock", lock),
    (locked, "arena", arena),
    (adamw, "update", update),
    (files, "reserve", reserve),
    (pages, "reserve", reserve),
    (pages, "_copy_file", nothing),
    (pages.Pages, "_read", nothing),
    (pages.Pages, "rewrite", nothing),
    (homes.FileHome, "pairs", pairs),
    (on_disk.StateOnDisk, "tensors", tensors),
    (tiers.StateInMemory, "__init__", hold),
    (files.TileFile, "read", nothing),
    (files.TileFile, "write", nothing),
    (store, "np", SimpleNamespace(uint8=None, frombuffer=lambda *_: SimpleNamespace(fill=nothing))),
    (store, "_check_space", nothing),
):
    setattr(module, name, instead)
