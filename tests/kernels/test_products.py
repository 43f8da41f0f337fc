"""16-bit products through fp32: rounded once from the exact operands, forward and backward, in pieces or whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from tonnage.kernels import products
from tonnage.parallel import deferred
from tonnage.parallel.deferred import WeightGradients

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without 16-bit products; pieces of a few rows."""
    monkeypatch.setattr(products, "processor_is_slow", lambda dtype: dtype in DTYPES)
    monkeypatch.setattr(products, "ROWS", 5)
    monkeypatch.setattr(products, "COLUMNS", 7)
    monkeypatch.setattr(products, "DEPTH", 11)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_the_fp32_one_rounded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = randn(13, 30, dtype=dtype), randn(30, 17, dtype=dtype)
    want = (left.float() @ right.float()).to(dtype)
    assert products.product(left, right).equal(want)
    out = torch.zeros(20, 17, dtype=dtype)
    assert products.product(left, right, out=out[4:17]) is not None
    assert out[4:17].equal(want)
    assert not out[:4].any()
    assert products.product(right.t(), left.t()).equal(want.t())
    assert products.product(left[:, :0], right[:0]).equal(torch.zeros_like(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_and_its_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 9).to(dtype)
    products.use_fast_products(layer)
    inputs, upstream = randn(2, 5, 12, dtype=dtype).requires_grad_(), randn(2, 5, 9, dtype=dtype)
    output = layer(inputs)
    output.backward(upstream)
    rows, flat = upstream.view(10, 9).float(), inputs.detach().view(10, 12).float()
    assert layer.bias.grad is not None
    assert layer.weight.grad is not None
    assert inputs.grad is not None
    assert output.equal((flat @ layer.weight.float().t() + layer.bias.float()).to(dtype).view(2, 5, 9))
    assert layer.weight.grad.equal((rows.t() @ flat).to(dtype))
    assert inputs.grad.equal((rows @ layer.weight.float()).to(dtype).view(2, 5, 12))
    torch.testing.assert_close(layer.bias.grad, rows.sum(0).to(dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_what_a_layer_gives_may_be_added_to(dtype: torch.dtype, bias: bool) -> None:
    """By this layer, and by the one of a pipeline whose weight's gradient comes later."""
    layer = nn.Linear(12, 9, bias=bias).to(dtype)
    products.use_fast_products(layer)
    inputs = randn(2, 5, 12, dtype=dtype).requires_grad_()
    output = layer(inputs)
    wanted = output.detach() + 1.0
    output += 1.0
    assert output.equal(wanted)
    output.sum().backward()
    put_off = deferred._forward(WeightGradients([layer], lambda parameter: None), layer, inputs)
    put_off += 1.0
    assert put_off.equal(wanted)


def test_what_is_frozen_gets_no_gradient() -> None:
    inputs, weight = randn(4, 6).requires_grad_(), randn(3, 6)
    products.linear(inputs, weight, None).sum().backward()
    assert inputs.grad is not None
    assert weight.grad is None


def test_the_layers_of_gpt2() -> None:
    torch.manual_seed(0)
    layer = Conv1D(5, 6).to(torch.bfloat16)
    inputs = randn(7, 6)
    products.use_fast_products(layer)
    output = layer(inputs)
    output.sum().backward()
    assert output.equal((inputs.float() @ layer.weight.float()).bfloat16() + layer.bias)
    assert layer.weight.grad is not None
    assert layer.weight.grad.equal((inputs.float().t() @ torch.ones(7, 5)).bfloat16())


def test_a_bias_is_added_as_the_product_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bits of torch's own layer, and counted as a product."""
    monkeypatch.setattr(products, "processor_is_slow", lambda dtype: False)
    torch.manual_seed(0)
    rows, weight, bias = randn(13, 30).requires_grad_(), randn(17, 30).requires_grad_(), randn(17).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        output = products.linear(rows, weight, bias)
    assert output.equal(nn.functional.linear(rows, weight, bias))
    assert counter.get_total_flops() == 2 * 13 * 30 * 17
    turned = randn(30, 17).t().requires_grad_()
    assert products.linear(rows, turned, bias).equal(nn.functional.linear(rows, turned, bias))


def test_fp32_is_left_alone() -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(12, 9), torch.randn(3, 12)
    products.use_fast_products(layer)
    assert layer(inputs).equal(torch.addmm(layer.bias, inputs, layer.weight.t()))
    assert products.product(inputs, inputs.t()).equal(torch.mm(inputs, inputs.t()))


def test_nothing_to_multiply_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the gradient of a head in a micro-batch without supervised tokens."""
    monkeypatch.setattr(products, "goes_through_fp32", lambda tensor: False)
    result = products.product(torch.empty(0, 5, dtype=torch.bfloat16).t(), torch.empty(0, 8, dtype=torch.bfloat16))
    assert torch.equal(result, torch.zeros(5, 8, dtype=torch.bfloat16))
