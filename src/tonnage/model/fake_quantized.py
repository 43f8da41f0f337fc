"""Which layers of a model are fake-quantised: the linear layers of its blocks.

They are those that transformers quantises with torchao: embedding and head stay as they are (``TorchAoConfig``). What
torchao does not quantise, as stacks of experts, would be left in 16 bits, and is refused.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tonnage.errors import user_error
from tonnage.kernels.fake_quantized import Addition, FakeQuantizers, Scheme, fake_quantized_linear
from tonnage.model.adapters import not_adapted
from tonnage.model.anatomy import Anatomy
from tonnage.model.dropout import LayerDropout
from tonnage.model.packed_layers import forward_linear, is_linear, stacks_of

FITTING = (256, 128, 64, 32)
"""Sizes of groups that a config may name."""


def fake_quantize(model: nn.Module, anatomy: Anatomy, scheme: Scheme) -> FakeQuantizers:
    """Let the linear layers of the blocks of ``model`` quantise as they compute. What an adapter adds is there already.
    Returns the quantisers, by which it can be switched off.

    Raises:
        UserError: a layer that torchao does not quantise, or whose rows are no whole number of groups.
    """
    quantizers = FakeQuantizers(scheme)
    layers = quantizable(model, anatomy)
    _check_groups(layers, scheme)
    for layer in layers.values():
        owner: Any = layer
        owner.fake_quantizers = quantizers
        owner.forward = MethodType(_forward, owner)
    return quantizers


def quantizable(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Linear]:
    """The linear layers of the blocks, by their names in ``model``.

    Raises:
        UserError: there are none, or the blocks have other matrices.
    """
    names = {id(module): name for name, module in model.named_modules()}
    layers, others = dict[str, nn.Linear](), list[str]()
    unseen = not_adapted(model)  # whose weights are read where their layer is not called
    for module in (module for block in anatomy.blocks for module in block.modules()):
        name = names[id(module)]
        if type(module) is Conv1D or stacks_of(module):
            others.append(name)
        elif isinstance(module, nn.Linear):
            if is_linear(module) and name.rpartition(".")[2] not in unseen:
                layers[name] = module
            else:
                others.append(name)
    if others or not layers:
        raise user_error(
            where="quantize_aware",
            found=f"layers that torchao does not quantise as a linear layer: {', '.join(others[:4])}"
            if others
            else "no linear layer in the model's blocks",
            needed="a model whose blocks' matrices are linear layers, as in Llama or Qwen 3",
            change="quantize_aware=none",
        )
    return layers


def _check_groups(layers: dict[str, nn.Linear], scheme: Scheme) -> None:
    size = scheme.group_size
    wrong = [(name, layer.in_features) for name, layer in layers.items() if size and layer.in_features % size]
    if not wrong:
        return
    fitting = [one for one in FITTING if all(layer.in_features % one == 0 for layer in layers.values())]
    adjustable = fitting and scheme.name in ("int4", "int8-int4")
    raise user_error(
        where="quantize_aware.group_size",
        found=f"groups of {size}, and {wrong[0][0]} has rows of {wrong[0][1]}",
        needed="rows that are a whole number of groups, in every linear layer of the blocks",
        change=f"quantize_aware.group_size={fitting[0]}" if adjustable else "quantize_aware=int8, whose group is a row",
    )


def _forward(module: Any, inputs: Tensor) -> Tensor:
    """Forward pass of a linear layer whose parameters are whole on this rank."""
    quantizers: FakeQuantizers = module.fake_quantizers
    if not quantizers.enabled:
        return forward_linear(module, inputs)
    own, addition = module._parameters, None
    if (down := own.get("lora_A")) is not None:
        dropout: LayerDropout | None = module.__dict__.get("lora_dropout")
        mask = None if dropout is None else dropout.mask(inputs)
        addition = Addition(down, own["lora_B"], module.lora_factor, mask)
    return fake_quantized_linear(inputs, own["weight"], own.get("bias"), quantizers, addition)
