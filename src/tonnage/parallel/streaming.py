"""Blocks whose parameters rest on disk and stream through memory, forward and backward.

The memory of a block's parameters (of this rank's shards) is a file (``offload.pages``), so it is right whoever looks
at it, sharding included. What the hooks here add is the order of a step: while a block runs, the next one is read, and
the one before gives its memory back. Two or three blocks are in memory at a time. What no block holds (embedding,
final norm, head) stays, unless it comes in tiles (``tiled``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.kernels.regions import cuts_of, local_part
from tonnage.offload.pages import FileRange, Pages
from tonnage.offload.residency import blocks_in_memory
from tonnage.parallel.parts import before_backward, is_gathered, with_local
from tonnage.parallel.tiled import TiledWeight

WHAT = "the parameters of the blocks"


def stream_blocks(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    directories: Sequence[Path],
    stored: Mapping[str, FileRange] = MappingProxyType({}),
    *,
    trains_all: bool,
    tiled: Sequence[TiledWeight] = (),
) -> StreamedBlocks:
    """Move the parameters of allocated (and sharded) ``blocks`` to files; their values are lost. Unless ``trains_all``,
    only frozen parameters are moved: they are only read, and the trained ones beside them are small.

    Frozen parameters that are ``stored`` in a file (by name) exactly as this rank has them are read from that file,
    without a copy. They have their values already.

    A shard of fewer rows than the others stays in memory: sharding pads it in memory of its own. Weights that come in
    tiles (``tiled``) are moved as well.

    Raises:
        UserError: not enough space.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    parameters = [{names[id(parameter)]: parameter for parameter in block.parameters()} for block in blocks]
    chosen = {
        name: parameter
        for block in parameters
        for name, parameter in block.items()
        if _is_even(parameter) and (trains_all or not parameter.requires_grad) and local_part(parameter).nbytes
    }
    lying = {name: stored[name] for name, parameter in chosen.items() if name in stored and not parameter.requires_grad}
    in_tiles = {names[id(weight.parameter)]: weight for weight in tiled if local_part(weight.parameter).nbytes}
    resting = chosen | {name: weight.parameter for name, weight in in_tiles.items()}
    sizes = {name: local_part(parameter).nbytes for name, parameter in resting.items() if name not in lying}
    pages = Pages(sizes, directories, WHAT if not tiled else f"{WHAT} and what comes in tiles", lying)
    for name, parameter in over_pages(resting, pages).items():
        if name in in_tiles:
            in_tiles[name].put(parameter)
            in_tiles[name].rest_in(pages, name)
            continue
        owner, _, attribute = name.rpartition(".")
        setattr(root.get_submodule(owner), attribute, parameter)
    ahead = blocks_in_memory(gathered=any(map(is_gathered, chosen.values()))) - 1
    names_of = [[name for name in block if name in pages and name not in in_tiles] for block in parameters]
    streamed = StreamedBlocks(pages, names_of, ahead)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(streamed.before_forward, number), prepend=True)
        block.register_forward_hook(partial(streamed.after_forward, number), prepend=True)
    return streamed


class StreamedBlocks:
    """The blocks that are in memory: the one that runs and the next ``ahead``, of which sharding gathers one early."""

    def __init__(self, pages: Pages, names: Sequence[Sequence[str]], ahead: int) -> None:
        self.pages, self._names, self._ahead = pages, names, ahead
        self._there: set[int] = set()
        self.waited_seconds = 0.0
        """Time that blocks waited for their parameters."""

    def before_forward(self, number: int, *_: Any) -> None:
        """Wait until the block is in memory, and begin to read the next ones."""
        self._move(range(number, number + self._ahead + 1))

    def after_forward(self, number: int, block: nn.Module, inputs: Any, output: Any) -> None:
        """Have the block read again before its backward pass, which begins with the gradient of ``output``."""
        before_backward(output, partial(self._before_backward, number))

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        self._move(range(number, number - self._ahead - 1, -1))

    def _move(self, window: range) -> None:
        numbers = [number for number in window if 0 <= number < len(self._names)]
        for number in self._there.difference(numbers):
            self.pages.rest(self._names[number])
        self._there = set(numbers)
        for number in numbers:
            self.pages.prefetch(self._names[number])
        self.waited_seconds += self.pages.bring(self._names[numbers[0]])


def _is_even(parameter: nn.Parameter) -> bool:
    if not is_gathered(parameter):
        return True
    assert isinstance(parameter, DTensor)
    cuts = (*cuts_of(parameter, tensor_axis=True), *cuts_of(parameter, tensor_axis=False))
    return parameter.shape[0] % math.prod(parameter.device_mesh.size(axis) for axis, side in cuts if side == 0) == 0


def over_pages(parameters: Mapping[str, nn.Parameter], pages: Pages) -> dict[str, nn.Parameter]:
    """Those of ``parameters`` that ``pages`` has, with its memory; new objects, which sharding takes up when it sees
    them in their modules before its first use."""
    return {name: _over(parameter, pages.memory(name)) for name, parameter in parameters.items() if name in pages}


def _over(parameter: nn.Parameter, memory: memoryview) -> nn.Parameter:
    local = local_part(parameter)
    return with_local(parameter, torch.frombuffer(memory, dtype=local.dtype).view(local.shape))
