"""Save a run: every rank its own shard, in safetensors, published only when whole.

    checkpoints/step-00000500/
      shard-00001-model-00001-of-00001.safetensors    rank 0's parts of every tensor (torch's DCP, safetensors form)
      shard-00002-model-00001-of-00001.safetensors    rank 1's ...
      state.json                                      step and what else is not a tensor
      COMPLETE                                        written last: size and SHA-256 of every file

Tensor names: ``model.NAME`` for parameters, ``optimizer.NAME.m``, ``.v`` and ``.low`` for the optimizer's state.
A directory without COMPLETE is not a checkpoint. There is no pickle in any file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from tonnage.parallel.world import World
from tonnage.rundir import read_json, write_json

COMPLETE = "COMPLETE"


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return checkpoints / f"step-{step:08d}"


def save(
    path: Path,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    world: World,
) -> None:
    """Write one checkpoint; every rank calls this, and returns when the checkpoint is whole.

    ``state`` is everything that is not a tensor and goes into ``state.json``.
    """
    if world.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    world.barrier()
    tensors = {f"model.{name}": tensor for name, tensor in model.items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer.items()}
    save_distributed(tensors, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))
    world.barrier()
    if world.rank == 0:
        write_json(path / "state.json", state)
        publish(path)
    world.barrier()


def publish(path: Path) -> None:
    """Force every file to disk, then write COMPLETE with their sizes and hashes."""
    files = {}
    for file in sorted(path.iterdir()):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            files[file.name] = {
                "bytes": file.stat().st_size,
                "sha256": hashlib.file_digest(handle, "sha256").hexdigest(),
            }
    write_json(path / COMPLETE, {"files": files})
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path.parent for path in checkpoints.glob(f"step-*/{COMPLETE}"))


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors."""
    state = read_json(path / "state.json")
    assert isinstance(state, dict)
    return state


def prune(checkpoints: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` complete checkpoints, and every incomplete one older than the newest."""
    complete = complete_checkpoints(checkpoints)
    for path in complete[: max(0, len(complete) - keep)]:
        (path / COMPLETE).unlink()
        shutil.rmtree(path)


def describe(path: Path) -> str:
    """Size and number of files of a checkpoint, for a log line."""
    files = json.loads((path / COMPLETE).read_text())["files"]
    total = sum(entry["bytes"] for entry in files.values())
    return f"{len(files)} files, {total / 1e9:.2f} GB"
