"""``train_runs`` whose layers in fp8 are computed by torchao's own, in place of ours."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import train_runs
from torch import Tensor
from torchao.float8.float8_linear import Float8Linear

from tonnage.kernels.fp8 import Fp8Products


def by_torchao(inputs: Tensor, weight: Tensor, bias: Tensor | None, products: Fp8Products) -> Tensor:
    """What ``fp8_linear`` computes, by torchao's layer with the same settings and these weights."""
    settings = {"config": products.config, "linear_mm_config": products.of_products}
    layer: Any = SimpleNamespace(weight=weight, bias=bias, **settings)
    output: Tensor = Float8Linear.forward(layer, inputs)
    return output


def main(paths: list[str]) -> None:
    with patch("tonnage.model.fp8.fp8_linear", by_torchao):
        train_runs.main(paths)
