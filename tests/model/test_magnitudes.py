"""A layer whose rows have trained lengths computes what peft's DoRA does, whichever way round its weight lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import nn
from transformers.pytorch_utils import Conv1D

from model.alike import assert_computes_alike
from tonnage.kernels.quantized import pack, unpack
from tonnage.model.adapters import NORMS, AdapterSpec, Target, attach, fill_norms
from tonnage.model.packed_layers import pack_layers

INPUTS, OUTPUTS, RANK, FACTOR = 64, 96, 4, 1.5


def layers_of(kind: str) -> tuple[nn.Module, Any]:
    """A frozen layer of ours with an addition, and peft's."""
    torch.manual_seed(0)
    plain: Any = Conv1D(OUTPUTS, INPUTS) if kind == "conv1d" else nn.Linear(INPUTS, OUTPUTS)
    with torch.no_grad():
        plain.weight.normal_()
        plain.bias.normal_()
        original = plain.weight.clone()
        if kind == "nf4":
            plain.weight.copy_(unpack(pack(plain.weight, "nf4"), torch.float32))
    config = LoraConfig(r=RANK, lora_alpha=6, use_dora=True, fan_in_fan_out=kind == "conv1d")
    theirs: Any = Linear(plain, "default", config, r=RANK, lora_alpha=6, is_target_conv_1d_layer=kind == "conv1d")
    with torch.no_grad():
        theirs.lora_B["default"].weight.normal_()
        theirs.lora_magnitude_vector["default"].weight.mul_(1.3)
    root = nn.ModuleDict({"layer": Conv1D(OUTPUTS, INPUTS) if kind == "conv1d" else nn.Linear(INPUTS, OUTPUTS)})
    ours: Any = root["layer"].requires_grad_(requires_grad=False)
    target = Target("layer", ours, "", (OUTPUTS, INPUTS))
    attach(target, AdapterSpec(RANK, FACTOR, magnitudes=True), torch.float32)
    packed = pack_layers(root, [root], "nf4") if kind == "nf4" else []
    for name, parameter in ours._parameters.items():
        ours._parameters[name] = nn.Parameter(
            torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad
        )
    for layer in packed:
        layer.fill(original)
    with torch.no_grad():
        if kind != "nf4":
            ours.weight.copy_(plain.weight)
        ours.bias.copy_(plain.bias)
        ours.lora_A.copy_(theirs.lora_A["default"].weight)
        ours.lora_B.copy_(theirs.lora_B["default"].weight)
        ours.lora_magnitude.copy_(theirs.lora_magnitude_vector["default"].weight)
        fill_norms(target, plain.weight, dict(root.named_parameters()), [NORMS])
    return ours, theirs


@pytest.mark.parametrize("kind", ["linear", "conv1d", "nf4"])
def test_a_layer_with_magnitudes_computes_what_peft_does(kind: str) -> None:
    ours, theirs = layers_of(kind)
    assert_computes_alike(ours, theirs, torch.randn(3, 5, INPUTS), torch.randn(3, 5, OUTPUTS))
    gradients = {
        "lora_A": theirs.lora_A["default"].weight.grad,
        "lora_B": theirs.lora_B["default"].weight.grad,
        "lora_magnitude": theirs.lora_magnitude_vector["default"].weight.grad,
    }
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_lengths_are_fp32_in_a_layer_of_16_bits() -> None:
    """A magnitude that moved by less than bf16 can tell from where it was still moves outputs."""
    ours, _ = layers_of("linear")
    for name in ("weight", "bias", "lora_A", "lora_B"):
        ours._parameters[name] = nn.Parameter(ours.get_parameter(name).detach().bfloat16(), requires_grad=False)
    inputs = torch.randn(2000, INPUTS).bfloat16()
    with torch.no_grad():
        ours.get_parameter("bias").zero_()
        before = ours(inputs).double().abs().sum()
        ours.get_parameter("lora_magnitude").mul_(1.001)
        ratio = float(ours(inputs).double().abs().sum() / before)
    assert ratio == pytest.approx(1.001, abs=2e-4)
