"""Matrix products of 16-bit numbers on CPUs: where fp32 ones are faster, and where they are not.

Without instructions for it, a bf16 product of torch's CPU back end runs at a tenth of the speed of an fp32 one; where a
virtual machine hides a Xeon's AMX, those of AVX-512 that are left run at half. There, the products are computed in fp32
from the 16-bit operands and rounded to 16 bits once, which is what the fast instructions do as well (they add up in
fp32). Operands are converted in blocks that stay in a cache: little memory, and a tenth of the time.

With AMX the gradient of a weight is the slow one of a layer's three products: its left operand lies the wrong way
round, and the library turns it as it multiplies, at half the speed. There it is computed by ``along_rows``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from tonnage.kernels import along_rows, sums
from tonnage.kernels.switches import is_on
from tonnage.kernels.widening import HALVES, processor_is_slow

ROWS, COLUMNS, DEPTH = 1024, 2048, 4096
"""Of the blocks multiplied in fp32, at most: their memory is 58 MB, and 20 MB in layers of 1,024 numbers."""


def _goes_along_rows(left: Tensor, right: Tensor) -> bool:
    """Whether the left operand of a product is turned, and the two are multiplied by ``along_rows``."""
    return left.stride(0) == 1 != left.stride(1) and is_on("products") and along_rows.takes(left.t(), right)


def goes_through_fp32(tensor: Tensor) -> bool:
    """Whether products of a tensor are computed in fp32."""
    return tensor.device.type == "cpu" and processor_is_slow(tensor.dtype)


def sizes_matter(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether each size of a product needs a program of its own: oneDNN compiles it in milliseconds, up to megabytes
    each, and keeps a thousand."""
    return device.type == "cpu" and dtype in HALVES and not processor_is_slow(dtype)


def product(left: Tensor, right: Tensor, *, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """``left @ right + bias`` of two matrices of one type, in this type, as fast as this processor can."""
    if not goes_through_fp32(left):
        if bias is None and _goes_along_rows(left, right):
            return along_rows.product(left.t(), right, out)
        return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)
    if out is None:
        result: Tensor = product_in_fp32(left, right, bias)
        return result
    _product_in_fp32_into(out, left, right, bias)
    return out


