"""The AdamW rule against torch's, and its storage forms against each other."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from tonnage.optim import kernels
from tonnage.optim.kernels import Hyper, join, split


def hyper(step: int, *, decay: float = 0.1, scale: float = 1.0) -> Hyper:
    return Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=decay, step=step, scale=scale)


def test_every_bit_pattern_splits_and_joins_exactly() -> None:
    patterns = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(0x10000, dtype=np.uint32) << 16) + 0x8000
    master = torch.from_numpy(np.concatenate([patterns, ties]).view(np.float32))
    master = master[master.isfinite()]
    weight, low = split(master)
    assert torch.equal(join(weight, low).view(torch.int32), master.view(torch.int32))


def test_high_half_is_the_nearest_bf16_except_on_ties() -> None:
    torch.manual_seed(0)
    master = torch.randn(1_000_000)
    weight, low = split(master)
    differs = weight != master.bfloat16()
    assert (low[differs] == -0x8000).all()
    assert differs.float().mean() < 1e-4


def test_equals_torch_adamw() -> None:
    torch.manual_seed(0)
    reference = torch.nn.Parameter(torch.randn(5000))
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    weight, m, v = reference.detach().clone(), torch.zeros(5000), torch.zeros(5000)
    for step in range(1, 201):
        gradient = torch.randn(5000)
        reference.grad = gradient.clone()
        optimizer.step()
        kernels.update(weight, None, m, v, gradient, hyper(step))
    exact = reference.detach()
    assert float((weight - exact).abs().max() / exact.abs().max()) < 1e-6
    torch.testing.assert_close(m, optimizer.state[reference]["exp_avg"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_split_master_equals_plain_master_bit_for_bit(gradient_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = torch.randn(5000).bfloat16()
    plain = start.float()
    weight, low = start.clone(), torch.zeros(5000, dtype=torch.int16)
    m1, v1, m2, v2 = (torch.zeros(5000) for _ in range(4))
    for step in range(1, 201):
        gradient = torch.randn(5000).to(gradient_dtype)
        kernels.update(plain, None, m1, v1, gradient, hyper(step, scale=0.7))
        kernels.update(weight, low, m2, v2, gradient, hyper(step, scale=0.7))
        assert torch.equal(join(weight, low), plain)
    assert torch.equal(weight, split(plain)[0])
    assert torch.equal(m1, m2)
    assert torch.equal(v1, v2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_form_is_the_same_rule(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE_ELEMENTS", 999)
    torch.manual_seed(0)
    weight = torch.randn(50, 100).to(dtype)
    low = torch.zeros(50, 100, dtype=torch.int16) if dtype == torch.bfloat16 else None
    m, v = torch.zeros(50, 100), torch.zeros(50, 100)
    weight2, low2, m2, v2 = (None if t is None else t.clone() for t in (weight, low, m, v))
    assert weight2 is not None
    assert m2 is not None
    assert v2 is not None
    for step in range(1, 51):
        gradient = torch.randn(50, 100)
        kernels.update(weight, low, m, v, gradient, hyper(step))
        kernels.update_torch(weight2, low2, m2, v2, gradient, hyper(step))
    ours = weight if low is None else join(weight, low)
    theirs = weight2 if low2 is None else join(weight2, low2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_first_update_leaves_the_number_of_threads_alone() -> None:
    script = (
        "import torch\n"
        "from tonnage.optim.kernels import Hyper, update, use_threads\n"
        "use_threads(1)\n"
        "w = torch.randn(1000)\n"
        "update(w, None, w * 0, w * 0, w.clone(), Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 1))\n"
        "print(torch.get_num_threads())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"
