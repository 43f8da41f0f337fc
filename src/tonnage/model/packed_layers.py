"""Layers whose frozen weights rest in 4 or 8 bits, and are widened where they are multiplied.

A layer's ``weight`` is replaced by the tensors of a packed one (``kernels.quantized``), as parameters of the same
module: ``weight_codes``, ``weight_scales`` and, with scales that are packed themselves, ``weight_outer`` and
``weight_mean``. So they are divided, gathered, streamed and counted as they are, and blocks are never cut. Stacked
experts are packed in the same way (``down_proj_codes``, ...). What is loaded is the weight; it is packed as it is read.

Packed is every linear layer of the blocks and every stack of experts that is frozen, adapted or not. One that lies in
a quantised checkpoint may keep that form (``keep_stored``); then rows of it are read, and nothing is packed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.errors import user_error
from tonnage.host.quantized import Format, packed_tensors, rows_per_block
from tonnage.host.stored_forms import stored_form
from tonnage.kernels.adapted import adapted_linear
from tonnage.kernels.products import linear
from tonnage.kernels.quantized import PackedWeight, pack
from tonnage.kernels.quantized_products import linear as packed_linear
from tonnage.kernels.regions import fill_local, region_of
from tonnage.kernels.stored_forms import columns_of
from tonnage.model.dropout import LayerDropout

PARTS = ("codes", "scales", "outer", "mean")
UNDIVIDED = ("outer", "mean")
"""Those that are too small to be divided."""


@dataclass(frozen=True)
class PackedLayer:
    """A weight that is packed, or this rank's part of it."""

    owner: nn.Module
    name: str
    """Of the weight in ``owner``."""
    path: str
    """Of the weight in the model."""
    form: Format
    shape: tuple[int, ...]
    """Of this rank's part, as it lies."""
    region: tuple[slice, ...]
    """This rank's part of the whole weight."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Its tensors by the names of ``PARTS``."""
        return {part: one for part in PARTS if (one := self.owner._parameters.get(f"{self.name}_{part}")) is not None}

    def packed(self, value: Tensor | PackedWeight) -> PackedWeight:
        """This rank's part of the whole weight: of numbers, (out, in), which are packed, or as a checkpoint has it."""
        if isinstance(value, Tensor):
            return pack(value[self.region], self.form)
        form, numbers = stored_form(self.form), value.shape[-1]
        assert form is not None
        *rows, columns = (*self.region[:-2], self.region[-1], self.region[-2]) if form.turned else self.region
        codes, scales = (
            part.view(*value.shape[:-1], -1)[tuple(rows)].flatten(0, -2) for part in (value.codes, value.scales)
        )
        return PackedWeight(self.form, self.shape, *columns_of(form, codes, scales, numbers, columns))

    def fill(self, value: Tensor | PackedWeight) -> None:
        """Keep this rank's shards of the whole weight."""
        packed = self.packed(value).named()
        for part, parameter in self.parameters().items():
            fill_local(parameter, packed[part])


def keep_stored(root: nn.Module, forms: Iterable[tuple[str, Format]]) -> None:
    """Let the weights of ``root`` at some paths keep the forms of their checkpoint, where ``pack_layers`` packs."""
    modules = dict(root.named_modules())
    for path, form in forms:
        owner, _, name = path.rpartition(".")
        if owner in modules:  # a stage, or a block that was weighed alone, has not all of them
            own: Any = modules[owner]
            own.stored_forms = {**getattr(own, "stored_forms", {}), name: form}


def pack_layers(root: nn.Module, blocks: Iterable[nn.Module], quantize: Format | None) -> list[PackedLayer]:
    """Replace the frozen weights of ``blocks``, parts of ``root`` on the meta device, by packed ones without content:
    all of them with a form to ``quantize`` them to, else those that keep the form of their checkpoint.

    Raises:
        UserError: there is nothing to pack, or a part of a weight along the tensor axis cuts a block.
    """
    names = {id(module): path for path, module in root.named_modules()}
    layers: list[PackedLayer] = []
    for module in (module for block in blocks for module in block.modules()):
        own_forms: Mapping[str, Format] = module.__dict__.get("stored_forms", {})
        for name, weight in _matrices(module).items() if quantize is not None or own_forms else ():
            form = quantize or own_forms.get(name)
            if weight.requires_grad or form is None:
                continue
            path, shape = f"{names[id(module)]}.{name}", tuple(weight.shape)
            region = tuple(slice(0, size) for size in shape)
            if isinstance(weight, DTensor):
                local, region = region_of(weight.data)
                check_part(path, shape, local.shape, form)
                shape = tuple(local.shape)
            if (stored := stored_form(form)) is not None:
                shape = stored.packed_shape(shape)
            del module._parameters[name]
            for part, (dtype, size) in packed_tensors(shape, form).items():
                empty = torch.empty(size, dtype=getattr(torch, dtype), device="meta")
                module.register_parameter(f"{name}_{part}", nn.Parameter(empty, requires_grad=False))
            owner: Any = module
            owner.packed_as = {**getattr(owner, "packed_as", {}), name: (form, shape)}
            layers.append(PackedLayer(module, name, path, form, shape, region))
    if not layers and quantize is not None:
        raise user_error(
            where="adapter.quantize",
            found=f"{quantize}, and no linear layer of the model is frozen",
            needed="linear layers of the blocks, or experts, that are not trained",
            change="adapter.quantize=none",
        )
    return layers


