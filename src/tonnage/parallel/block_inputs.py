"""Inputs of blocks that rest in the host's memory between a block's forward and its backward pass.

A block that is recomputed whole keeps its input only (``recompute``). Here that leaves the device as soon as the block
begins, beside its work, and comes back while the block after it has its backward pass: two or three inputs are on the
device at a time, however many blocks there are. In the host's memory there is room for those of one micro-batch,
locked. What comes back is what left, so no bit changes.
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


class BlockInputs:
    """The inputs of ``blocks``: from now on, where a block saves its input for its backward pass, it is kept here."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        input_bytes: int,
        device: torch.device,
        *,
        log: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Take the memory: ``input_bytes`` for every block. A larger input stays on the device.

        Raises:
            UserError: so much of the host's memory cannot be locked.
        """
        memory = locked_for(
            "memory.activation_tier", len(blocks) * input_bytes, device, "memory.activation_tier=device"
        )
        self._rooms = memory.view(len(blocks), input_bytes)
        self._forms: dict[int, tuple[torch.Size, torch.dtype]] = {}
        outward, inward = Stream(device), Stream(device)
        self.ring = Ring(Tensors(self._home, device), inward, outward, INPUTS.slots)
        for number, block in enumerate(blocks):
            block.forward = partial(self._run, number, block.forward)
        log(f"inputs of {len(blocks)} blocks in host memory: {memory.nbytes / 1e9:.2f} GB")

    @property
    def copied_bytes(self) -> int:
        """To the host and back, so far."""
        return self.ring.home.copied_bytes

    def _run(self, number: int, forward: Callable[..., Any], hidden: Tensor, *rest: Any, **named: Any) -> Any:
        identity = hidden.data_ptr(), hidden.shape  # and not the tensor: autograd keeps these functions
        with saved_tensors_hooks(partial(self._save, number, identity), self._restore):
            return forward(hidden, *rest, **named)

    def _save(self, number: int, identity: tuple[int, torch.Size], saved: Tensor) -> int | Tensor:
        """If a block saves its input, let that leave and return the block's number; else return what it saves."""
        is_input = (saved.data_ptr(), saved.shape) == identity and saved.is_contiguous()
        if not is_input or saved.nbytes > self._rooms.shape[1]:
            return saved
        if number == 0:  # of another micro-batch
            self.ring.forget()
            self._forms.clear()
        self._forms[number] = saved.shape, saved.dtype
        self.ring.give(number, saved.detach())
        return number

    def _restore(self, saved: int | Tensor) -> Tensor:
        """What was saved. If it is a block's input, that of the block before begins to come back."""
        if isinstance(saved, Tensor):
            return saved
        hidden = self.ring.take(saved)
        if saved - 1 in self._forms and saved - 1 not in self.ring.leaving:
            self.ring.call(saved - 1)
        return hidden

    def _home(self, number: int) -> Tensor:
        shape, dtype = self._forms[number]
        return self._rooms[number, : shape.numel() * dtype.itemsize].view(dtype).view(shape)
