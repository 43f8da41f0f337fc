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
from tonnage.kernels.lanes import Lane
from tonnage.offload.residency import INPUTS


class BlockInputs:
    """The inputs of ``blocks``, which pass through here from now on: whatever a block saves for its backward pass that
    is its input, it saves here."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        input_bytes: int,
        device: torch.device,
        *,
        lane: Callable[[torch.device], Lane] = Lane,
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
        self._device, self._outward, self._inward = device, lane(device), lane(device)
        self._forms: dict[int, tuple[torch.Size, torch.dtype]] = {}
        self._leaving: dict[int, tuple[Tensor, Any]] = {}
        self._coming: dict[int, tuple[Tensor, Any]] = {}
        self.copied_bytes = 0
        """To the host and back, so far."""
        for number, block in enumerate(blocks):
            block.forward = partial(self._run, number, block.forward)
        log(f"inputs of {len(blocks)} blocks in host memory: {memory.nbytes / 1e9:.2f} GB")

    def _run(self, number: int, forward: Callable[..., Any], hidden: Tensor, *rest: Any, **named: Any) -> Any:
        whose = hidden.data_ptr(), hidden.shape  # and not the tensor: autograd keeps these functions
        with saved_tensors_hooks(partial(self._save, number, whose), self._restore):
            return forward(hidden, *rest, **named)

    def _save(self, number: int, whose: tuple[int, torch.Size], saved: Tensor) -> int | Tensor:
        """The number of the block, if what it saves is its input, which leaves then; else what it saves."""
        is_input = (saved.data_ptr(), saved.shape) == whose and saved.is_contiguous()
        if not is_input or saved.nbytes > self._rooms.shape[1]:
            return saved
        if number == 0:  # of another micro-batch
            self._forget()
        self._forms[number] = saved.shape, saved.dtype
        self._outward.follow()
        with self._outward:
            self._copy_out(number, saved.detach())
        self._leaving[number] = saved.detach(), self._outward.mark()
        if len(self._leaving) > INPUTS.slots:
            self._let_go(next(iter(self._leaving)))
        return number

    def _restore(self, saved: int | Tensor) -> Tensor:
        """What was saved. If it is the input of a block, that of the block before it is called back."""
        if isinstance(saved, Tensor):
            return saved
        if saved in self._leaving:
            hidden = self._let_go(saved)
        else:
            self._call_back(saved)
            hidden = self._receive(saved)
        if saved - 1 in self._forms:
            self._call_back(saved - 1)
        return hidden

    def _call_back(self, number: int) -> None:
        if number in self._leaving or number in self._coming:
            return
        shape, dtype = self._forms[number]
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        self._inward.follow()  # it left before, and this memory may have been another tensor's until now
        with self._inward:
            self._copy_in(number, hidden)
        self._coming[number] = hidden, self._inward.mark()

    def _let_go(self, number: int) -> Tensor:
        """An input that was on its way out. It has left when anything else is done with it, or with its memory."""
        hidden, gone = self._leaving.pop(number)
        self._outward.join(gone)
        return hidden

    def _receive(self, number: int) -> Tensor:
        """An input that was on its way back. It is there when anything else is done with it, or with its memory."""
        hidden, there = self._coming.pop(number)
        self._inward.join(there)
        return hidden

    def _forget(self) -> None:
        for number in list(self._leaving):
            self._let_go(number)
        for number in list(self._coming):
            self._receive(number)
        self._forms.clear()

    def _copy_out(self, number: int, hidden: Tensor) -> None:
        self.copied_bytes += hidden.nbytes
        self._room(number, hidden).copy_(hidden, non_blocking=True)

    def _copy_in(self, number: int, hidden: Tensor) -> None:
        self.copied_bytes += hidden.nbytes
        hidden.copy_(self._room(number, hidden), non_blocking=True)

    def _room(self, number: int, hidden: Tensor) -> Tensor:
        return self._rooms[number, : hidden.nbytes].view(hidden.dtype).view(hidden.shape)
