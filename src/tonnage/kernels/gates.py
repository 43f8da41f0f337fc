"""The gate of an MLP, ``silu(gate) * up``, of which only ``gate`` and ``up`` are kept.

torch keeps ``silu(gate)`` besides, and has six tensors of that size at once in the backward pass: gate, its silu, up,
the gradient that comes, and two that go. Here the silu is computed again, piece by piece, and the gradients that go lie
in the memory of ``gate`` and ``up``, which nobody else looks at: they are what two linear layers have just put out, and
those keep what came in. So there are three. Values and gradients are torch's own, to the bit.

Of bf16 on a CPU a loop computes all of it in one visit of each number: 6 bytes of it are moved forward and 10 backward,
where torch moves 10 and 36. All is fp32 inside, and rounded once.

A module is taken if its class's forward is, instruction by instruction, that of transformers' Llama.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import prange
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

from tonnage.kernels.bits import narrow, sigmoid, wide
from tonnage.kernels.loops import inner, loop
from tonnage.kernels.norms import LEAST_ON_GPU
from tonnage.kernels.switches import is_on

PARTS, ALIGNED = 16, 64
"""Parts that the backward pass takes one by one, so that its temporary memory is a share of the whole; and the size of
which a part is a multiple, as processors compute what fills no vector in another way."""
_TURNS = 64
"""Parts that the loop gives to its threads."""


@inner(fastmath={"contract"})
def _outputs_of(gates, ups, outputs):  # type: ignore[no-untyped-def]
    for i in range(len(gates)):
        x = wide(gates[i])
        outputs[i] = narrow(x * sigmoid(x) * wide(ups[i]))


@inner(fastmath={"contract"})
def _gradients_of(slopes, gates, ups):  # type: ignore[no-untyped-def]
    for i in range(len(gates)):
        x, slope = wide(gates[i]), wide(slopes[i])
        part = sigmoid(x)
        of_silu = slope * wide(ups[i])
        ups[i] = narrow(slope * (x * part))
        gates[i] = narrow(of_silu * part * (np.float32(1.0) + x * (np.float32(1.0) - part)))


@loop
def _forward(gate, up, output):  # type: ignore[no-untyped-def]
    for turn in prange(_TURNS):
        start, end = turn * len(gate) // _TURNS, (turn + 1) * len(gate) // _TURNS
        _outputs_of(gate[start:end], up[start:end], output[start:end])


@loop
def _backward(gradient, gate, up):  # type: ignore[no-untyped-def]
    for turn in prange(_TURNS):
        start, end = turn * len(gate) // _TURNS, (turn + 1) * len(gate) // _TURNS
        _gradients_of(gradient[start:end], gate[start:end], up[start:end])


def _bits(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint16).numpy()


@torch.library.custom_op("tonnage::gate", mutates_args=())
def _gate(gate: Tensor, up: Tensor) -> Tensor:
    output = torch.empty_like(gate)
    _forward(_bits(gate), _bits(up), _bits(output))
    return output


@_gate.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("tonnage::gate_backward", mutates_args=("gate", "up"))
def _gate_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> None:
    _backward(_bits(gradient), _bits(gate), _bits(up))


@_gate_backward.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor) -> None:
    return None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        output = _gate(gate, up) if _loop_takes(gate) else F.silu(gate).mul_(up)
        ctx.save_for_backward(gate, up)
        ctx.is_done = False
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if ctx.is_done:
            raise RuntimeError("a backward pass a second time: its gradients lie where gate and up were")
        ctx.is_done = True
        gate, up = (tensor.detach() for tensor in ctx.saved_tensors)
        if _loop_takes(gate):
            _gate_backward(gradient.contiguous(), gate, up)
            return gate, up
        for slope, gate_part, up_part in _parts(gradient.contiguous(), gate, up):
            of_silu = slope * up_part
            torch.ops.aten.silu.out(gate_part, out=up_part).mul_(slope)
            torch.ops.aten.silu_backward.grad_input(of_silu, gate_part, grad_input=gate_part)
        return gate, up


def _loop_takes(gate: Tensor) -> bool:
    return gate.device.type == "cpu" and gate.dtype == torch.bfloat16 and is_on("gates")


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
