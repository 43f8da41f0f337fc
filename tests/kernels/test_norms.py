"""Norms in one pass: the numbers of the models' own, and left alone where a model means something else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tonnage.kernels import norms


def pair(kind: type[nn.Module], size: int) -> tuple[nn.Module, nn.Module]:
    """A norm as it is, and as it is after ``use_fast_norms``, with the same weight."""
    plain, fast = kind(size, eps=1e-6), kind(size, eps=1e-6)
    torch.nn.init.normal_(plain.weight, 1.0, 0.3)  # type: ignore[arg-type]
    fast.load_state_dict(plain.state_dict())
    norms.use_fast_norms(fast)
    return plain, fast.to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(1, 37, 96), (3, 5, 2, 64), (1, 1, 7)])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_output_and_gradients_are_those_of_fp32_within_a_rounding(
    kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    plain, fast = pair(kind, shape[-1])
    inputs = (torch.randn(shape) * 3).bfloat16()
    upstream = torch.randn(shape).bfloat16()
    for number, (name, parameter) in enumerate(plain.named_parameters()):
        assert (number, name) == (0, "weight")
        parameter.data = parameter.data.bfloat16().float()
    wide = inputs.float().requires_grad_()
    plain(wide).backward(upstream.float())
    given = inputs.clone().requires_grad_()
    output = fast(given)
    output.backward(upstream)
    assert type(output.grad_fn).__name__ == "_RMSNormBackward"  # it was the loop
    assert wide.grad is not None
    assert given.grad is not None
    torch.testing.assert_close(output.float(), plain(inputs.float()), rtol=2**-7, atol=1e-30)
    scale = float(wide.grad.abs().max())
    torch.testing.assert_close(given.grad.float(), wide.grad, rtol=2**-8, atol=2**-12 * scale)
    ours, theirs = fast.weight.grad, plain.weight.grad
    assert isinstance(ours, torch.Tensor)
    assert isinstance(theirs, torch.Tensor)
    torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=2**-12 * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_at_a_time_are_the_models_own_norm(dtype: torch.dtype) -> None:
    """In values to the bit, in gradients to a rounding; and without a copy of the input in fp32 that is kept."""
    torch.manual_seed(0)
    plain, fast = pair(LlamaRMSNorm, 96)
    plain, fast = plain.to(dtype), fast.to(dtype)
    fast.load_state_dict(plain.state_dict())
    results = []
    for norm in (plain, lambda one: norms.lean_rms_norm(one, fast.weight, 1e-6)):  # type: ignore[arg-type]
        inputs = (torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(1)) * 3).to(dtype).requires_grad_()
        output = norm(inputs)
        output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
        assert inputs.grad is not None
        results.append((output.detach(), inputs.grad))
    (wanted, slopes), (got, found) = results
    assert torch.equal(got, wanted)
    place = torch.finfo(dtype).eps
    torch.testing.assert_close(found, slopes, rtol=place, atol=place / 8 * float(slopes.abs().max()))
    theirs, ours = plain.weight.grad, fast.weight.grad
    assert isinstance(theirs, torch.Tensor)
    torch.testing.assert_close(ours, theirs, rtol=2 * place, atol=place * float(theirs.abs().max()))
    kept: list[torch.Tensor] = []

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        norms.lean_rms_norm(inputs.requires_grad_(), fast.weight, 1e-6)  # type: ignore[arg-type]
    assert sum(one.nbytes for one in kept) == inputs.nbytes + 96 * inputs.itemsize + 21 * 4


def test_fp16_goes_that_way() -> None:
    _, fast = pair(LlamaRMSNorm, 24)
    inputs = torch.randn(5, 24, requires_grad=True).half()
    assert type(fast.half()(inputs).grad_fn).__name__ == "_LeanRMSNormBackward"


def test_another_function_of_a_like_name_is_left_alone() -> None:
    model = nn.ModuleList([Gemma2RMSNorm(16), LlamaRMSNorm(16)])
    norms.use_fast_norms(model)
    assert "forward" not in vars(model[0])
    assert "forward" in vars(model[1])


def test_asking_whether_a_norm_is_ours_loads_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_rms_norm", None)
    _, fast = pair(LlamaRMSNorm, 24)
    assert "forward" in vars(fast)


def test_other_types_go_the_models_own_way() -> None:
    torch.manual_seed(0)
    plain, fast = pair(LlamaRMSNorm, 24)
    inputs = torch.randn(5, 24)
    assert torch.equal(fast.float()(inputs), plain.bfloat16().float()(inputs))


def test_a_row_that_is_not_finite_stays_so() -> None:
    _, fast = pair(LlamaRMSNorm, 24)
    inputs = torch.zeros(2, 24, dtype=torch.bfloat16)
    inputs[1, 3] = float("nan")
    assert fast(inputs).isfinite().all(1).tolist() == [True, False]