def packable_names(root: nn.Module, blocks: Iterable[nn.Module]) -> frozenset[str]:
    """Names of the parameters of ``blocks``, parts of ``root``, that ``pack_layers`` packs where they are frozen."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    modules = (module for block in blocks for module in block.modules())
    return frozenset(names[id(module._parameters[name])] for module in modules for name in _matrices(module))


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what ``nn.Linear`` does. A class made of it may (Falcon's) or may not (routers, layers
    in groups): it is tried on a layer of two inputs and three outputs."""
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    small, inputs = copy.copy(module), torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    weight, bias = torch.arange(6.0).view(3, 2), torch.tensor([0.5, -1.0, 4.0])
    small._parameters = {"weight": nn.Parameter(weight), "bias": None if module.bias is None else nn.Parameter(bias)}
    small.in_features, small.out_features = 2, 3
    try:
        with torch.no_grad():
            output = type(module).forward(small, inputs)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    return isinstance(output, Tensor) and torch.equal(
        output, F.linear(inputs, weight, None if module.bias is None else bias)
    )


def _matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    weight = module._parameters.get("weight") if is_linear(module) else None
    return {"weight": weight} if weight is not None else stacks_of(module)


def stacks_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The stacked matrices of a module of experts that ``experts.compute_experts`` computes, as transformers' interface
    for experts names them; none of any other module."""
    down = module._parameters.get("down_proj")
    if down is None or down.dim() != 3 or not (hasattr(module, "is_transposed") and hasattr(module, "has_gate")):
        return {}
    names = ("gate_up_proj", "up_proj", "down_proj")
    return {name: one for name in names if (one := module._parameters.get(name)) is not None}


def check_part(path: str, shape: Sequence[int], part: Sequence[int], form: Format) -> None:
    """Refuse a part whose blocks are not the whole weight's.

    Raises:
        UserError: says which.
    """
    if (stored := stored_form(form)) is not None:
        columns, own = stored.packed_shape(shape)[-1], stored.packed_shape(part)[-1]
        if stored.cuts(columns, own):
            raise user_error(
                where="adapter.quantize, parallel.tensor",
                found=f"{path} in rows of {columns:,} numbers, of which {stored.group or columns:,} share a scale, and "
                f"parts of {own:,}",
                needed="parts of rows that cut no group",
                change="adapter.quantize=widened, or parallel.tensor=1",
            )
        return
    rows_only = part[1:] == shape[1:]
    same = form != "nf4-double" and (
        rows_only and part[0] % rows_per_block(shape, form) == 0 if rows_only else form == "nf4" and part[-1] % 64 == 0
    )
    if not same:
        raise user_error(
            where="adapter.quantize, parallel.tensor",
            found=f"{form}, and {path} of {tuple(shape)} in parts of {tuple(part)}",
            needed="nf4, and parts of which each row is a multiple of 64 numbers: so that a part has the blocks of "
            "the whole",
            change="adapter.quantize=nf4 with a smaller parallel.tensor, or parallel.tensor=1",
        )


def packed_weight(module: Any, name: str) -> PackedWeight | None:
    """The packed form of a module's weight; None if it is there as it is."""
    packed_as: Mapping[str, tuple[Format, tuple[int, ...]]] = module.__dict__.get("packed_as", {})
    if name not in packed_as:
        return None
    parts = [module._parameters.get(f"{name}_{part}") for part in PARTS]
    return PackedWeight(*packed_as[name], *parts)


def compute(
    module: Any,
    inputs: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    down: Tensor | None = None,
    up: Tensor | None = None,
    first_channel: int = 0,
) -> Tensor:
    """The output of a linear layer for ``inputs``: with the given weight or, if that is None, its packed one, and with
    an addition if there is one. ``inputs`` begin with the ``first_channel`` of the layer."""
    frozen: Tensor | PackedWeight | None = packed_weight(module, "weight") if weight is None else weight
    assert frozen is not None
    if down is not None and up is not None:
        dropout: LayerDropout | None = module.__dict__.get("lora_dropout")
        mask = None if dropout is None else dropout.mask(inputs, first_channel)
        return adapted_linear(inputs, frozen, bias, down, up, module.lora_factor, mask)
    if isinstance(frozen, PackedWeight):
        return packed_linear(inputs, frozen, bias)
    return linear(inputs, frozen, bias)


def forward_linear(module: Any, inputs: Tensor) -> Tensor:
    """Forward pass of a linear layer whose parameters are whole on this rank."""
    own = module._parameters
    return compute(module, inputs, own.get("weight"), own.get("bias"), own.get("lora_A"), own.get("lora_B"))
