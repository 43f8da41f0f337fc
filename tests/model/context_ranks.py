"""Attention whose heads ranks exchange, beside attention of the whole row: says by how much it is off."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tonnage.model.attention import PackedRow, packed_attention
from tonnage.model.context import Context
from tonnage.parallel.world import context_of, join_world

LENGTHS = (7, 3, 14)
"""Of documents; the second lies on both sides of two ranks' border, the last is longer than the window."""


class Kind(NamedTuple):
    heads: int
    keys: int
    window: int | None = None
    sinks: bool = False
    of_values: int = 8
    softcap: float | None = None
    dtype: torch.dtype = torch.float32


KINDS = (
    Kind(4, 4),
    Kind(4, 2),
    Kind(4, 1),
    Kind(12, 6),
    Kind(4, 2, window=5),
    Kind(4, 2, sinks=True),
    Kind(4, 4, of_values=4),
    Kind(8, 2, softcap=3.0),
    Kind(4, 2, dtype=torch.bfloat16),
)


def main(_: list[str]) -> None:
    with join_world() as world:
        context = context_of(world.mesh, world.size)
        for kind in KINDS:
            off = _off(kind, context)
            assert off <= (1e-6 if kind.dtype == torch.float32 else 0.02), (kind, off)


def _off(kind: Kind, context: Context) -> float:
    """By how much outputs and gradients of a kind of attention are off, relative to the largest."""
    chance, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance).to(kind.dtype)

    operands = [
        drawn(1, kind.heads, tokens, 8),
        drawn(1, kind.keys, tokens, 8),
        drawn(1, kind.keys, tokens, kind.of_values),
    ]
    sinks = drawn(kind.heads) if kind.sinks else None
    upstream = drawn(1, tokens, kind.heads, kind.of_values)
    own = context.slice_of(tokens)
    row = PackedRow(LENGTHS)
    whole = _computed(operands, sinks, kind, PackedRow(LENGTHS), upstream)
    row.context = context
    part = _computed([one[:, :, own] for one in operands], sinks, kind, row, upstream[:, own])
    expected = [whole[0][:, own], *(one[:, :, own] for one in whole[1:4])]
    if sinks is not None:  # each rank has the gradient of its own heads
        dist.all_reduce(part[4])
        expected.append(whole[4])
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(part, expected, strict=True))


def _computed(
    operands: list[Tensor], sinks: Tensor | None, kind: Kind, row: PackedRow, upstream: Tensor
) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in operands]
    beside = None if sinks is None else sinks.clone().requires_grad_()
    query, key, value = leaves
    output, _ = packed_attention(
        nn.Identity(), query, key, value, None, sliding_window=kind.window, softcap=kind.softcap, s_aux=beside, row=row
    )
    output.backward(upstream)
    gradients = [one.grad for one in (*leaves, *([] if beside is None else [beside]))]
    assert all(one is not None for one in gradients)
    return [output.detach(), *(one for one in gradients if one is not None)]
