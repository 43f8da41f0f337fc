"""A layer and its addition as one operation: what two of torch's compute, with its weight as it is and packed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from golden_quantized import bell
from tonnage.host.quantized import Format
from tonnage.kernels import products
from tonnage.kernels.adapted import adapted_linear
from tonnage.kernels.dropout import Mask, salt_of, threshold_of
from tonnage.kernels.quantized import pack, unpack

FORMS: tuple[Format | None, ...] = (None, "nf4", "nf4-double", "int8")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Sums are rounded where the addition begins and where it ends."""


def layer(dtype: torch.dtype) -> list[Tensor]:
    """Weight, bias and both matrices of a layer of 64 numbers that gives 96."""
    torch.manual_seed(0)
    return [bell((96, 64), 2).to(dtype), *(torch.randn(size).to(dtype) for size in ((96,), (4, 64), (96, 4)))]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("form", FORMS)
def test_it_has_the_gradients_of_both_layers(
    form: Format | None, dtype: torch.dtype, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors that have 16-bit products and on those that have not; of inputs that need none, too."""
    monkeypatch.setattr(products, "processor_is_slow", lambda kind: slow and kind != torch.float32)
    weight, bias, down, up = layer(dtype)
    packed = weight if form is None else pack(weight, form)
    inputs, gradient = torch.randn(3, 7, 64).to(dtype), torch.randn(3, 7, 96).to(dtype)
    x, a, b = (one.clone().requires_grad_() for one in (inputs, down, up))
    output = adapted_linear(x, packed, bias, a, b, 0.5)
    output.backward(gradient)
    wide = weight if form is None else unpack(pack(weight, form), dtype)
    exact = [one.double().requires_grad_() for one in (inputs, down, up)]
    low = F.linear(exact[0], exact[1])
    wanted = F.linear(exact[0], wide.double(), bias.double()) + 0.5 * F.linear(low, exact[2])
    wanted.backward(gradient.double())
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(output, wanted)]
    pairs += [(ours.grad, theirs.grad) for ours, theirs in zip((x, a, b), exact, strict=True)]
    for found, expected in pairs:
        assert found is not None
        assert expected is not None
        assert found.dtype == dtype
        found, expected = found.detach().double(), expected.detach()
        assert float((found - expected).norm()) < TOLERANCES[dtype] * float(expected.norm())
    was = a.grad, b.grad
    a.grad = b.grad = None
    adapted_linear(inputs, packed, bias, a, b, 0.5).backward(gradient)
    for one, before in zip((a, b), was, strict=True):
        assert one.grad is not None
        assert before is not None
        assert one.grad.equal(before)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_what_a_layer_gives_may_be_added_to(dims: int) -> None:
    """Gemma 3n adds its hidden states to a product in place."""
    weight, bias, down, up = (one.requires_grad_() for one in layer(torch.float32))
    inputs = torch.randn((2, 5, 64)[-dims:])
    output = adapted_linear(inputs, weight.detach(), bias.detach(), down, up, 0.5)
    output += 1.0
    output.square().sum().backward()
    ours, down.grad, up.grad = (down.grad, up.grad), None, None
    plain = F.linear(inputs, weight.detach(), bias.detach()) + 0.5 * F.linear(F.linear(inputs, down), up) + 1.0
    plain.square().sum().backward()
    for found, expected in zip(ours, (down.grad, up.grad), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_operations_are_counted(form: Format | None) -> None:
    weight, bias, down, up = layer(torch.float32)
    packed = weight if form is None else pack(weight, form)
    x, a, b = (one.requires_grad_() for one in (torch.ones(26, 64), down, up))
    for mask in (None, Mask(torch.arange(26), salt_of("layer"), 0, threshold_of(0.5))):
        with FlopCounterMode(display=False) as counter:
            output = adapted_linear(x, packed, bias, a, b, 0.5, mask)
        assert counter.get_total_flops() == 2 * 26 * (96 * 64 + 4 * 64 + 96 * 4)
        with FlopCounterMode(display=False) as counter:
            output.sum().backward()
        assert counter.get_total_flops() == 2 * 26 * (96 * 64 + 2 * (4 * 64 + 96 * 4))


@pytest.mark.parametrize("form", [None, "nf4-double"])
def test_the_operation_is_what_torch_asks_of_its_own(form: Format | None) -> None:
    weight, bias, down, up = layer(torch.float32)
    frozen: list[Tensor | None] = [weight, None, None, None]
    if form is not None:
        frozen = [*pack(weight, form).named().values()]
    drops = (torch.arange(28), salt_of("layer"), 0, threshold_of(0.5))
    given = (torch.randn(28, 64), *frozen, form, bias, down, up, 0.5, *drops)
    torch.library.opcheck(torch.ops.tonnage.adapted_linear.default, given)
