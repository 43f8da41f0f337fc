"""Layers in fp8 against torchao's own."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from tonnage.errors import UserError
from tonnage.kernels.dropout import Mask, kept, salt_of, threshold_of
from tonnage.kernels.fp8 import Fp8Products, check_card, dropped, fp8_linear


def layer_and_inputs(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(128, 48).to(dtype)
    inputs = (torch.randn(3, 7, 128) * torch.logspace(-3, 1, 21).view(3, 7, 1)).to(dtype)
    return layer, inputs, torch.randn(3, 7, 48).to(dtype)


def by_torchao(layer: nn.Linear) -> Any:
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    return convert_to_float8_training(nn.Sequential(layer), config=config)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_have_the_bits_of_torchaos_layer(dtype: torch.dtype) -> None:
    layer, inputs, slopes = layer_and_inputs(dtype)
    results = []
    for ours in (True, False):
        layer.zero_grad()
        x = inputs.clone().requires_grad_()
        products = Fp8Products("fp8-emulated")
        output = fp8_linear(x, layer.weight, layer.bias, products) if ours else by_torchao(layer)(x)
        output.backward(slopes)
        results.append([output, x.grad, layer.weight.grad, layer.bias.grad])
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
    exact = F.linear(inputs, layer.weight, layer.bias)
    assert float((results[0][0].detach() - exact.detach()).norm()) > 1e-2 * float(exact.detach().norm())


def test_a_token_depends_on_no_other() -> None:
    layer, inputs, _ = layer_and_inputs(torch.bfloat16)
    products = Fp8Products("fp8-emulated")
    together = fp8_linear(inputs, layer.weight, layer.bias, products)
    inputs[0, 1:] *= 1000
    alone = fp8_linear(inputs, layer.weight, layer.bias, products)
    assert torch.equal(together[0, 0], alone[0, 0])
    assert torch.equal(together[1:], alone[1:])


@pytest.mark.parametrize(("trains", "kept_ones"), [(True, "inputs and weight"), (False, "weight")])
def test_what_is_kept(trains: bool, kept_ones: str) -> None:
    """torchao's layer keeps its inputs whether or not its weight has a gradient."""
    layer, inputs, slopes = layer_and_inputs(torch.bfloat16)
    layer.requires_grad_(trains)
    inputs.requires_grad_()
    saved = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = fp8_linear(inputs, layer.weight, None, Fp8Products("fp8-emulated"))
    wanted = {"inputs": inputs.data_ptr(), "weight": layer.weight.data_ptr()}
    assert {one.data_ptr() for one in saved} == {wanted[name] for name in kept_ones.split(" and ")}
    output.backward(slopes)
    assert (layer.weight.grad is not None) == trains
    assert inputs.grad is not None


def test_dropped_inputs_have_the_gradient_of_a_mask() -> None:
    inputs = torch.randn(21, 128, requires_grad=True)
    mask = Mask(torch.arange(21) * 7919, salt_of("layer"), 0, threshold_of(0.3))
    output, slopes = dropped(inputs, mask), torch.randn(21, 128)
    output.backward(slopes)
    keeps = kept(mask, 128)
    assert torch.equal(output, inputs * keeps)
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, slopes * keeps)


@pytest.mark.parametrize(
    ("capability", "refused"), [((8, 6), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)]
)
def test_a_card_must_have_it(capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 3090")
    message = r"fp8 on NVIDIA GeForce RTX 3090, of compute capability 8\.6"
    with pytest.raises(UserError, match=message) if refused else nullcontext():
        check_card("fp8", card)
    check_card("fp8-emulated", card)


@pytest.mark.parametrize(("torchs", "refused"), [("2.11.0+cu130", True), ("2.12.1", False)])
def test_the_first_cards_need_a_product_that_waits(torchs: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(torch, "__version__", torchs)
    with pytest.raises(UserError, match=r"NVIDIA L4.*8\.9, and torch 2\.11") if refused else nullcontext():
        check_card("fp8", torch.device("cuda", 0))


def test_a_processor_emulates_it_where_that_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"(?s)fp8 on a CPU.*precision=fp8-emulated"):
        check_card("fp8", torch.device("cpu"))
    check_card("fp8-emulated", torch.device("cpu"))
