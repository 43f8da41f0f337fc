"""Mixtures of experts: how their experts compute.

transformers keeps the experts of a layer as stacked parameters, (experts, out, in), and lets a function from outside
compute with them (its ``ExpertsInterface``). Ours puts the rows of each expert side by side, multiplies group by group
(``kernels.grouped``), and adds up in the order of the tokens, never by scattering: the same input gives the same bits.
Its shapes depend on the numbers of tokens and of experts a token has, not on which experts these are, so it is weighed
on tensors without content as it is.

On CUDA transformers' own grouped products are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from tonnage.host.stored_forms import is_turned
from tonnage.kernels.grouped import grouped_product
from tonnage.kernels.quantized_products import grouped_product as packed_product
from tonnage.model.packed_layers import packed_weight

NAME = "tonnage_grouped"
IN_TILES = "products_in_tiles"
"""Attribute under which a module of experts has its products with stacked matrices that come in tiles, by name."""


def register() -> str:
    """Make ``compute_experts`` known to transformers; returns the name to build a model with."""
    # Compiled blocks call it as it is: which rows an expert has differs from batch to batch.
    ExpertsInterface.register(NAME, torch.compiler.disable(compute_experts))
    return NAME


def compute_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of what each token's experts make of it.

    Shapes: ``hidden_states`` (tokens, hidden); ``top_k_index`` (tokens, k), int64, in which the number of experts
    stands for none; ``top_k_weights`` (tokens, k). Returns (tokens, hidden). ``module`` has the experts, as
    transformers describes them: ``has_gate``, ``has_bias``, ``is_transposed``, ``has_post_expert_norm``.
    """
    adapted = any(name.endswith("lora_factor") for name in vars(module))
    adapted = adapted or hasattr(module, "packed_as") or hasattr(module, IN_TILES)
    if hidden_states.device.type not in ("cpu", "meta") and not adapted:
        output: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
        return output
    tokens, k = top_k_index.shape
    packed = packed_weight(module, "down_proj")
    num_experts = len(module.down_proj) if packed is None else packed.shape[0]
    owners, order = top_k_index.reshape(-1).sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(tokens * k, device=order.device))
    ends = torch.searchsorted(owners, torch.arange(num_experts, device=owners.device), right=True)

    rows: Tensor = _Spread.apply(hidden_states, order, places, k)  # type: ignore[no-untyped-call]
    rows = _multiplied(module, "gate_up_proj" if module.has_gate else "up_proj", rows, ends)
    if module.has_bias:
        rows = rows + _of_owners(module.gate_up_proj_bias if module.has_gate else module.up_proj_bias, owners)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = _multiplied(module, "down_proj", rows, ends)
    if module.has_bias:
        rows = rows + _of_owners(module.down_proj_bias, owners)
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 knows none
        rows = module.post_expert_norm(rows)
    rows = _Reordered.apply(rows, places, order)  # type: ignore[no-untyped-call]
    weighted = rows.view(tokens, k, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden_states.dtype)


def _multiplied(module: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    """Rows of each expert times its matrix, and through its low-rank addition if there is one (``adapters``)."""
    packed, in_tiles = packed_weight(module, name), getattr(module, IN_TILES, {})
    if name in in_tiles:
        output: Tensor = in_tiles[name](rows, ends, turned=module.is_transposed)
    elif packed is None:
        output = grouped_product(rows, getattr(module, name), ends, turned=module.is_transposed)
    else:
        lies_turned = module.is_transposed != is_turned(packed.form)
        output = packed_product(rows, packed, ends, turned=lies_turned)
    down, up = getattr(module, f"{name}_lora_A", None), getattr(module, f"{name}_lora_B", None)
    if down is None or up is None:
        return output
    low = grouped_product(rows, down, ends)
    return output.add(grouped_product(low, up, ends), alpha=float(getattr(module, f"{name}_lora_factor")))


def _of_owners(biases: Tensor, owners: Tensor) -> Tensor:
    """Each row's expert's bias, (rows, out), whose gradients are summed in fp32."""
    return biases.float().index_select(0, owners.clamp(max=len(biases) - 1)).to(biases.dtype)


class _Spread(torch.autograd.Function):
    """Each token's row ``k`` times, in the order of the experts: ``hidden[order // k]``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.k = k
        return hidden.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        rows = gradient.index_select(0, places)
        return rows.view(-1, ctx.k, rows.shape[-1]).sum(1), None, None, None


class _Reordered(torch.autograd.Function):
    """``rows[there]``, where ``back`` is the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None
