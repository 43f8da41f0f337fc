"""A layer whose inputs are rotated computes what peft's OFT does, over weights as they are and over packed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import OFTConfig
from peft.tuners.oft.layer import Linear
from torch import nn

from model.alike import assert_computes_alike
from tonnage.kernels.quantized import pack, unpack
from tonnage.kernels.rotations import turns_of
from tonnage.model.adapters import AdapterSpec, Target, attach
from tonnage.model.packed_layers import pack_layers

INPUTS, OUTPUTS, SIZE = 64, 96, 16
ADAPTER = AdapterSpec(0, 1.0, oft_block_size=SIZE)


def layers_of(kind: str) -> tuple[nn.Module, Any, Target]:
    """A frozen layer of ours with rotations, peft's, and ours as a target."""
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS)
    with torch.no_grad():
        plain.weight.normal_()
        original = plain.weight.clone()
        if kind == "nf4":
            plain.weight.copy_(unpack(pack(plain.weight, "nf4"), torch.float32))
    theirs: Any = Linear(plain, "default", OFTConfig(oft_block_size=SIZE), r=0)
    with torch.no_grad():
        theirs.oft_R["default"].weight.normal_(std=0.1)
    root = nn.ModuleDict({"layer": nn.Linear(INPUTS, OUTPUTS)})
    ours = root["layer"].requires_grad_(requires_grad=False)
    target = Target("layer", ours, "", (OUTPUTS, INPUTS))
    attach(target, ADAPTER, torch.float32)
    packed = pack_layers(root, [root], "nf4") if kind == "nf4" else []
    for name, parameter in ours._parameters.items():
        assert parameter is not None
        empty = torch.empty_like(parameter, device="cpu")
        ours._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for layer in packed:
        layer.fill(original)
    with torch.no_grad():
        if kind != "nf4":
            ours.get_parameter("weight").copy_(plain.weight)
        ours.get_parameter("bias").copy_(plain.bias)
        ours.get_parameter("oft_R").copy_(theirs.oft_R["default"].weight)
    return ours, theirs, target


@pytest.mark.parametrize("kind", ["linear", "nf4"])
def test_a_layer_with_rotations_computes_what_peft_does(kind: str) -> None:
    ours, theirs, _ = layers_of(kind)
    assert_computes_alike(ours, theirs, torch.randn(3, 5, INPUTS), torch.randn(3, 5, OUTPUTS))
    gradient = theirs.oft_R["default"].weight.grad
    torch.testing.assert_close(ours.get_parameter("oft_R").grad, gradient, rtol=1e-5, atol=1e-4)


def test_a_merged_weight_is_the_one_of_peft() -> None:
    ours, theirs, target = layers_of("linear")
    merged = target.merged(ours.get_parameter("weight"), ADAPTER, [ours.get_parameter("oft_R")])
    theirs.merge()
    torch.testing.assert_close(merged, theirs.get_base_layer().weight, rtol=1e-5, atol=1e-5)


def test_blocks_are_orthogonal_as_far_as_their_series_goes() -> None:
    """The first terms that are left out are of the fifth power."""
    upper = torch.randn(3, SIZE * (SIZE - 1) // 2).mul_(0.01)
    turned = torch.eye(SIZE) + turns_of(upper, SIZE)
    torch.testing.assert_close(turned @ turned.transpose(-1, -2), torch.eye(SIZE).expand(3, -1, -1), rtol=0, atol=1e-4)


def test_a_small_rotation_shows_in_16_bits() -> None:
    """Beside the ones of the diagonal a bf16 number has no room for a turn by a thousandth."""
    ours, _, _ = layers_of("linear")
    for name in ("weight", "bias"):
        ours._parameters[name] = nn.Parameter(ours.get_parameter(name).detach().bfloat16(), requires_grad=False)
    inputs = torch.randn(2000, INPUTS)
    with torch.no_grad():
        ours.get_parameter("bias").zero_()
        ours.get_parameter("oft_R").fill_(1e-3)
        turned = ours(inputs.bfloat16()).float()
        ours.get_parameter("oft_R").zero_()
        moved = turned - ours(inputs.bfloat16()).float()
        wanted = (inputs.view(-1, 4, SIZE) @ turns_of(torch.full((4, 120), 1e-3), SIZE)[0]).flatten(1)
    expected = wanted @ ours.get_parameter("weight").float().t()
    assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.9
