"""A fake-quantised layer: the bits of torchao's, in its output and all gradients."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.qat import nvfp4
from torchao.quantization import quantize_
from torchao.quantization.qat import Int8DynActInt4WeightQATQuantizer, QATConfig

from tonnage.errors import UserError
from tonnage.kernels import fake_quantized
from tonnage.kernels.dropout import Mask, kept, salt_of, threshold_of
from tonnage.kernels.fake_quantized import Addition, FakeQuantizers, Scheme, check_torchao, fake_quantized_linear

SCHEMES = (Scheme("int4", 32), Scheme("int8"), Scheme("int8-int4", 32), Scheme("mxfp4", 32), Scheme("nvfp4", 16))


def layer_and_inputs(dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(128, 48).to(dtype)
    with torch.no_grad():
        layer.weight.mul_(torch.linspace(0.1, 30, 48)[:, None])  # no scale is that of another row
    return layer, torch.randn(3, 7, 128).to(dtype), torch.randn(3, 7, 48).to(dtype)


def gradients(tensors: list[Tensor]) -> list[Tensor | None]:
    found = [one.grad for one in tensors]
    for one in tensors:
        one.grad = None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_it_computes_the_bits_of_torchaos_layer(
    scheme: Scheme, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of a few rows; but for the gradient of a bias, of which torchao has none in mxfp4 and nvfp4. Products
    of nvfp4 that torchao leaves to a card are made of the same numbers, widened."""
    monkeypatch.setattr(fake_quantized, "PIECE", 5 * 128)
    monkeypatch.setattr(
        nvfp4, "_addmm_nvfp4_dispatch", lambda a, b, _, bias: torch.addmm(bias, a.dequantize(), b.dequantize())
    )
    layer, inputs, gradient = layer_and_inputs(dtype)
    assert layer.bias is not None
    x = inputs.requires_grad_()
    ours = fake_quantized_linear(x, layer.weight, layer.bias, FakeQuantizers(scheme))
    ours.backward(gradient)
    found = gradients([x, layer.weight, layer.bias])
    holder: Any = nn.Sequential(layer)
    quantize_(holder, QATConfig(scheme.for_torchao(), step="prepare"))
    theirs = holder(x)
    theirs.backward(gradient)
    wanted = gradients([x, holder[0].weight, holder[0].bias])
    if scheme.name in ("mxfp4", "nvfp4"):
        assert wanted[2] is None
        wanted[2] = gradient.flatten(0, 1).sum(0)
    for mine, other in zip([ours, *found], [theirs, *wanted], strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)
    exact = F.linear(inputs, layer.weight, layer.bias)
    assert float((ours - exact).norm()) > 2e-3 * float(exact.norm())


def test_int8_int4_has_the_bits_of_torchtunes_quantizer() -> None:
    """In fp32: of 16 bits its scales have all digits."""
    layer, inputs, _ = layer_and_inputs(torch.float32)
    ours = fake_quantized_linear(inputs, layer.weight, layer.bias, FakeQuantizers(Scheme("int8-int4", 32)))
    theirs = Int8DynActInt4WeightQATQuantizer(groupsize=32).prepare(nn.Sequential(layer))
    assert torch.equal(ours, theirs(inputs))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("drops", [False, True])
def test_an_addition_has_the_inputs_as_they_are(scheme: Scheme, drops: bool) -> None:
    layer, inputs, gradient = layer_and_inputs(torch.float32)
    layer.requires_grad_(False)
    down, up = torch.randn(4, 128), torch.randn(48, 4)
    mask = Mask(torch.arange(21) * 7919, salt_of("layer"), 0, threshold_of(0.3)) if drops else None
    keeps = 1.0 if mask is None else (kept(mask, 128).view(3, 7, 128) / mask.kept_share)
    quantizers = FakeQuantizers(scheme)
    results = []
    for ours in (True, False):
        x, a, b = (one.clone().requires_grad_() for one in (inputs, down, up))
        if ours:
            output = fake_quantized_linear(x, layer.weight, layer.bias, quantizers, Addition(a, b, 0.5, mask))
        else:
            base = fake_quantized_linear(x, layer.weight, layer.bias, quantizers)
            output = base + 0.5 * F.linear(F.linear(x * keeps, a), b)
        output.backward(gradient)
        results.append([output, x.grad, a.grad, b.grad])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-4)


def test_nothing_but_input_and_weight_is_kept() -> None:
    """torchao's layer keeps several numbers in fp32 for each of the weight's."""
    layer, inputs, _ = layer_and_inputs(torch.bfloat16)
    inputs.requires_grad_()
    kept_ones = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept_ones.append(tensor)
        return tensor

    quantizers = FakeQuantizers(SCHEMES[2])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fake_quantized_linear(inputs, layer.weight, layer.bias, quantizers)
    assert {one.data_ptr() for one in kept_ones} == {inputs.data_ptr(), layer.weight.data_ptr()}


def test_it_can_be_left_off_for_a_while() -> None:
    quantizers = FakeQuantizers(SCHEMES[1])
    with quantizers.used(False):
        assert not quantizers.enabled
    assert quantizers.enabled


@pytest.mark.parametrize("installed", ["", "0.17.1"])
def test_torchao_must_be_there(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if not installed:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(fake_quantized, "version", version)
    with pytest.raises(UserError, match=r"pip install 'tonnage\[torchao\]'"):
        check_torchao()


def test_a_matrix_of_zeros_or_of_no_rows_is_rounded_to_itself() -> None:
    """Its largest number scales no other."""
    quantizers = FakeQuantizers(Scheme("nvfp4", 16))
    for rows in (0, 3):
        zeros = torch.zeros(rows, 32)
        assert torch.equal(quantizers.of_weight(zeros)(zeros), zeros)
