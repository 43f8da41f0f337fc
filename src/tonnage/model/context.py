"""Rows whose tokens several ranks divide (context parallelism), and what their attention exchanges.

Each rank has a slice of every row, all of the same length, and computes all that a token needs by itself there. Only
attention needs other tokens: ranks exchange, so that each has all tokens of a part of the heads and computes these as
ever, and they exchange back (Ulysses; Jacobs et al. 2023, arXiv:2309.14509):

    projections          attention             projection
    all heads,    ──>    some heads,    ──>    all heads,
    some tokens          all tokens            some tokens

So documents, windows, caps and sinks are what they are on one rank, and every rank has as much to do. Keys and values
of fewer heads than there are ranks go to several of these. The hidden states from which targets are predicted go to
ranks in equal shares, for the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, slice], Tensor]
"""Attention of whole rows, of which a rank has some heads: (1, heads, tokens, head_dim) in, (1, tokens, heads, size)
out. The slice says which of the heads of queries they are."""


@dataclass(frozen=True)
class Context:
    """The ranks that divide the tokens of a row."""

    group: str
    """Name of their process group, as collectives know it."""
    size: int
    rank: int
    """This one among them."""

    def slice_of(self, tokens: int) -> slice:
        """This rank's part of a row of so many tokens, which they divide evenly."""
        each, rest = divmod(tokens, self.size)
        assert not rest, "rows are filled up to a multiple of the ranks that divide them"
        return slice(self.rank * each, (self.rank + 1) * each)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, whole: Attend) -> Tensor:
        """Attention of this rank's tokens to all of the row: (1, heads, tokens, head_dim) in, (1, tokens, heads, size)
        out."""
        heads = query.shape[1]
        assert heads % self.size == 0, "a plan divides rows among as many ranks as divide the heads"
        times = copies_of_heads(key.shape[1], self.size)
        query, key, value = self._to_heads(query, 1), self._to_heads(key, times), self._to_heads(value, times)
        output: Tensor = _ToTokens.apply(whole(query, key, value, self.slice_of(heads)), self)  # type: ignore[no-untyped-call]
        return output

    def _to_heads(self, tensor: Tensor, times: int) -> Tensor:
        exchanged: Tensor = _ToHeads.apply(tensor, self, times)  # type: ignore[no-untyped-call]
        return exchanged

    def moved(self, rows: Tensor, to: Sequence[int], coming: Sequence[int]) -> Tensor:
        """So many ``rows`` given to each rank, in order, and so many from each: (rows, size)."""
        received: Tensor = _Moved.apply(rows, self, to, coming)  # type: ignore[no-untyped-call]
        return received

    def total(self, numbers: Tensor) -> Tensor:
        """``numbers`` summed over the ranks; a new tensor, without gradient."""
        summed = torch.ops._c10d_functional.all_reduce(numbers.contiguous(), "sum", self.group)
        total: Tensor = torch.ops._c10d_functional.wait_tensor(summed)
        return total

    def exchange(self, parts: Tensor) -> Tensor:
        """Send a part to each rank, and receive one from each: (ranks, ...) in and out."""
        sizes = [parts.shape[1]] * self.size
        return self.sent(parts.flatten(0, 1), sizes, sizes).view_as(parts)

    def sent(self, rows: Tensor, to: Sequence[int], coming: Sequence[int]) -> Tensor:
        """``moved`` without gradient."""
        received = torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), coming, to, self.group)
        here: Tensor = torch.ops._c10d_functional.wait_tensor(received)
        return here


def copies_of_heads(heads: int, size: int) -> int:
    """How often heads of keys and values are sent, so that ``size`` ranks have as many each, with the heads of queries
    that go with them."""
    return size // gcd(heads, size)


def _by_heads(tensor: Tensor, size: int) -> Tensor:
    """Heads apart: (1, tokens, heads, head_dim) to (size, tokens, heads / size, head_dim), in one piece."""
    _, tokens, heads, head_dim = tensor.shape
    return tensor.reshape(tokens, size, heads // size, head_dim).transpose(0, 1).contiguous()


def _together(parts: Tensor) -> Tensor:
    """``_by_heads`` taken back, in one piece."""
    size, tokens, heads, head_dim = parts.shape
    return parts.transpose(0, 1).reshape(1, tokens, size * heads, head_dim)


class _ToHeads(torch.autograd.Function):
    """All heads of some tokens to some heads of all tokens, (1, heads, tokens, head_dim); each head ``times`` over."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: Context, times: int) -> Tensor:
        ctx.context, ctx.times = context, times
        by_token = tensor.transpose(1, 2)
        if times > 1:
            by_token = by_token.repeat_interleave(times, dim=2)
        received = context.exchange(_by_heads(by_token, context.size))
        return received.flatten(0, 1).unsqueeze(0).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        size = ctx.context.size
        by_token = gradient.transpose(1, 2).contiguous()
        own = _together(ctx.context.exchange(by_token.view(size, -1, *by_token.shape[2:])))
        if ctx.times > 1:
            own = own.unflatten(2, (-1, ctx.times)).sum(3)
        return own.transpose(1, 2), None, None


class _ToTokens(torch.autograd.Function):
    """Some heads of all tokens to all heads of some tokens, (1, tokens, heads, head_dim)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: Context) -> Tensor:
        ctx.context = context
        parts = tensor.contiguous().view(context.size, -1, *tensor.shape[2:])
        return _together(context.exchange(parts))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        received = ctx.context.exchange(_by_heads(gradient, ctx.context.size))
        return received.flatten(0, 1).unsqueeze(0), None


class _Moved(torch.autograd.Function):
    """Rows that other ranks have, and theirs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, context: Context, to: Sequence[int], coming: Sequence[int]) -> Tensor:
        ctx.context, ctx.to, ctx.coming = context, to, coming
        return context.sent(rows, to, coming)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.context.sent(gradient, ctx.coming, ctx.to), None, None, None
