"""Inputs of blocks that rest in the host's memory between a block's forward and its backward pass.

A block that is recomputed whole keeps its input only (``recompute``). Here that leaves the device as soon as the block
begins, beside its work, and comes back while the block after it has its backward pass: two or three inputs are on the
device at a time, however many blocks there are. In the host's memory there is room for those of as many micro-batches
as have had their forward pass and not their backward pass: of one or, in a pipeline, of several, which end in the order
in which they began. It is locked. What comes back is what left, so no bit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tonnage.host.locked import locked_for
from tonnage.kernels.streams import Stream
from tonnage.offload.residency import INPUTS
from tonnage.offload.ring import Ring, Tensors

Input = tuple[int, int]
"""The place of a pass among those under way, and of a block."""


class BlockInputs:
    """The inputs of ``blocks``: from now on, where a block saves its input for its backward pass, it is kept here."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        input_bytes: int,
        device: torch.device,
        *,
        passes: int = 1,
        log: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Take the memory: ``input_bytes`` for every block, of so many ``passes`` under way at a time. A larger input
        stays on the device.

        Raises:
            UserError: so much of the host's memory cannot be locked.
        """
        num_bytes = passes * len(blocks) * input_bytes
        memory = locked_for("memory.activation_tier", num_bytes, device, "memory.activation_tier=device")
        self._rooms = memory.view(passes, len(blocks), input_bytes)
        self._forms: list[dict[int, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(passes)]
        self._pass = -1
        outward, inward = Stream(device), Stream(device)
        self.ring = Ring(Tensors(self._home, device), inward, outward, INPUTS.slots)
        for number, block in enumerate(blocks):
            block.forward = partial(self._run, number, block.forward)
        several = f", of {passes} micro-batches" if passes > 1 else ""
        log(f"inputs of {len(blocks)} blocks in host memory{several}: {memory.nbytes / 1e9:.2f} GB")

    @property
    def copied_bytes(self) -> int:
        """To the host and back, so far."""
        return self.ring.home.copied_bytes

    def _run(self, number: int, forward: Callable[..., Any], hidden: Tensor, *rest: Any, **named: Any) -> Any:
        if number == 0 and torch.is_grad_enabled():
            self._begin()
        identity = hidden.data_ptr(), hidden.shape  # and not the tensor: autograd keeps these functions
        with saved_tensors_hooks(partial(self._save, number, identity), self._restore):
            return forward(hidden, *rest, **named)

    def _begin(self) -> None:
        """Take the place of the pass that began first of those there is room for: it has ended."""
        self.ring.forget()
        self._pass = (self._pass + 1) % len(self._forms)
        self._forms[self._pass].clear()

    def _save(self, number: int, identity: tuple[int, torch.Size], saved: Tensor) -> Input | Tensor:
        """If a block saves its input, let that leave and return where it is; else return what the block saves."""
        is_input = (saved.data_ptr(), saved.shape) == identity and saved.is_contiguous()
        if not is_input or saved.nbytes > self._rooms.shape[2]:
            return saved
        self._forms[self._pass][number] = saved.shape, saved.dtype
        self.ring.give((self._pass, number), saved.detach())
        return self._pass, number

    def _restore(self, saved: Input | Tensor) -> Tensor:
        """What was saved. If it is a block's input, that of the block before begins to come back."""
        if isinstance(saved, Tensor):
            return saved
        hidden = self.ring.take(saved)
        micro_batch, number = saved
        before = micro_batch, number - 1
        if number - 1 in self._forms[micro_batch] and before not in self.ring.leaving:
            self.ring.call(before)
        return hidden

    def _home(self, place: Input) -> Tensor:
        micro_batch, number = place
        shape, dtype = self._forms[micro_batch][number]
        return self._rooms[micro_batch, number, : shape.numel() * dtype.itemsize].view(dtype).view(shape)
