"""The AdamW rule against torch's, and its storage forms against each other."""

import subprocess
import sys
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tonnage.kernels import adamw as kernels
from tonnage.kernels.adamw import Hyper, join, split
from tonnage.kernels.moments import Codec, Moments


def zeros(*shape: int) -> Moments:
    return Moments.zeros("fp32", shape, torch.device("cpu"))


def hyper(step: int, *, decay: float = 0.1, scale: float = 1.0) -> Hyper:
    return Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=decay, step=step, scale=scale)


def test_every_bit_pattern_splits_and_joins_exactly() -> None:
    patterns = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(0x10000, dtype=np.uint32) << 16) + 0x8000
    master = torch.from_numpy(np.concatenate([patterns, ties]).view(np.float32))
    master = master[master.isfinite()]
    weight, low = split(master)
    assert torch.equal(join(weight, low).view(torch.int32), master.view(torch.int32))


def test_every_master_is_an_fp16_weight_and_a_rest() -> None:
    patterns = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32)
    master = torch.from_numpy(patterns.view(np.float32))
    master = master[master.isfinite()]
    weight, low = split(master, torch.float16)
    assert torch.equal(weight, master.half())
    assert torch.equal(join(weight, low).view(torch.int32), master.view(torch.int32))
    assert torch.equal(join(weight, torch.zeros_like(low)), weight.float())  # as state begins


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
    weight, moments = reference.detach().clone(), zeros(5000)
    for step in range(1, 201):
        gradient = torch.randn(5000)
        reference.grad = gradient.clone()
        optimizer.step()
        kernels.update(weight, None, moments, gradient, hyper(step))
    exact = reference.detach()
    assert float((weight - exact).abs().max() / exact.abs().max()) < 1e-6
    torch.testing.assert_close(moments.m, optimizer.state[reference]["exp_avg"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_split_master_equals_plain_master_bit_for_bit(
    dtype: torch.dtype, gradient_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float16:  # which torch's operations update, whose square root may be a last bit off
        monkeypatch.setattr(kernels, "is_on", lambda name: False)
    torch.manual_seed(0)
    start = torch.cat([torch.randn(4000), 1e-5 * torch.randn(1000)]).to(dtype)  # fp16 has fewer digits of the latter
    plain = start.float()
    weight, low = start.clone(), torch.zeros(5000, dtype=kernels.LOW[dtype])
    one, two = zeros(5000), zeros(5000)
    for step in range(1, 201):
        gradient = torch.randn(5000).to(gradient_dtype)
        kernels.update(plain, None, one, gradient, hyper(step, scale=0.7))
        kernels.update(weight, low, two, gradient, hyper(step, scale=0.7))
        assert torch.equal(join(weight, low), plain)
    assert torch.equal(weight, split(plain, dtype)[0])
    assert torch.equal(one.m, two.m)
    assert torch.equal(one.v, two.v)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(50, 300), (7, 64), (3, 5000)])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_form_is_the_same_rule(
    dtype: torch.dtype, codec: Codec, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step from one state. torch's square root on the CPU may be a last bit off, all else is the same bits."""
    monkeypatch.setattr(kernels, "UPDATE_ELEMENTS", 999)
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    low = torch.zeros(shape, dtype=torch.int16) if dtype == torch.bfloat16 else None
    loops = Moments.zeros(codec, shape, torch.device("cpu"))
    for step in range(1, 31):
        gradient = torch.randn(shape)
        gradient[0] *= step < 5
        now = replace(hyper(step, scale=0.7), key=4_000_000_000 + step, first=2**32 - 100)
        weight2, low2, operations = deepcopy((weight, low, loops))
        kernels.update(weight, low, loops, gradient, now)
        kernels.update_torch(weight2, low2, operations, gradient, now)
        for name, tensor in loops.named().items():
            other = operations.named()[name]
            if name == "v_scale":
                torch.testing.assert_close(tensor, other, rtol=2e-7, atol=0.0)
            elif tensor.dtype in (torch.int8, torch.uint8):
                assert (tensor.int() - other.int()).abs().max() <= 1
                assert (tensor != other).float().mean() < 0.002
            else:
                assert torch.equal(tensor, other), (step, name)
        ours, theirs = (w if lower is None else join(w, lower) for w, lower in ((weight, low), (weight2, low2)))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_torch_form_compiles_to_one_graph_for_all_steps(codec: Codec) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(kernels.update_tile, fullgraph=True, backend="aot_eager", dynamic=True)
    shape = (4, 300)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for step in range(1, 4):
            weight, low = torch.ones(shape).bfloat16().view(-1), torch.zeros(1200, dtype=torch.int16)
            moments, gradient = Moments.zeros(codec, shape, torch.device("cpu")), torch.randn(1200)
            weight2, low2 = weight.clone(), low.clone()
            moments2 = Moments.zeros(codec, shape, torch.device("cpu"))
            now = replace(hyper(step), key=step)
            coefficients = torch.tensor(kernels.coefficients_of(now))
            key, first = torch.tensor(step, dtype=torch.int32), torch.tensor(0, dtype=torch.int32)
            compiled(weight, low, moments, gradient, coefficients, key, first)
            kernels.update(weight2, low2, moments2, gradient, now)
            assert torch.equal(weight, weight2)
            assert torch.equal(moments.m, moments2.m)


@pytest.mark.slow
def test_the_first_update_leaves_the_number_of_threads_alone() -> None:
    script = (
        "import torch\n"
        "from tonnage.kernels.adamw import Hyper, update\nfrom tonnage.kernels.threads import use_threads\n"
        "from tonnage.kernels.moments import Moments\n"
        "use_threads(1)\n"
        "w = torch.randn(1000)\n"
        "update(w, None, Moments.zeros('fp32', w.shape, w.device), w.clone(), Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 1))\n"
        "print(torch.get_num_threads())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"
