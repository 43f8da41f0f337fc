"""Blocks whose parameters rest on disk and stream through memory, forward and backward.

The memory of a block's parameters (of this rank's shards) is a file (``offload.pages``), so it is right whoever looks
at it, sharding included. What the hooks here add is the order of a step: while a block runs, the next one is read, and
the one before gives its memory back. Two or three blocks are in memory at a time. What no block holds (embedding,
final norm, head) stays.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.offload.pages import Pages

WHAT = "the parameters of the blocks"


def stream_blocks(root: nn.Module, blocks: Sequence[nn.Module], directories: Sequence[Path]) -> StreamedBlocks:
    """Move the parameters of allocated (and sharded) ``blocks`` to files; what they held is not kept. Where some are
    frozen, those alone are moved: they are only read, and what is trained beside them is little.

    A shard of fewer rows than the others stays in memory: sharding pads it in memory of its own.

    Raises:
        UserError: not enough space.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    parameters = [{names[id(parameter)]: parameter for parameter in block.parameters()} for block in blocks]
    frozen = any(not one.requires_grad for block in parameters for one in block.values())
    chosen = {
        name: one
        for block in parameters
        for name, one in block.items()
        if _is_even(one) and not (frozen and one.requires_grad) and _local(one).nbytes
    }
    pages = Pages({name: local.nbytes for name, one in chosen.items() for local in [_local(one)]}, directories, WHAT)
    for name, parameter in over_pages(chosen, pages).items():
        owner, _, attribute = name.rpartition(".")
        setattr(root.get_submodule(owner), attribute, parameter)
    ahead = 2 if any(isinstance(parameter, DTensor) for parameter in chosen.values()) else 1
    streamed = StreamedBlocks(pages, [[name for name in block if name in pages] for block in parameters], ahead)
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
        """Have the block here, and the next ones coming."""
        self._move(range(number, number + self._ahead + 1))

    def after_forward(self, number: int, block: nn.Module, inputs: Any, output: Any) -> None:
        """Have the block come back before its backward pass: its gradient comes in through ``output``."""
        first = output[0] if isinstance(output, (tuple, list)) else output
        if first.requires_grad:
            first.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        self._move(range(number, number - self._ahead - 1, -1))

    def _move(self, window: range) -> None:
        wanted = [number for number in window if 0 <= number < len(self._names)]
        for number in self._there.difference(wanted):
            self.pages.rest(self._names[number])
        self._there = set(wanted)
        for number in wanted:
            self.pages.prefetch(self._names[number])
        began = time.perf_counter()
        self.pages.bring(self._names[wanted[0]])
        self.waited_seconds += time.perf_counter() - began


def _is_even(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    shards = [
        parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
    return all(parameter.shape[0] % number == 0 for number in shards)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def over_pages(parameters: Mapping[str, nn.Parameter], pages: Pages) -> dict[str, nn.Parameter]:
    """Those of ``parameters`` that ``pages`` has, with its memory; new objects, which sharding takes up when it sees
    them in their modules before its first use."""
    return {name: _over(one, pages.memory(name)) for name, one in parameters.items() if name in pages}


def _over(parameter: nn.Parameter, memory: memoryview) -> nn.Parameter:
    local = _local(parameter)
    moved = torch.frombuffer(memory, dtype=local.dtype).view(local.shape)
    if isinstance(parameter, DTensor):
        moved = DTensor.from_local(
            moved,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(moved, requires_grad=parameter.requires_grad)
