"""Where the parameters of a model that is built rest, which has no memory until then: on its device, in the host's
memory, or on disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from tonnage.model.build import allocate
from tonnage.offload.pages import FileRange
from tonnage.parallel.homes import FileHome
from tonnage.parallel.host_blocks import ELSEWHERE, ON_DEVICE, BlocksElsewhere, HostBlocks, HostShards
from tonnage.parallel.host_masters import HostMasters
from tonnage.parallel.parts import is_gathered
from tonnage.parallel.streaming import StreamedBlocks, stream_blocks
from tonnage.parallel.tiled import TiledWeight


@dataclass(frozen=True)
class Placed:
    """What of a model rests elsewhere than on its device, if anything."""

    streamed: StreamedBlocks | None = None
    """Blocks whose parameters rest on disk, beside a CPU."""
    on_host: BlocksElsewhere | None = None
    """Blocks whose parameters come from the host's memory, or through it from disk."""
    masters: HostMasters | None = None
    """What is trained, where the host updates it."""

    @property
    def on_disk(self) -> StreamedBlocks | FileHome | None:
        """Whatever has the parameters of the blocks on disk."""
        if self.on_host is not None and isinstance(self.on_host.home, FileHome):
            return self.on_host.home
        return self.streamed

    @property
    def mapped(self) -> Collection[str]:
        """Names of parameters that are read where they are stored, and so are filled already."""
        return self.on_disk.pages.stored if self.on_disk is not None else ()

    def begin(self, loss_model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        if self.masters is not None:
            self.masters.begin(loss_model, blocks)
        elif self.on_host is not None:
            self.on_host.begin()

    def rest(self) -> None:
        """Give memory back that files have taken while they were filled."""
        if self.on_disk is not None:
            self.on_disk.pages.rest(list(self.on_disk.pages))


@dataclass(frozen=True)
class Placement:
    """Where the parameters of a model are to rest."""

    model: PreTrainedModel
    blocks: Sequence[nn.Module]
    device: torch.device
    tiled: Sequence[TiledWeight]
    """Weights that come in tiles."""
    come_and_go: bool
    """Whether blocks come to the device from the host's memory: what of them is frozen or, if all is trained and the
    host updates it, everything."""
    updates_on_host: bool
    trains_all: bool
    recomputed: int
    """How many blocks, the first ones, save no weights for their backward pass."""
    directories: Sequence[Path] | None
    """Where parameters of blocks, and what comes in tiles, rest on disk; None if they do not."""
    stored: Mapping[str, FileRange]
    """Parameters of blocks, by name, that are read where they are."""
    evaluates: bool


def place(placement: Placement, log: Callable[[str], None]) -> Placed:
    """Take the memory of all parameters, where they are to rest. None is filled yet, but for those of blocks that are
    read where they are stored.

    Raises:
        UserError: not enough space, or so much of the host's memory cannot be locked.
    """
    model, device, tiled = placement.model, placement.device, placement.tiled
    on_host = _from_host(placement, log) if placement.come_and_go else None
    masters = HostMasters(model, device, on_host, tiled) if placement.updates_on_host else None
    if masters is not None:
        log(f"parameters that are updated in host memory: {masters.num_bytes / 1e9:.2f} GB")
    elsewhere = [*(on_host.parameters if on_host else ()), *(masters.parameters.values() if masters else ())]
    allocate(model, device, elsewhere)
    if isinstance(on_host, HostShards):
        on_host.rest()
    if masters is not None:
        masters.rest()
    streamed, directories = None, placement.directories
    if directories is not None and on_host is None:
        streamed = stream_blocks(
            model, placement.blocks, directories, placement.stored, trains_all=placement.trains_all, tiled=tiled
        )
        log(f"parameters of the blocks on disk: {streamed.pages.num_bytes / 1e9:.2f} GB")
    return Placed(streamed, on_host, masters)


def _from_host(placement: Placement, log: Callable[[str], None]) -> BlocksElsewhere:
    """Blocks that come to the device from the host's memory, or through it from disk."""
    on_host: BlocksElsewhere
    model, blocks, device, stored = placement.model, placement.blocks, placement.device, placement.stored
    directories = placement.directories or ()
    trains = placement.updates_on_host and placement.trains_all  # else what is frozen comes and goes
    if any(is_gathered(parameter) and parameter.requires_grad == trains for parameter in model.parameters()):
        on_host = HostShards(model, blocks, device, trains=trains, directories=directories, stored=stored)
    else:
        on_host = HostBlocks(
            model,
            blocks,
            device,
            recomputed=placement.recomputed,
            trains=trains,
            directories=directories,
            stored=stored,
            otherwise=ELSEWHERE if placement.evaluates else ON_DEVICE,
            tiled=placement.tiled if trains else (),
        )
    kind = "parameters" if trains else "frozen parameters"
    message = f"{kind} of the blocks in host memory: {on_host.home.num_bytes / 1e9:.2f} GB"
    if isinstance(on_host.home, FileHome):
        pages = on_host.home.pages
        message += f", through which {(pages.num_bytes + pages.stored_bytes) / 1e9:.2f} GB come from disk"
    log(message)
    return on_host
