"""Products of groups of rows: those of each group by itself, forward and backward, whoever has no rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tonnage.kernels import grouped
from tonnage.kernels.grouped import grouped_product
from tonnage.model.experts import register

ENDS = torch.tensor([0, 9, 9, 26, 26])
"""Of five groups, the first, third and last of which are empty; two more rows are in none."""


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_group_is_a_product_of_its_own(
    dtype: torch.dtype, turned: bool, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "sizes_matter", lambda *_: grows)
    torch.manual_seed(0)
    rows = torch.randn(28, 24, dtype=dtype, requires_grad=True)
    weights = torch.randn((5, 24, 40) if turned else (5, 40, 24), dtype=dtype, requires_grad=True)
    gradient = torch.randn(28, 40, dtype=dtype)
    output = grouped_product(rows, weights, ENDS, turned=turned)
    output.backward(gradient)

    wide_rows, wide = rows.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    expected = torch.zeros(28, 40, dtype=torch.float64)
    for group, here in ((1, slice(0, 9)), (3, slice(9, 26))):
        expected[here] = wide_rows[here] @ (wide[group] if turned else wide[group].t())
    expected.backward(gradient.double())
    assert rows.grad is not None
    assert weights.grad is not None
    assert wide_rows.grad is not None
    assert wide.grad is not None
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for ours, theirs in ((output, expected), (rows.grad, wide_rows.grad), (weights.grad, wide.grad)):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < tolerance
    assert not output[26:].any()
    assert not weights.grad[[0, 2, 4]].any()


def test_gradients_of_micro_batches_add_up_in_fp32() -> None:
    torch.manual_seed(0)

    weights = nn.Parameter(torch.ones(5, 16, 24, dtype=torch.bfloat16))
    weights.grad_dtype = torch.float32
    expected = torch.zeros(5, 16, 24)
    for seed in range(4):
        rows = torch.randn(28, 24, generator=torch.Generator().manual_seed(seed)).bfloat16()
        alone = weights.detach().requires_grad_()
        grouped_product(rows, alone, ENDS).sum().backward()
        grouped_product(rows, weights, ENDS).sum().backward()
        assert alone.grad is not None
        expected += alone.grad.float()
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32
    assert torch.equal(weights.grad, expected)


@pytest.mark.parametrize("kind", [MixtralExperts, Qwen3MoeExperts, GptOssExperts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_those_of_transformers(kind: type, dtype: torch.dtype) -> None:
    """Gates side by side, gates that alternate, biases, weights the other way round."""
    if kind is GptOssExperts:
        config: Any = GptOssConfig(hidden_size=32, intermediate_size=24, num_local_experts=5)
    elif kind is MixtralExperts:
        config = MixtralConfig(hidden_size=32, intermediate_size=24, num_local_experts=5)
    else:
        config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=24, num_experts=5)
    torch.manual_seed(0)
    experts = kind(config).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    hidden = torch.randn(17, 32, dtype=dtype, requires_grad=True)
    index = torch.stack([torch.randperm(4)[:3] for _ in range(17)])  # the last expert has no token
    shares = torch.rand(17, 3, dtype=dtype, requires_grad=True)
    inputs = (hidden, shares, *experts.parameters())

    def found(implementation: str) -> list[Tensor]:
        experts.config._experts_implementation = implementation
        output = experts(hidden, index, shares)
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    for ours, theirs in zip(found(register()), found("eager"), strict=True):
        assert ours.dtype == theirs.dtype
        limit = 1e-6 if dtype == torch.float32 else 2e-2
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < limit
