"""Inputs of a layer turned by trained rotations (OFT): ``x R``, where R has orthogonal blocks on its diagonal.

So many inputs as a block has are rotated together (Qiu et al. 2023, "Controlling Text-to-Image Diffusion by Orthogonal
Finetuning"). A block is the Cayley transform (I + Q)(I - Q)^-1 of a skew-symmetric matrix Q, whose numbers above the
diagonal are trained; the inverse is the first terms of its Neumann series (Qiu et al. 2025, "Orthogonal Finetuning Made
Scalable"), as peft has them:

    R = I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4

R - I is computed in fp32 and rounded without the ones of the diagonal, beside which 16 bits have no room for it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def turns_of(upper: Tensor, size: int) -> Tensor:
    """R - I for the numbers above the diagonal of each block: (blocks, size * (size - 1) / 2) -> fp32 (blocks, size,
    size)."""
    rows, columns = torch.triu_indices(size, size, 1, device=upper.device)
    above = upper.new_zeros(len(upper), size, size, dtype=torch.float32)
    above[:, rows, columns] = upper.float()
    skew = above - above.transpose(-1, -2)
    square = torch.bmm(skew, skew)
    return 2 * (skew + square + torch.bmm(square, skew)) + torch.bmm(square, square)


def rotated(inputs: Tensor, upper: Tensor) -> Tensor:
    """``inputs @ R``, in the type of ``inputs``. Shapes: ``inputs`` (..., in), ``upper`` as of ``turns_of``."""
    size = inputs.shape[-1] // len(upper)
    blocks, turns = inputs.unflatten(-1, (len(upper), size)), turns_of(upper, size).to(inputs.dtype)
    return inputs + torch.einsum("...bi,bij->...bj", blocks, turns).flatten(-2)


def rotated_columns(weight: Tensor, upper: Tensor) -> Tensor:
    """``weight @ R'``: what computes from inputs as they are what ``weight`` (out, in) computes from rotated ones."""
    size = weight.shape[1] // len(upper)
    blocks = weight.unflatten(-1, (len(upper), size))
    return weight + torch.einsum("obj,bij->obi", blocks, turns_of(upper, size)).flatten(-2)
