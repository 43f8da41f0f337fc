"""Whether tokens of a row may be computed apart, but for attention: a tiny model is asked, as in ``isolation``.

It computes a row as a whole, and what goes into its attention and comes out is kept. Then it computes each half of the
row by itself, where attention gives what it gave these tokens before. If the halves are what the whole was, in and out
of attention, nothing else connects tokens, and workers may have a slice each (``model.context``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tonnage.model.context import Attend, Context
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel

HALVES = 2
OFF = 1e-3
"""By how much a half may be off, relative to the largest number of the whole: rounding of a tiny model in fp32 is less,
and what other tokens add to one is more."""


@dataclass(frozen=True)
class _Whole(Context):
    """Keeps what attention is given and gives, in the order of its layers."""

    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, whole: Attend) -> Tensor:
        output = whole(query, key, value, slice(0, query.shape[1]))
        self.kept.append((query, key, value, output.transpose(1, 2)))
        return output


@dataclass(frozen=True)
class _Half(Context):
    """Gives what attention gave, and compares what it is given."""

    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    """By how much that of each layer is."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, whole: Attend) -> Tensor:
        *operands, output = self.kept[len(self.off)]
        own = self.slice_of(output.shape[2])
        self.off.append(
            max(_off(half, of_all, own) for half, of_all in zip((query, key, value), operands, strict=True))
        )
        return output[:, :, own].transpose(1, 2)


def _off(half: Tensor, whole: Tensor, own: slice) -> float:
    """By how much a half is off what these tokens have in the whole: (..., tokens, size)."""
    return float((half - whole[:, :, own]).abs().max() / whole.abs().max().clamp(min=1e-9))


@torch.no_grad()
def why_undivided(make_model: Callable[[], LossModel], row: MicroBatch) -> str:
    """What connects tokens of ``row`` beside attention; empty if nothing does. ``make_model`` makes it anew for each
    forward pass, as some keep how long documents were so far."""
    whole = _Whole("", 1, 0)
    filled = row.rounded(HALVES)
    states = make_model().states(filled.divided(whole)).unsqueeze(1)
    for rank in range(HALVES):
        half = _Half("", HALVES, rank, whole.kept)
        own = half.slice_of(states.shape[2])
        of_states = _off(make_model().states(filled.divided(half)).unsqueeze(1), states, own)
        off = [*half.off, of_states]
        if len(half.off) != len(whole.kept):
            return f"attention of {len(half.off)} layers where it was {len(whole.kept)}"
        if not max(off) <= OFF:
            layer = next(number for number, of_layer in enumerate(off) if not of_layer <= OFF)
            where = f"what comes to attention {layer}" if layer < len(half.off) else "what leaves the last block"
            return f"half of a row by itself: {where} is off by {off[layer]:.2g}"
    return ""
