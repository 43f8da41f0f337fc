"""Looks on, and spares real memory: for models of real shapes, of which no number is needed.

Weights stay as they are allocated, nothing is saved or exported, and the host's locked memory is taken without being
written to: the host updates nothing. Files are as long as they would be, and hold nothing.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from tonnage.checkpoint.save import Saver
from tonnage.decide import exports
from tonnage.host import locked
from tonnage.kernels import adamw
from tonnage.offload import files, pages, store
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


on_device = adamw.update

for module, name, instead in (
    (building, "initialise_randomly", nothing),
    (Saver, "save", nothing),
    (exports, "export_run", lambda *_: []),
    (exports, "step_of_export", lambda *_: 0),
    (locked, "lock", lock),
    (locked, "arena", arena),
    (adamw, "update", update),
    (files, "reserve", os.ftruncate),
    (pages, "reserve", os.ftruncate),
    (files.TileFile, "read", nothing),
    (files.TileFile, "write", nothing),
    (store, "checksum", lambda buffer: 0),
    (store, "_check_space", nothing),
):
    setattr(module, name, instead)
