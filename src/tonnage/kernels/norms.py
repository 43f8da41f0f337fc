"""Root-mean-square norms in one pass over memory: bf16 on the CPU.

As models write them, a norm goes over its input a dozen times in fp32, forward and backward, about 100 bytes an
element, and keeps 8 bytes of every element for the backward pass: in a deep and narrow Llama more traffic than anything
else. Here a thread takes a row, which fits its cache: 4 bytes an element forward, 6 backward, and 4 bytes a *row* are
kept.

16-bit numbers that the loop does not take (fp16, and all on other devices) go through torch, some rows at a time: of
them 4 bytes a row are kept as well, and no copy in fp32.

A model's own norms are not recognised by name. Each kind is tried once on random rows: its output must equal that of
the loop here to the last place of bf16, or it is left alone (``use_fast_norms``).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from tonnage.kernels.bits import narrow, wide
from tonnage.kernels.loops import loop
from tonnage.kernels.switches import is_on
from tonnage.kernels.widening import HALVES

_TURNS = 16
"""Parts of the rows that are summed up on their own for the gradient of the weight: a number of their own, so that the
sum does not depend on the number of threads."""
_LANES = 64
"""Sums of a row are taken side by side, in an order that the compiler does not choose (``kernels.softmax``)."""
_PARTS = 16
"""Parts of the rows that torch takes one by one, so that its temporary memory is a share of the whole."""
LEAST_ON_GPU = 1 << 22
"""Numbers of a part on a GPU, at least: fewer are computed in less time than it takes to launch a kernel."""
_LAST_PLACE = 2.0**-7
"""Of bf16, relative to the value: two roundings may differ by so much."""


@loop
def _forward(inputs, weight, eps, outputs, inverses):  # type: ignore[no-untyped-def]
    num_rows, size = inputs.shape
    whole = size // _LANES * _LANES
    for turn in prange(_TURNS):
        lanes = np.empty(_LANES, np.float32)
        for row in range(turn * num_rows // _TURNS, (turn + 1) * num_rows // _TURNS):
            lanes[:] = np.float32(0.0)
            for start in range(0, whole, _LANES):
                for lane in range(_LANES):
                    x = wide(inputs[row, np.uint64(start + lane)])
                    lanes[lane] += x * x
            total = np.float32(0.0)
            for lane in range(_LANES):
                total += lanes[lane]
            for i in range(whole, size):
                x = wide(inputs[row, i])
                total += x * x
            inverse = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
            inverses[row] = inverse
            for i in range(size):
                unit = wide(narrow(wide(inputs[row, i]) * inverse))  # rounded here too, as models do
                outputs[row, i] = narrow(unit * wide(weight[i]))


@loop
def _backward(gradient, inputs, weight, inverses, to_inputs, to_weight):  # type: ignore[no-untyped-def]
    num_rows, size = inputs.shape
    whole = size // _LANES * _LANES
    for turn in prange(_TURNS):
        lanes = np.empty(_LANES, np.float32)
        for row in range(turn * num_rows // _TURNS, (turn + 1) * num_rows // _TURNS):
            inverse = inverses[row]
            for i in range(size):
                to_weight[turn, i] += wide(gradient[row, i]) * (wide(inputs[row, i]) * inverse)
            lanes[:] = np.float32(0.0)
            for start in range(0, whole, _LANES):
                for lane in range(_LANES):
                    at = np.uint64(start + lane)
                    lanes[lane] += wide(gradient[row, at]) * wide(weight[at]) * (wide(inputs[row, at]) * inverse)
            along = np.float32(0.0)
            for lane in range(_LANES):
                along += lanes[lane]
            for i in range(whole, size):
                along += wide(gradient[row, i]) * wide(weight[i]) * (wide(inputs[row, i]) * inverse)
            along /= np.float32(size)
            for i in range(size):
                unit = wide(inputs[row, i]) * inverse
                g = wide(gradient[row, i]) * wide(weight[i])
                to_inputs[row, i] = narrow(inverse * (g - unit * along))


def _bits(tensor: Tensor) -> Any:
    """The bit patterns of a bf16 tensor, by rows."""
    return tensor.view(torch.uint16).reshape(-1, tensor.shape[-1]).numpy()


def _bits_of_weight(weight: Tensor) -> Any:
    """Of a copy: memory that numpy has seen cannot be freed any more, and sharding frees that of parameters."""
    return weight.detach().clone().view(torch.uint16).numpy()


@torch.library.custom_op("tonnage::rms_norm", mutates_args=())
def _rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    inputs = inputs.contiguous()
    outputs, inverses = torch.empty_like(inputs), torch.empty(inputs.shape[:-1])
    _forward(_bits(inputs), _bits_of_weight(weight), np.float32(eps), _bits(outputs), inverses.view(-1).numpy())
    return outputs, inverses


@_rms_norm.register_fake
def _(inputs: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    shape = inputs.shape[:-1]
    return inputs.new_empty(inputs.shape), inputs.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("tonnage::rms_norm_backward", mutates_args=())
def _rms_norm_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, inverses: Tensor) -> tuple[Tensor, Tensor]:
    gradient, inputs = gradient.contiguous(), inputs.contiguous()
    to_inputs, to_weight = torch.empty_like(inputs), torch.zeros(_TURNS, weight.numel())
    arrays = _bits(gradient), _bits(inputs), _bits_of_weight(weight), inverses.view(-1).numpy()
    _backward(*arrays, _bits(to_inputs), to_weight.numpy())
    return to_inputs, to_weight.sum(0).to(weight.dtype)


@_rms_norm_backward.register_fake
def _(gradient: Tensor, inputs: Tensor, weight: Tensor, inverses: Tensor) -> tuple[Tensor, Tensor]:
    return inputs.new_empty(inputs.shape), weight.new_empty(weight.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        outputs: Tensor
        outputs, inverses = _rms_norm(inputs, weight, eps)
        ctx.save_for_backward(inputs, weight, inverses)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, inverses = ctx.saved_tensors
        to_inputs, to_weight = _rms_norm_backward(gradient, inputs, weight, inverses)
        return to_inputs, to_weight, None


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * inputs / sqrt(mean(inputs^2) + eps)`` over the last dimension; bf16 on the CPU.

    Computed in fp32 and rounded as models do it: once before the weight is multiplied, and once after. Gradients are
    rounded once.
    """
    output: Tensor = _RMSNorm.apply(inputs, weight, eps)  # type: ignore[no-untyped-call]
    return output


