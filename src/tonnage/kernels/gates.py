"""The gate of an MLP, ``silu(gate) * up``, of which only ``gate`` and ``up`` are kept.

torch keeps ``silu(gate)`` besides, and has six tensors of that size at once in the backward pass: gate, its silu, up,
the gradient that comes, and two that go. Here the silu is computed again, piece by piece, and the gradients that go lie
in the memory of ``gate`` and ``up``, which nobody else looks at: they are what two linear layers have just put out, and
those keep what came in. So there are three. Values and gradients are torch's own, to the bit.

A module is taken if its class's forward is, instruction by instruction, that of transformers' Llama.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

from tonnage.kernels.norms import LEAST_ON_GPU

PARTS, ALIGNED = 16, 64
"""Parts that the backward pass takes one by one, so that its temporary memory is a share of the whole; and the size of
which a part is a multiple, as processors compute what fills no vector in another way."""


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        output = F.silu(gate).mul_(up)
        ctx.save_for_backward(gate, up)
        ctx.is_done = False
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if ctx.is_done:
            raise RuntimeError("a backward pass a second time: its gradients lie where gate and up were")
        ctx.is_done = True
        gate, up = (tensor.detach() for tensor in ctx.saved_tensors)
        for slope, gate_part, up_part in _parts(gradient.contiguous(), gate, up):
            of_silu = slope * up_part
            torch.ops.aten.silu.out(gate_part, out=up_part).mul_(slope)
            torch.ops.aten.silu_backward.grad_input(of_silu, gate_part, grad_input=gate_part)
        return gate, up


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = max(1, -(-tensors[0].numel() // (PARTS * ALIGNED))) * ALIGNED
    if tensors[0].device.type != "cpu":
        size = max(size, 2 * LEAST_ON_GPU)
    yield from zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, both of one shape and type. The backward pass overwrites the memory of both: nobody
    else may need them."""
    plain = torch.compiler.is_compiling() or isinstance(gate, DTensor) or isinstance(up, DTensor)
    if plain or not (gate.is_contiguous() and up.is_contiguous() and gate.dtype == up.dtype):
        return F.silu(gate) * up
    output: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return output


def use_lean_gates(model: nn.Module) -> None:
    """Let the MLPs of a model compute with ``gated`` where that is what they compute."""
    llama_code = LlamaMLP.forward.__code__
    for module in model.modules():
        code = getattr(type(module).forward, "__code__", None)
        same = code is not None and (code.co_code, code.co_names) == (llama_code.co_code, llama_code.co_names)
        if same and isinstance(getattr(module, "act_fn", None), type(ACT2FN["silu"])):
            module.forward = MethodType(_forward_gated, module)


def _forward_gated(module: Any, x: Tensor) -> Tensor:
    output: Tensor = module.down_proj(gated(module.gate_proj(x), module.up_proj(x)))
    return output