def add_product(total: Tensor, left: Tensor, right: Tensor, numbers: int) -> None:
    """``total += left @ right``, ``total`` in fp32. The product is rounded to the type of ``left`` first, but for GPUs,
    which add to fp32 as they compute; about ``numbers`` numbers of it are in memory at a time."""
    if not is_on("products"):
        total += product(left, right)
        return
    if not goes_through_fp32(left) and _goes_along_rows(left, right):
        along_rows.bring_product(total, left.t(), right)
        return
    if left.device.type == "cuda" and left.dtype in HALVES and torch.version.hip is None:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return
    rows = max(1, numbers // total.shape[1])
    piece = left.new_empty(min(rows, len(total)), total.shape[1])
    for summed, left_rows in zip(total.split(rows), left.split(rows), strict=True):
        summed += product(left_rows, right, out=piece[: len(left_rows)])


@torch.library.custom_op("tonnage::product_in_fp32", mutates_args=())
def product_in_fp32(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right + bias`` in fp32, rounded once to their type."""
    out = left.new_empty(left.shape[0], right.shape[1])
    _fill(out, left, right, bias)
    return out


@product_in_fp32.register_fake
def _(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


@torch.library.custom_op("tonnage::product_in_fp32_into", mutates_args=("out",))
def _product_in_fp32_into(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> None:
    _fill(out, left, right, bias)


def _fill(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> None:
    rows, columns, depth = min(ROWS, len(left)), min(COLUMNS, right.shape[1]), min(DEPTH, left.shape[1])
    left_memory, right_memory, sums = (torch.empty(size) for size in (rows * depth, depth * columns, rows * columns))
    depth_slices = list(_blocks(left.shape[1], depth)) or [slice(0, 0)]
    for column_slice in _blocks(right.shape[1], columns):
        for row_slice in _blocks(len(left), rows):
            target = out[row_slice, column_slice]
            total = sums[: target.numel()].view(target.shape)
            for depth_slice in depth_slices:
                if row_slice.start == 0 or len(depth_slices) > 1:
                    factor = _widened(right[depth_slice, column_slice], right_memory)
                total.addmm_(
                    _widened(left[row_slice, depth_slice], left_memory), factor, beta=float(depth_slice.start > 0)
                )
            target.copy_(total if bias is None else total.add_(bias[column_slice]))


def _widened(matrix: Tensor, memory: Tensor) -> Tensor:
    """A matrix in fp32, laid out as it is."""
    if matrix.stride(0) == 1 != matrix.stride(1):
        return _widened(matrix.t(), memory).t()
    return memory[: matrix.numel()].view(matrix.shape).copy_(matrix)


@register_flop_formula(torch.ops.tonnage.product_in_fp32)
def _(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


@register_flop_formula(torch.ops.tonnage.product_in_fp32_into)
def _(out: torch.Size, left: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * out[0] * left[1] * out[1]


def _blocks(number: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, number, max(1, size)))


def gradient_of_weight(weight: Tensor, slopes: Tensor, inputs: Tensor) -> Tensor | None:
    """``slopes.T @ inputs`` of matrices, to return to autograd: None if it was added to the sum of micro-batches."""
    if sums.adds_up(weight) and not goes_through_fp32(slopes) and _goes_along_rows(slopes.t(), inputs):
        assert weight.grad is not None
        along_rows.bring_product(weight.grad, slopes, inputs)
        return None
    return sums.handed_over(weight, product(slopes.t(), inputs))


class _Linear(torch.autograd.Function):
    """The rows of ``F.linear``, with our products. Returns a matrix, since a view that such a function returns takes no
    addition in place."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        rows = inputs.reshape(-1, inputs.shape[-1])
        if not goes_through_fp32(inputs):
            return _with_bias(rows, weight, bias)
        output: Tensor = product_in_fp32(rows, weight.t(), bias)
        return output

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        need_input, need_weight, need_bias = ctx.needs_input_grad
        return (
            product(rows, weight).view(inputs.shape) if need_input else None,
            gradient_of_weight(weight, rows, inputs.reshape(-1, inputs.shape[-1])) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def _with_bias(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of a matrix. torch writes the bias to all rows first and adds the product to that; oneDNN adds it as
    it multiplies, to the same bits, and takes 0.93 to 0.97 of the time."""
    at_once = bias is not None and rows.dtype == torch.bfloat16 and weight.is_contiguous()
    if not (at_once and is_on("products") and _library_adds_bias()):
        return F.linear(rows, weight, bias)
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return output


@cache
def _library_adds_bias() -> bool:
    library = torch.ops.mkldnn
    return hasattr(library, "_linear_pointwise") and bool(library._is_mkldnn_bf16_supported())


if hasattr(torch.ops.mkldnn, "_linear_pointwise"):

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _(rows: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
        return 2 * rows[0] * rows[1] * weight[0]


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``, as fast as this processor can."""
    ours = inputs.device.type == "cpu" and inputs.dtype in HALVES and not torch.compiler.is_compiling()
    ours = ours and (is_on("products") or is_on("sums"))
    plain = not isinstance(inputs, DTensor) and not isinstance(weight, DTensor)
    if not goes_through_fp32(inputs) and not (ours and plain and weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(inputs, weight, bias)
    output: Tensor = _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return output if inputs.dim() == 2 else output.view(*inputs.shape[:-1], weight.shape[0])


def use_fast_products(model: nn.Module) -> None:
    """Let the linear layers of a model compute with ``linear``.

    Layers of one kind share one function, so that code compiled for one block serves the next.
    """
    if not (is_on("products") or is_on("widening") or is_on("sums")):
        return
    from transformers.pytorch_utils import Conv1D

    kinds: dict[type, Any] = {nn.Linear: _forward_linear, Conv1D: _forward_conv1d}
    for module in model.modules():
        if (forward := kinds.get(type(module))) is not None:
            module.forward = MethodType(forward, module)


def _forward_linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(inputs, module.weight, module.bias)


def _forward_conv1d(module: Any, inputs: Tensor) -> Tensor:
    """GPT-2's layer, whose weight is the other way round."""
    return linear(inputs, module.weight.t(), module.bias)