class _LeanRMSNorm(torch.autograd.Function):
    """The same in torch's operations, for 16-bit numbers."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, outputs = inputs.reshape(-1, inputs.shape[-1]), torch.empty_like(inputs, memory_format=_CONTIGUOUS)
        inverses = torch.empty(len(rows), 1, dtype=torch.float32, device=inputs.device)
        for part, output, inverse in _parts(rows, outputs.view(rows.shape), inverses):
            rows_in_fp32 = part.float()
            torch.rsqrt(rows_in_fp32.square().mean(-1, keepdim=True).add_(eps), out=inverse)
            torch.mul(weight, rows_in_fp32.mul_(inverse).to(inputs.dtype), out=output)
        ctx.save_for_backward(rows, weight, inverses)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, inverses = ctx.saved_tensors
        slopes, to_rows = gradient.reshape(rows.shape), torch.empty_like(rows)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part, slope, inverse, result in _parts(rows, slopes, inverses, to_rows):
            normed = part.float().mul_(inverse)
            if to_weight is not None:
                to_weight += (slope * normed.to(rows.dtype)).sum(0, dtype=torch.float32)
            through = (slope * weight).float()
            along = (through * normed).mean(-1, keepdim=True)
            result.copy_(through.sub_(normed.mul_(along)).mul_(inverse))
        return to_rows.view(gradient.shape), None if to_weight is None else to_weight.to(weight.dtype), None


_CONTIGUOUS = torch.contiguous_format


def _parts(rows: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    number = max(1, -(-len(rows) // _PARTS))
    if rows.device.type != "cpu":
        number = max(number, LEAST_ON_GPU // rows.shape[1])
    yield from zip(*(tensor.split(number) for tensor in (rows, *others)), strict=True)


def lean_rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``rms_norm``, for 16-bit numbers on any device, some rows at a time."""
    output: Tensor = _LeanRMSNorm.apply(inputs, weight, eps)  # type: ignore[no-untyped-call]
    return output


def use_fast_norms(model: nn.Module) -> None:
    """Let a model's norms compute with ``rms_norm`` where it applies and they are the same function."""
    if not is_on("norms"):
        return
    is_rms_norm: dict[tuple[type, float], bool] = {}
    for module in model.modules():
        eps, scales = _eps_of(module), isinstance(getattr(module, "weight", None), Tensor)  # some do not
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or not scales:
            continue
        if (kind := (type(module), eps)) not in is_rms_norm:
            is_rms_norm[kind] = _is_rms_norm(module, eps)
        if is_rms_norm[kind]:
            module.forward = MethodType(_forward_norm, module)


def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Whether a norm is ``rms_norm``, by its output for random rows of very different size. Its lean twin is asked,
    which needs no loop: those take a quarter of a second to load, which plans and GPUs have no use for."""
    weight: Any = module.weight
    if weight.dim() != 1 or len(list(module.parameters())) != 1:
        return False
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(8, weight.numel(), generator=draw) * torch.logspace(-4, 3, 8)[:, None]
    inputs = rows.to(torch.bfloat16)
    factors = (1.0 + 0.3 * torch.randn(weight.numel(), generator=draw)).to(torch.bfloat16)
    with torch.no_grad(), torch.device("cpu"):
        theirs = functional_call(module, {"weight": factors}, (inputs,))
        return theirs.dtype == torch.bfloat16 and torch.allclose(
            lean_rms_norm(inputs, factors, eps).float(), theirs.float(), rtol=_LAST_PLACE, atol=0.0
        )


def _eps_of(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _forward_norm(module: nn.Module, inputs: Tensor) -> Tensor:
    weight: Any = module.weight
    ours = (
        not isinstance(inputs, DTensor)
        and not isinstance(weight, DTensor)
        and inputs.dtype == weight.dtype
        and inputs.dtype in HALVES
        and not torch.compiler.is_compiling()  # which makes one loop of it with what is around
    )
    if not ours:
        output: Tensor = type(module).forward(module, inputs)
        return output
    by_loop = inputs.dtype == torch.bfloat16 and inputs.device.type == "cpu"
    return (rms_norm if by_loop else lean_rms_norm)(inputs, weight, _eps_of(module))
