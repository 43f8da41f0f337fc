"""Cross-entropy of 16-bit logits and its gradient, in their own memory and one visit of each row.

In torch operations, softmax, loss and gradient of a chunk of logits pass over them in fp32 a dozen times, 50 bytes an
element. A row of a vocabulary of 50,000 is 100 kB in bf16 and fits a core's cache, so here a thread takes a row, finds
its largest value, the sum of exponentials and the gradient, and rounds that once into the row: 4 bytes an element. That
is on a CPU, in bf16; a GPU has a kernel of its own (``softmax_triton``).

The exponential (``kernels.bits``) becomes vector instructions. Softmax and sums are fp32. What is not finite stays not
finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from tonnage.kernels.bits import exponential, narrow, wide
from tonnage.kernels.gpu import takes_triton
from tonnage.kernels.loops import loop
from tonnage.kernels.switches import is_on
from tonnage.kernels.widening import HALVES

_ROWS_A_TURN = 4
"""Rows that a thread takes at once, so that its scratch space costs nothing."""
_LANES = 256
"""Sums of a row are taken side by side, so that they become vector instructions in an order that is written down here:
left to the compiler (``fastmath``), the process that compiled a loop rounded otherwise than those that found it in the
cache."""


@loop
def _rows(logits, targets, weights, scale, losses, wants_gradient):  # type: ignore[no-untyped-def]
    num_rows, size = logits.shape
    for turn in prange((num_rows + _ROWS_A_TURN - 1) // _ROWS_A_TURN):
        scratch, lanes = np.empty(size, np.float32), np.empty(_LANES, np.float32)
        whole = size // _LANES * _LANES
        for row in range(turn * _ROWS_A_TURN, min(num_rows, (turn + 1) * _ROWS_A_TURN)):
            values = logits[row]
            for i in range(size):
                scratch[i] = wide(values[i]) * scale
            picked = scratch[targets[row]]
            largest = np.float32(-np.inf)
            lanes[:] = largest
            for start in range(0, whole, _LANES):
                for lane in range(_LANES):
                    x = scratch[np.uint64(start + lane)]
                    lanes[lane] = x if x > lanes[lane] else lanes[lane]
            for lane in range(_LANES):
                largest = max(largest, lanes[lane])
            for i in range(whole, size):
                largest = max(largest, scratch[i])
            for i in range(size):
                scratch[i] = exponential(scratch[i] - largest)
            lanes[:] = np.float32(0.0)
            for start in range(0, whole, _LANES):
                for lane in range(_LANES):
                    lanes[lane] += scratch[np.uint64(start + lane)]
            total = np.float32(0.0)
            for lane in range(_LANES):
                total += lanes[lane]
            for i in range(whole, size):
                total += scratch[i]
            losses[row] = (np.log(total) + (largest - picked)) * weights[row]
            if wants_gradient:
                factor = weights[row] * scale
                each = factor / total
                for i in range(size):
                    values[i] = narrow(scratch[i] * each)
                values[targets[row]] = narrow(scratch[targets[row]] * each - factor)


@torch.library.custom_op("tonnage::softmax_loss", mutates_args=("logits",))
def _softmax_loss(logits: Tensor, targets: Tensor, weights: Tensor, scale: float, gradient: bool) -> Tensor:
    if logits.device.type != "cpu":
        from tonnage.kernels.softmax_triton import softmax_loss as on_gpu

        return on_gpu(logits, targets, weights, scale, gradient)
    losses = torch.empty(logits.shape[0])
    arrays = logits.view(torch.uint16).numpy(), targets.numpy(), weights.numpy()
    _rows(*arrays, np.float32(scale), losses.numpy(), gradient)
    return losses


@_softmax_loss.register_fake
def _(logits: Tensor, targets: Tensor, weights: Tensor, scale: float, gradient: bool) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def softmax_loss(logits: Tensor, targets: Tensor, weights: Tensor, scale: float, *, wants_gradient: bool) -> Tensor:
    """``weights`` x cross-entropy of ``scale`` x ``logits``, row by row; fp32 (rows,).

    Shapes: ``logits`` (rows, vocabulary), as ``takes`` takes them, ``targets`` int64 (rows,), ``weights`` fp32 (rows,).
    With ``wants_gradient`` the logits become the gradient of the sum with respect to them.
    """
    losses: Any = _softmax_loss(logits, targets, weights, scale, wants_gradient)
    assert isinstance(losses, Tensor)
    return losses


def takes(logits: Tensor) -> bool:
    """Whether ``softmax_loss`` is for such logits."""
    on_cpu = logits.dtype == torch.bfloat16 and logits.device.type == "cpu"
    return is_on("softmax") and (on_cpu or (logits.dtype in HALVES and takes_triton(logits.device)))


def keeps_memory(logits: Tensor) -> bool:
    """Whether it pays to keep the memory of such logits for the next: on a GPU the allocator does."""
    return logits.device.type == "cpu" and takes(logits)
