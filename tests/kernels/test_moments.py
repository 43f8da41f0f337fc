"""Moment codecs: against straightforward torch, their error bounds, and that nothing depends on how state is cut up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tonnage.kernels import adamw as kernels
from tonnage.kernels.adamw import Hyper
from tonnage.kernels.moments import BLOCK, Codec, Moments, blocks_in, cut, decode, noise_key, random_bits
from tonnage.optim.optimizer import ShardedOptimizer

CPU = torch.device("cpu")


def hyper(step: int, **changes: Any) -> Hyper:
    return replace(Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, step=step), **changes)


def straightforward_int8(x: Tensor, signed: bool) -> Tensor:
    """Each row in blocks of 256, each block by itself, as its definition says; returns the decoded values."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 256):
            block = x[row, start : start + 256].double()
            if not signed:
                block = block.sqrt()
            scale = block.abs().max()
            if scale == 0:
                out[row, start : start + 256] = 0
                continue
            if signed:
                code = torch.floor(127 * (block.abs() / scale).sqrt() + 0.5)
                value = block.sign() * (code / 127) ** 2 * scale
            else:
                code = torch.clamp(torch.floor(256 * (block / scale).sqrt() + 0.5), min=1)
                value = ((code / 256) ** 2 * scale) ** 2
            out[row, start : start + 256] = value.float()
    return out


