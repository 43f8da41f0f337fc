"""A linear layer whose three products are computed in fp8 (``precision: fp8``): torchao's numbers and settings.

What is rounded, to which type and with which scales, is torchao's ``rowwise`` recipe: a scale for each row of an
operand, along what is summed up, and a power of two. So what a token becomes depends on that token alone, not on the
documents that share its row or its micro-batch, as it would with one scale for a whole tensor (``tensorwise``). Only
the gradient of a weight, a sum over tokens, has scales that all tokens of a micro-batch share.

    rows (tokens, in) ─── fp8, a scale a token ───┐
    weight (out, in) ──── fp8, a scale an output ─┴─► product in fp8, summed up in fp32, rounded to 16 bits

Input and weight are kept for the backward pass in 16 bits, as without fp8, and rounded again along the other side
there. Unlike torchao's layer this one keeps no input, and computes no gradient, of a weight that is not trained.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tonnage.errors import user_error
from tonnage.kernels.dropout import Mask, drop_
from tonnage.kernels.fake_quantized import check_torchao
from tonnage.kernels.sums import handed_over

Fp8 = Literal["fp8", "fp8-emulated"]
RECIPE = "rowwise"
MULTIPLE = 16
"""Of which inputs and outputs of a layer are numbers: matrix units take no others."""
OLDEST = (8, 9)
"""Compute capability of the first cards with products in fp8."""
FOR_OLDEST = (2, 12)
"""Version of torch that these cards need."""


def check_card(precision: Fp8, device: torch.device) -> None:
    """Refuse a device without products in fp8, unless they are emulated. Raises ``UserError``."""
    if precision == "fp8-emulated":
        return
    observed = "a CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        observed = f"{torch.cuda.get_device_name(device)}, of compute capability {capability[0]}.{capability[1]}"
        if capability >= OLDEST and torch.version.hip is None:
            if capability > OLDEST or _version(torch.__version__) >= FOR_OLDEST:
                return
            # Before, the product that it has did not wait for the stream it was called on (pytorch#177651).
            needed = "torch {}.{} or newer on such a card".format(*FOR_OLDEST)
            raise user_error(f"fp8 on {observed}, and torch {torch.__version__}", needed, "precision=bf16", "precision")
    raise user_error(
        where="precision",
        found=f"fp8 on {observed}",
        needed="a card of NVIDIA's of compute capability {}.{} or newer, whose matrix units have fp8".format(*OLDEST),
        change="precision=bf16; for a test, precision=fp8-emulated has the same numbers by slower products in fp32",
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


class Fp8Products:
    """torchao's settings, which the layers of a model share."""

    def __init__(self, precision: Fp8) -> None:
        check_torchao("precision", "precision=bf16")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(RECIPE)
        # Tokens are summed up in the gradient of a weight, and are not always a multiple of 16.
        recipe = replace(recipe, pad_inner_dim=True, emulate=precision == "fp8-emulated")
        holder = nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"))
        layer: Any = convert_to_float8_training(holder, config=recipe)[0]
        self.config, self.of_products = layer.config, layer.linear_mm_config


def fp8_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, products: Fp8Products) -> Tensor:
    """``F.linear`` by products in fp8, in the type of ``inputs``, (..., in). The weight is (out, in)."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    settings = products.config, products.of_products  # of torchao's classes, which Dynamo can put into a graph
    output: Tensor = _Product.apply(rows, weight, *settings)  # type: ignore[no-untyped-call]
    output = output.view(*inputs.shape[:-1], len(weight))
    return output if bias is None else output + bias


@torch.compiler.allow_in_graph
class _Product(torch.autograd.Function):
    """``rows @ weight'``. Operands are tensors of torchao's own class, whose product is that of fp8."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, config: Any, of_products: Any) -> Tensor:
        of_rows, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_weight else None, weight if of_rows or of_weight else None)
        ctx.cast = partial(_cast, config, of_products)
        return torch.mm(ctx.cast(rows, "input", -1), ctx.cast(weight.t(), "weight", 0))

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        cast, of_rows, of_weight = ctx.cast, None, None
        if ctx.needs_input_grad[0]:
            turned = cast(weight.t(), "weight_for_grad_input", -1)
            of_rows = torch.mm(cast(slopes, "grad_output", -1), turned.t())
        if ctx.needs_input_grad[1]:
            turned = cast(slopes, "grad_output_for_grad_weight", 0)
            of_weight = torch.mm(turned.t(), cast(rows, "input_for_grad_weight", 0))
            of_weight = handed_over(weight, of_weight)
        return of_rows, of_weight, None, None


def _cast(config: Any, of_products: Any, numbers: Tensor, role: str, dim: int) -> Any:
    """Numbers in fp8 with scales along ``dim``; their ``role`` is named as in torchao's configuration."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    own = getattr(config, f"cast_config_{role}")
    return hp_tensor_to_float8_dynamic(
        numbers,
        own.target_dtype,
        of_products,
        gemm_input_role=GemmInputRole[role.partition("_for_")[0].upper()],
        scaling_granularity=own.scaling_granularity,
        axiswise_dim=dim,
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def dropped(inputs: Tensor, mask: Mask) -> Tensor:
    """Inputs, (..., in), of which the mask drops some; what is left stays as it is."""
    rows: Tensor = _Dropped.apply(inputs.reshape(-1, inputs.shape[-1]), *mask)  # type: ignore[no-untyped-call]
    return rows.view(inputs.shape)


class _Dropped(torch.autograd.Function):
    """The rows of ``dropped``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, keys: Tensor, salt: Tensor, first: int, threshold: int) -> Tensor:
        ctx.save_for_backward(keys, salt)
        ctx.drops = (first, threshold)
        return drop_(rows.clone(), Mask(keys, salt, first, threshold))

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        keys, salt = ctx.saved_tensors
        return drop_(slopes.clone(memory_format=torch.contiguous_format), Mask(keys, salt, *ctx.drops)), *[None] * 4
