"""Which layers of a model are computed in fp8: the linear layers of its blocks, of sizes that matrix units take.

Embedding and head stay in 16 bits, as torchao's own examples leave them, and so do routers, whose choice a rounded
number would change, and what is not a linear layer, as stacks of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tonnage.errors import user_error
from tonnage.kernels.fp8 import MULTIPLE, Fp8, Fp8Products, dropped, fp8_linear
from tonnage.model.adapters import not_adapted
from tonnage.model.anatomy import Anatomy
from tonnage.model.dropout import LayerDropout
from tonnage.model.packed_layers import is_linear, stacks_of

ROUTERS = frozenset({"gate", "router"})
"""Last names of layers that choose experts."""


@dataclass(frozen=True)
class InFp8:
    """What of the blocks is computed in fp8."""

    layers: int
    others: int
    """Other matrices of the blocks that are multiplied, each stack of experts as one."""

    def __str__(self) -> str:
        beside = (
            f"embedding, head and {self.others:,} other matrices of the blocks" if self.others else "embedding, head"
        )
        return f"products of {self.layers:,} linear layers in fp8 (torchao's rowwise scales); {beside} in bf16"


def compute_in_fp8(model: nn.Module, anatomy: Anatomy, precision: Fp8) -> InFp8:
    """Let the linear layers of the blocks of ``model`` multiply in fp8. What an adapter adds is there already, and
    stays in 16 bits.

    Raises:
        UserError: no torchao, or no layer that can.
    """
    products = Fp8Products(precision)
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    left, layers, others = {*not_adapted(model), *ROUTERS}, list[nn.Linear](), list[nn.Module]()
    for module in (module for block in anatomy.blocks for module in block.modules()):
        if is_linear(module):
            assert isinstance(module, nn.Linear)
            fits = module.in_features % MULTIPLE == 0 == module.out_features % MULTIPLE
            (layers if fits and names[id(module)] not in left else others).append(module)
        elif isinstance(module, (nn.Linear, Conv1D)) or stacks_of(module):
            others.append(module)
    if not layers:
        raise user_error(
            where="precision",
            found="fp8, and no linear layer of the blocks whose inputs and outputs are multiples of 16",
            needed="layers that matrix units can multiply in fp8",
            change="precision=bf16",
        )
    for layer in layers:
        owner: Any = layer
        owner.fp8_products = products
        owner.forward = MethodType(_forward, owner)
    return InFp8(len(layers), len(others))


def _forward(module: Any, inputs: Tensor) -> Tensor:
    """Forward pass of a linear layer whose parameters are whole on this rank."""
    own = module._parameters
    output = fp8_linear(inputs, own["weight"], own.get("bias"), module.fp8_products)
    if (down := own.get("lora_A")) is None:
        return output
    factor, dropout = module.lora_factor, module.__dict__.get("lora_dropout")
    if isinstance(dropout, LayerDropout) and (mask := dropout.mask(inputs)) is not None:
        inputs, factor = dropped(inputs, mask), factor / mask.kept_share
    return torch.add(output, F.linear(F.linear(inputs, down), own["lora_B"]), alpha=factor)