@pytest.mark.parametrize("columns", [64, 256, 300, 1000])
def test_int8_equals_a_straightforward_implementation(columns: int) -> None:
    torch.manual_seed(0)
    shape = (6, columns)
    scales = torch.logspace(-6, 0, 6).unsqueeze(1)
    weight = torch.randn(shape)
    w, m, v = weight.double(), torch.zeros(shape), torch.zeros(shape)
    moments = Moments.zeros("int8", shape, CPU)
    for step in range(1, 21):
        gradient = torch.randn(shape) * scales
        kernels.update(weight, None, moments, gradient, hyper(step))
        m = 0.9 * m + 0.1 * gradient
        v = 0.95 * v + 0.05 * gradient**2
        change = (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        w = w * (1 - 1e-2 * 0.1) - 1e-2 * change.double()
        m, v = straightforward_int8(m, signed=True), straightforward_int8(v, signed=False)
        # A value within a rounding error of the border between two codes may fall to either side; few do.
        got_m, got_v = (t.view(shape) for t in decode(moments))
        for got, want in ((got_m, m), (got_v, v)):
            assert torch.isclose(got, want, rtol=1e-4, atol=0.0).float().mean() > 0.995
        m, v = got_m, got_v
    torch.testing.assert_close(weight.double(), w, rtol=0, atol=1e-5)


def test_int8_error_is_within_half_a_step_of_the_companded_map() -> None:
    torch.manual_seed(0)
    shape = (64, 512)
    gradient = torch.randn(shape) * torch.randn(shape).exp()
    exact, coded = Moments.zeros("fp32", shape, CPU), Moments.zeros("int8", shape, CPU)
    for moments in (exact, coded):
        kernels.update(torch.zeros(shape), None, moments, gradient, hyper(1))
    m, v = (t.view(64, 2, BLOCK) for t in decode(coded))
    exact_m, exact_root = exact.m.view(64, 2, BLOCK), exact.v.view(64, 2, BLOCK).sqrt()
    m_scale, v_scale = exact_m.abs().amax(-1, keepdim=True), exact_root.amax(-1, keepdim=True)
    slack = 1e-6
    half_step = ((m.abs() / m_scale).sqrt() - (exact_m.abs() / m_scale).sqrt()).abs()
    assert half_step.max() <= 0.5 / 127 + slack
    root_step = ((v.sqrt() / v_scale).sqrt() - (exact_root / v_scale).sqrt()).abs()
    assert root_step.max() <= 1 / 256 + slack  # the lowest code holds everything below it
    assert root_step[exact_root / v_scale > (1 / 256) ** 2].max() <= 0.5 / 256 + slack
    assert (m.sign() == exact_m.sign())[m != 0].all()
    assert (v > 0).all()
    assert float((m - exact_m).norm() / exact_m.norm()) < 0.02
    assert float((v.sqrt() - exact_root).norm() / exact_root.norm()) < 0.01


def test_rows_without_gradients_decay_to_zero_and_stay_finite() -> None:
    moments, weight = Moments.zeros("int8", (2, 300), CPU), torch.zeros(2, 300)
    for step in range(1, 1500):
        kernels.update(weight, None, moments, torch.randn(2, 300) * 1e-3 * (step < 3), hyper(step, decay=0.0))
    assert weight.isfinite().all()
    assert moments.m_scale is not None
    assert (moments.m_scale == 0).all()
    assert (decode(moments)[0] == 0).all()


def test_bf16_rounds_to_a_neighbour_and_is_right_on_average() -> None:
    shape = (1000, 200)
    gradient = torch.full(shape, 1.2345678)
    moments = Moments.zeros("bf16", shape, CPU)
    kernels.update(torch.zeros(shape), None, moments, gradient, hyper(1, key=noise_key(0, 1, "w")))
    for got, exact in ((moments.m, 0.1 * 1.2345678), (moments.v, 0.05 * 1.2345678**2)):
        values = got.float().unique()
        assert len(values) == 2
        assert values[0] < exact < values[1]
        step = float(values[1] - values[0])
        assert step / exact < 2**-7
        assert abs(float(got.double().mean()) - exact) < 4 * 0.5 * step / math.sqrt(got.numel())


def test_small_changes_of_a_large_bf16_moment_are_not_lost() -> None:
    """v decays by a thousandth a step, a quarter of what bf16 resolves; to nearest it would stand still."""
    shape = (50, 200)
    exact, rounded = Moments.zeros("fp32", shape, CPU), Moments.zeros("bf16", shape, CPU)
    for step in range(1, 301):
        gradient = torch.full(shape, 1.0 if step == 1 else 0.0)
        for moments in (exact, rounded):
            now = hyper(step, beta2=0.999, key=noise_key(0, step, "w"))
            kernels.update(torch.zeros(shape), None, moments, gradient, now)
    assert float(rounded.v.float().mean()) == pytest.approx(float(exact.v.mean()), rel=0.005)


def test_random_bits_look_random_and_differ_between_keys() -> None:
    keys = [torch.tensor(noise_key(0, step, "w") - 2**31, dtype=torch.int32) for step in range(2)]
    first = torch.tensor(0, dtype=torch.int32)
    one, two = (random_bits(1 << 16, key, first) for key in keys)
    assert (one == two).float().mean() < 1e-3
    for bit in range(32):
        ones = ((one >> bit) & 1).double()
        assert abs(float(ones.mean()) - 0.5) < 0.01
        assert abs(float((ones[1:] * ones[:-1]).mean()) - 0.25) < 0.01
    later = random_bits(100, keys[0], torch.tensor(1000, dtype=torch.int32))
    assert torch.equal(later, one[1000:1100])


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("shape", "limit"), [((10, 300), 700), ((3, 3000), 512), ((1000,), 256), ((5, 8, 100), 900)])
def test_state_does_not_depend_on_how_it_is_cut(codec: Codec, shape: tuple[int, ...], limit: int) -> None:
    torch.manual_seed(0)
    whole = Moments.zeros(codec, shape, CPU)
    rows = shape[0]
    shards = [Moments.zeros(codec, (n, *shape[1:]), CPU) for n in (rows // 3, rows - rows // 3)]
    pieces = Moments.zeros(codec, shape, CPU)
    start = torch.randn(shape)
    weights = [start.clone() for _ in range(3)]
    row = start[0].numel()
    for step in range(1, 6):
        gradient = torch.randn(shape)
        now = hyper(step, key=noise_key(7, step, "w"))
        kernels.update(weights[0], None, whole, gradient, now)
        first = 0
        for shard in shards:
            n = shard.m.shape[0]
            part = slice(first, first + n)
            at = replace(now, first=first * row)
            kernels.update(weights[1][part], None, shard, gradient[part].contiguous(), at)
            first += n
        for begin, end in cut(start.numel(), row, limit):
            flat = slice(begin, end)
            assert 0 < end - begin <= limit
            kernels.update(
                weights[2].view(-1)[flat],
                None,
                pieces.part(begin, end),
                gradient.view(-1)[flat],
                replace(now, first=begin),
            )
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    for name, tensor in whole.named().items():
        assert torch.equal(tensor, torch.cat([shard.named()[name] for shard in shards])), name
        assert torch.equal(tensor, pieces.named()[name]), name


@pytest.mark.parametrize(("codec", "moment_bytes"), [("fp32", 8.0), ("bf16", 4.0), ("int8", 2 + 8 / 256)])
def test_bytes_a_parameter(codec: Codec, moment_bytes: float) -> None:
    for dtype, low_bytes in ((torch.bfloat16, 2), (torch.float32, 0)):
        matrix, norm = nn.Parameter(torch.zeros(512, 1024, dtype=dtype)), nn.Parameter(torch.zeros(1024, dtype=dtype))
        adamw = ShardedOptimizer({"matrix": matrix}, betas=(0.9, 0.95), eps=1e-8, decay=0.0, moments=codec)
        assert adamw.state_bytes == (low_bytes + moment_bytes) * matrix.numel()
        both = ShardedOptimizer({"matrix": matrix, "norm": norm}, betas=(0.9, 0.95), eps=1e-8, decay=0.0, moments=codec)
        vector_bytes = 4 if codec == "bf16" else 8
        assert both.state_bytes - adamw.state_bytes == (low_bytes + vector_bytes) * norm.numel()


def test_blocks_of_a_row_that_does_not_divide() -> None:
    assert [blocks_in(row) for row in (64, 256, 257, 1000)] == [1, 1, 2, 4]
    adamw = ShardedOptimizer(
        {"w": nn.Parameter(torch.zeros(3, 300))}, betas=(0.9, 0.95), eps=1e-8, decay=0.0, moments="int8"
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in adamw.tensors().items()}
    assert shapes == {"w.m": (3, 300), "w.v": (3, 300), "w.m_scale": (3, 2), "w.v_scale": (3, 2)}


@pytest.fixture(scope="module")
def train() -> Callable[[Codec, int], float]:
    """Loss, on data not trained on, of a small network that learns another's noisy outputs, by codec and seed."""

    def run(codec: Codec, seed: int) -> float:
        torch.manual_seed(seed)
        teacher = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 16))
        x = torch.randn(4096, 32)
        labels = torch.distributions.Categorical(logits=6 * teacher(x).detach()).sample()
        model = nn.Sequential(nn.Linear(32, 300), nn.GELU(), nn.Linear(300, 16))
        adamw = ShardedOptimizer(dict(model.named_parameters()), betas=(0.9, 0.95), eps=1e-8, decay=0.0, moments=codec)
        loss_of = nn.CrossEntropyLoss()
        for step in range(200):
            batch = torch.randint(0, 3072, (256,))
            loss_of(model(x[batch]), labels[batch]).backward()
            adamw.step(lr=5e-3 * (1 - step / 200))
            adamw.gradients.clear()
        with torch.no_grad():
            return float(loss_of(model(x[3072:]), labels[3072:]))

    return run


@pytest.mark.slow
def test_loss_is_within_half_a_percent_of_fp32_moments(train: Callable[[Codec, int], float]) -> None:
    codecs: tuple[Codec, ...] = ("fp32", "bf16", "int8")
    losses = {codec: [train(codec, seed) for seed in range(3)] for codec in codecs}
    assert max(losses["fp32"]) < 0.85 * math.log(16)  # where it started: something was learnt
    for codec in codecs[1:]:
        assert sum(losses[codec]) / sum(losses["fp32"]) == pytest.approx(1.0, abs=0.005), codec
