"""AdamW's update on the device beside the CPU's loops: three codecs, whole and split masters."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from tonnage.kernels import adamw as kernels
from tonnage.kernels.adamw import Hyper, join
from tonnage.kernels.moments import Codec, Moments, decode
from tonnage.prove.proof import Proof

SHAPE = (96, 1000)
STEPS = 10
CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8")


def prove(proof: Proof) -> None:
    """From one state after each step, so that no difference grows."""
    for dtype, split in ((torch.float32, "fp32 weights"), (torch.bfloat16, "bf16 weights, split masters")):
        for codec in CODECS:
            _one(proof, codec, dtype, f"{split}, {codec} moments")


def _one(proof: Proof, codec: Codec, dtype: torch.dtype, case: str) -> None:
    generator = torch.Generator().manual_seed(0)
    cpu = torch.device("cpu")
    weight = torch.randn(SHAPE, generator=generator).to(dtype)
    low = torch.zeros(SHAPE, dtype=torch.int16) if dtype == torch.bfloat16 else None
    moments = Moments.zeros(codec, SHAPE, cpu)
    hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, step=1, scale=0.7, key=4_000_000_000)
    ulps = differing = other_bits = 0.0
    for step in range(1, (3 if proof.brief else STEPS) + 1):
        gradient = torch.randn(SHAPE, generator=generator)
        now = replace(hyper, step=step, key=hyper.key + step)
        copies = _there(weight, low, moments, proof.device)
        eager, before = deepcopy(copies), _master(weight, low).clone()
        kernels.update(weight, low, moments, gradient, now)
        on_device = gradient.to(proof.device)
        if proof.on_gpu:
            kernels.update(*copies, on_device, now)
        else:  # torch's operations stand in for the device
            kernels.update_torch(*copies, on_device, now)
        kernels.update_torch(*eager, on_device, now)
        ulps = max(ulps, _ulps(before, _master(weight, low), _master(*copies[:2])))
        differing = max(differing, _differing(moments, copies[2]) / math.prod(SHAPE))
        unlike = int((_master(weight, low) != _master(*eager[:2])).sum())
        other_bits += unlike + _differing(moments, eager[2])
    proof.found("update" if proof.on_gpu else "update, torch", case, ulps)
    proof.found("update, moments", case, differing)
    if proof.on_gpu:
        proof.found("update, bits", case, other_bits)


def _there(
    weight: Tensor, low: Tensor | None, moments: Moments, device: torch.device
) -> tuple[Tensor, Tensor | None, Moments]:
    return weight.clone().to(device), None if low is None else low.clone().to(device), _moved(moments, device)


def _moved(moments: Moments, device: torch.device) -> Moments:
    parts = {name: part.clone().to(device) for name, part in moments.named().items()}
    return Moments(parts["m"], parts["v"], parts.get("m_scale"), parts.get("v_scale"), moments.row)


def _master(weight: Tensor, low: Tensor | None) -> Tensor:
    return (weight if low is None else join(weight, low)).cpu().view(-1)


def _ulps(before: Tensor, one: Tensor, other: Tensor) -> float:
    """The largest distance, in steps between neighbouring fp32 numbers of the size that the master had before or has
    now, or of the step between, whichever is largest: where they nearly cancel, what is left is as inexact."""
    size = torch.stack([before.abs(), one.abs(), (one - before).abs()]).amax(0).double()
    step = torch.exp2(torch.floor(torch.log2(size.clamp_min(1e-30))) - 23)
    return float(((one.double() - other.double()).abs() / step).max())


def _differing(one: Moments, other: Moments) -> int:
    """Moments that are not the same by more than a last bit of a scale or an fp32 number."""
    count, there = 0, _moved(other, torch.device("cpu"))
    for mine, theirs in zip(decode(one), decode(there), strict=True):
        count += int((~torch.isclose(mine, theirs, rtol=1e-6, atol=0.0)).sum())
    return count
