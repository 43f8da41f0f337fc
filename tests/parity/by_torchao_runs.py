"""``train_runs`` whose layers in fp8, or that are fake-quantised, are computed by torchao's own, in place of ours."""

from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import train_runs
from torch import Tensor, nn
from torch.func import functional_call
from torchao.float8.float8_linear import Float8Linear
from torchao.quantization import quantize_
from torchao.quantization.qat import QATConfig

from tonnage.kernels.fake_quantized import FakeQuantizers, Scheme
from tonnage.kernels.fp8 import Fp8Products


def in_fp8(inputs: Tensor, weight: Tensor, bias: Tensor | None, products: Fp8Products) -> Tensor:
    """What ``fp8_linear`` computes, by torchao's layer with the same settings and these weights."""
    settings = {"config": products.config, "linear_mm_config": products.of_products}
    layer: Any = SimpleNamespace(weight=weight, bias=bias, **settings)
    output: Tensor = Float8Linear.forward(layer, inputs)
    return output


def fake_quantized(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, quantizers: FakeQuantizers, addition: None
) -> Tensor:
    """What ``fake_quantized_linear`` computes where nothing is added, by the layer that torchao prepares."""
    assert addition is None
    layer = prepared(quantizers.scheme, *weight.shape, bias is not None)
    own = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    output: Tensor = functional_call(layer, own, (inputs,))
    return output


@cache
def prepared(scheme: Scheme, outputs: int, inputs: int, has_bias: bool) -> nn.Module:
    holder = nn.Sequential(nn.Linear(inputs, outputs, bias=has_bias))
    quantize_(holder, QATConfig(scheme.for_torchao(), step="prepare"))
    return holder[0]


def widened_product(a: Any, b: Any, _: torch._ops.OpOverload, bias: Tensor | None = None) -> Tensor:
    """torchao's product of two matrices in NVFP4, which it leaves to a card, of the same numbers."""
    assert bias is None
    return torch.mm(a.dequantize(), b.dequantize())


def main(paths: list[str]) -> None:
    with (
        patch("tonnage.model.fp8.fp8_linear", in_fp8),
        patch("tonnage.model.fake_quantized.fake_quantized_linear", fake_quantized),
        patch("torchao.prototype.qat.nvfp4._addmm_nvfp4_dispatch", widened_product),
    ):
        train_runs.main(paths)
