"""The gate of an MLP against torch's own: the same bits, or as exact ones rounded once; and less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from tonnage.kernels.gates import gated, use_lean_gates
from tonnage.kernels.switches import switched_off


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def of(function: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Output and gradients of a gate between layers."""
    leaves = [one.clone().requires_grad_() for one in (inputs, *weights)]
    output = function(F.linear(leaves[0], leaves[1]), F.linear(leaves[0], leaves[2]))
    (output * torch.linspace(-2, 3, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return [output.detach(), *(one.grad for one in leaves if one.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 13, 100])
def test_values_and_gradients_are_torchs_own(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, rows, 24, dtype=dtype) * 3
    weights = [torch.randn(37, 24, dtype=dtype) for _ in range(2)]
    with switched_off(["gates"]):
        got, wanted = of(gated, inputs, weights), of(plain, inputs, weights)
    assert len(got) == 4
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("size", [0, 1, 1000, 65_536])
def test_a_loop_gives_exact_ones_rounded(size: int) -> None:
    torch.manual_seed(0)
    inputs = [4 * torch.randn(size).bfloat16() for _ in range(3)]
    gate, up, slope = inputs
    if size > 1:
        gate[:6] = torch.tensor([0.0, -0.0, 30.0, -30.0, 80.0, -80.0])
    exact = [one.double().requires_grad_() for one in (gate, up)]
    output = F.silu(exact[0]) * exact[1]
    output.backward(slope.double())
    leaves = [one.clone().requires_grad_() for one in (gate, up)]
    ours = gated(leaves[0] * 1, leaves[1] * 1)
    assert type(ours.grad_fn).__name__ == "_GatedBackward"
    ours.backward(slope)
    wanted = [output, *(one.grad for one in exact)]
    for one, other in zip([ours, *(leaf.grad for leaf in leaves)], wanted, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=1e-30)


def test_what_is_no_number_stays_none() -> None:
    gate, up = torch.tensor([float("nan"), 1.0, float("inf"), 2.0]).bfloat16(), torch.ones(4).bfloat16()
    up[1] = float("nan")
    assert gated(gate, up).isfinite().tolist() == [False, False, False, True]


def test_a_second_backward_pass_is_refused() -> None:
    gate, up = (torch.randn(3, 4, requires_grad=True) * 1 for _ in range(2))
    output = gated(gate, up).sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


def peak(function: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Most bytes that torch's tracker sees in both passes, in tensors as large as the gate."""
    layers = [nn.Linear(8, 4096, bias=False), nn.Linear(8, 4096, bias=False), nn.Linear(4096, 8, bias=False)]
    inputs = torch.randn(2048, 8, requires_grad=True)
    tracker = MemTracker()
    with tracker:
        layers[2](function(layers[0](inputs), layers[1](inputs))).sum().backward()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return float(found["Total"]) / (4 * 2048 * 4096)


def test_two_thirds_as_much_is_there_at_once() -> None:
    """At the gate itself it is half; the most is in the layer after it, which kept the product, a moment before."""
    assert peak(plain) == pytest.approx(6, abs=0.1)
    assert peak(gated) == pytest.approx(4, abs=0.1)


def taken(model_type: str, **changes: Any) -> set[str]:
    config: Any = AutoConfig.for_model(model_type)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": None}
    for key, value in (small | heads | changes).items():
        setattr(config, key, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    use_lean_gates(model)
    return {type(module).__name__ for module in model.modules() if "forward" in module.__dict__}


def test_the_mlps_that_compute_it_are_taken_and_no_others() -> None:
    assert [taken(family) for family in ("llama", "qwen2", "qwen3", "mistral")] == [
        {"LlamaMLP"},
        {"Qwen2MLP"},
        {"Qwen3MLP"},
        {"MistralMLP"},
    ]
    assert taken("llama", hidden_act="gelu") == set()
    assert taken("gemma2", hidden_activation="gelu_pytorch_tanh") == set()
    assert taken("phi3") == set()
