"""The Muon update: momentum of a matrix, made orthogonal by a Newton-Schulz iteration, in torch operations.

Update (K. Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024; "Muon is scalable for LLM training",
arXiv 2502.16982, for the second of the learning rates), with Nesterov's momentum, as in ``torch.optim.Muon``::

    g = scale * gradient
    m = m + (1 - momentum) (g - m)
    u = g + momentum (m - g)                      in fp32, then rounded to bf16
    o = orthogonalised(u)                         of the whole matrix, in bf16 or, where that is slower, fp32
    w = w (1 - lr decay) - adjusted(lr) o         in fp32, on the master (``adamw``)

Momentum and weights are updated element by element, in parts; only what lies between takes the whole matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tonnage.host.moments import UPDATE_ELEMENTS
from tonnage.kernels.adamw import join, signed, split
from tonnage.kernels.moments import Momentum, cut
from tonnage.kernels.widening import processor_is_slow

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the quintic iteration: its slope at zero is as steep as can be."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7


@dataclass(frozen=True)
class Muon:
    """What the rule is told."""

    momentum: float = 0.95
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """By what the learning rate is multiplied: the root of rows over columns, at least 1; or what makes the root mean
    square of the update that of AdamW's, 0.2 times the root of the larger side."""

    def adjusted(self, lr: float, shape: torch.Size) -> float:
        """The learning rate of a matrix of a shape."""
        rows, columns = shape
        if self.adjust_lr == "original":
            return lr * math.sqrt(max(1.0, rows / columns))
        return lr * 0.2 * math.sqrt(max(rows, columns))


@torch.no_grad()
def orthogonalised(matrix: Tensor) -> Tensor:
    """A bf16 matrix with its singular values between about 0.7 and 1.2; what is given is left as it is."""
    lies = matrix.size(0) <= matrix.size(1)
    x = (matrix if lies else matrix.T).to(iteration_dtype(matrix.device.type))
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if lies else x.T).to(matrix.dtype)


def iteration_dtype(device_type: str) -> torch.dtype:
    """The type in which ``orthogonalised`` computes: fp32 on processors whose products of bf16 are slower."""
    return torch.float32 if device_type == "cpu" and processor_is_slow(torch.bfloat16) else torch.bfloat16


def orthogonal_flops(shape: tuple[int, ...]) -> float:
    """Additions and multiplications of ``orthogonalised`` for a matrix of a shape."""
    small, large = sorted(shape)
    return ITERATIONS * (4.0 * small * small * large + 2.0 * small**3)


@torch.no_grad()
def add_momentum(
    moment: Momentum, gradient: Tensor, update: Tensor, momentum: float, scale: float, key: int, first: int
) -> None:
    """Add a flat ``gradient`` to the momentum of as many elements, and write what comes of it to ``update``, bf16.

    ``key`` and ``first`` are those of the random bits, as for ``adamw.Hyper``.
    """
    device = gradient.device
    key_there = torch.full((), signed(key), dtype=torch.int32, device=device)
    for start, stop in cut(gradient.numel(), moment.row, UPDATE_ELEMENTS):
        part, g = moment.part(start, stop), gradient[start:stop].float() * scale
        m = _between(part.decoded(), g, 1 - momentum)
        update[start:stop] = _between(g, m, momentum)
        part.encode(m, key_there, torch.full((), signed(first + start), dtype=torch.int32, device=device))


def _between(first: Tensor, last: Tensor, share: float) -> Tensor:
    """fp32 numbers a ``share`` of the way from ``first`` to ``last``, in the bits of ``torch.lerp``: from the nearer of
    them, product and sum rounded once. Written out, since torch does not promise them for parts of a tensor."""
    way = torch.tensor(share, dtype=torch.float32)
    start, factor = (first, way) if share < 0.5 else (last, way - 1)
    return ((last - first).double().mul_(float(factor)).add_(start)).float()


@torch.no_grad()
def add_update(weight: Tensor, low: Tensor | None, update: Tensor, lr: float, keep: float) -> None:
    """Multiply weights, flat, by ``keep`` and subtract ``lr`` times the ``update`` of as many elements."""
    for start in range(0, weight.numel(), UPDATE_ELEMENTS):
        part = slice(start, start + UPDATE_ELEMENTS)
        master = weight[part] if low is None else join(weight[part], low.view(-1)[part])
        master = master * keep - update[part].float() * lr
        if low is None:
            weight[part] = master
        else:
            high, rest = split(master, weight.dtype)
            weight[part] = high
            low.view(-1)[part] = rest
