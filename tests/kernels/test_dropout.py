"""Dropout by hashes: the loop draws what torch and what plain integers draw, evenly and independently, and an addition
with it has the gradients of what it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tonnage.kernels import adapted
from tonnage.kernels.adapted import adapted_linear
from tonnage.kernels.dropout import Mask, drop_, kept, salt_of, threshold_of, token_keys
from tonnage.kernels.quantized import pack, unpack

MOST = (1 << 64) - 1


def splitmix64(seed: int, number: int) -> int:
    """What the generator of that name gives as its output of a number, from 1."""
    z = (seed + number * 0x9E3779B97F4A7C15) & MOST
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MOST
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MOST
    return z ^ (z >> 31)


def mask_of(rows: int, *, draw: int = 7, layer: str = "layer", first: int = 0, probability: float = 0.3) -> Mask:
    """Of that many tokens of a document."""
    keys = token_keys(draw, np.full(rows, 3), np.arange(rows))
    return Mask(keys, salt_of(layer), first, threshold_of(probability))


def test_numbers_are_those_of_splitmix64() -> None:
    assert [splitmix64(1234567, number) for number in (1, 2)] == [6457827717110365317, 3203168211198807973]  # published
    keys = token_keys(11, np.array([5, 5, -1]), np.array([0, 8, 2]))
    wanted = [splitmix64(splitmix64(11, document + 1), at + 1) for document, at in ((5, 0), (5, 8), (-1, 2))]
    assert keys.view(torch.uint64).tolist() == wanted
    mask = Mask(keys, salt_of("model.layers.0.q_proj"), 0, threshold_of(0.3))
    found = kept(mask, 200)
    for row, key in enumerate(wanted):
        state = splitmix64(key ^ int(mask.salt), 0)
        for channel in range(200):
            block, within = divmod(channel, 128)
            drawn = splitmix64(state, block * 32 + within % 32 + 1) >> 16 * (within // 32) & 0xFFFF
            assert bool(found[row, channel]) == (drawn >= round(0.3 * 65536))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loop_drops_what_torch_would(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for first, size in ((0, 300), (37, 300), (128, 128), (130, 5), (96, 1)):
        rows, mask = torch.randn(50, size).to(dtype), mask_of(50, first=first)
        wanted = torch.where(kept(mask, size), rows, 0)
        assert torch.equal(drop_(rows.clone(), mask), wanted)
        whole = kept(mask_of(50), first + size)
        assert torch.equal(kept(mask, size), whole[:, first:])


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_numbers_are_dropped_evenly_and_independently(probability: float) -> None:
    rows, channels = 2000, 300
    number, share = rows * channels, 1 - threshold_of(probability) / 65536
    sigma = math.sqrt(share * (1 - share) / number)

    def centred(**named: int | str) -> Tensor:
        return kept(mask_of(rows, probability=probability, **named), channels).double() - share  # type: ignore[arg-type]

    one = centred()
    assert abs(float(one.mean())) < 4 * sigma
    for along, count in ((0, rows), (1, channels)):
        assert float(one.mean(along).abs().max()) < 6 * math.sqrt(share * (1 - share) / count)
    others = [centred(draw=8), centred(layer="another"), one.roll(1, 0), *(one.roll(by, 1) for by in (1, 4, 32, 128))]
    for other in others:
        assert abs(float((one * other).mean())) < 4 * share * (1 - share) / math.sqrt(number)


def additions(dtype: torch.dtype, form: str | None) -> list[Tensor]:
    """A layer's inputs, which lie apart, its weight, bias, both matrices, and a gradient of its outputs."""
    torch.manual_seed(0)
    weight = torch.randn(48, 128) / 11
    if form is not None:
        weight = unpack(pack(weight, form), torch.float32)
    inputs = torch.randn(2, 35, 160)[..., 20:148]
    return [one.to(dtype) for one in (inputs, weight, torch.randn(48), torch.randn(4, 128), torch.randn(48, 4))]


@pytest.mark.parametrize("form", [None, "nf4"])
@pytest.mark.parametrize("piece", [1, 20 * 128, 1 << 19])
def test_an_addition_has_the_gradients_of_dropout(
    form: str | None, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapted, "PIECE", piece)
    inputs, weight, bias, down, up = additions(torch.float32, form)
    mask, upstream = mask_of(70, first=9), torch.randn(2, 35, 48)
    x, a, b = (one.clone().requires_grad_() for one in (inputs, down, up))
    output = adapted_linear(x, weight if form is None else pack(weight, "nf4"), bias, a, b, 1.5, mask)
    output.backward(upstream)
    their_x, their_a, their_b = (one.clone().requires_grad_() for one in (inputs, down, up))
    dropped = their_x * kept(mask, 128).view(2, 35, 128) / mask.kept_share
    wanted = F.linear(their_x, weight, bias) + 1.5 * F.linear(F.linear(dropped, their_a), their_b)
    wanted.backward(upstream)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-4)
    for mine, theirs in ((x, their_x), (a, their_a), (b, their_b)):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_addition_in_16_bits_is_that_of_fp32_rounded(dtype: torch.dtype) -> None:
    given, mask = additions(dtype, None), mask_of(70)
    upstream, found = torch.randn(2, 35, 48).to(dtype), []
    for kind in (dtype, torch.float32):
        inputs, weight, bias, down, up = (one.to(kind, copy=True) for one in given)
        for one in (inputs, down, up):
            one.requires_grad_()
        output = adapted_linear(inputs, weight, bias, down, up, 1.5, mask)
        output.backward(upstream.to(kind))
        found.append([output.detach(), inputs.grad, down.grad, up.grad])
    for rounded, exact in zip(*found, strict=True):
        assert rounded is not None
        assert exact is not None
        assert float((rounded.float() - exact).norm()) < 1e-2 * float(exact.norm())
