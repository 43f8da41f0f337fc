"""MLPs of blocks over a row's tokens in tiles: what an MLP has between its two ends is there of one tile at a time.

That is the largest part of what a block holds, and it grows with the row. Here an MLP keeps its input alone. Forward it
goes through one tile after another and forgets what was between; backward it computes a tile again, and its gradients.
The values are those of the MLP called once. Gradients of its weights are sums over tiles, which are taken in fp32.

    forward   hidden ─┬─ tile 0 ─ MLP ─┬─ output       backward   per tile: MLP again, its gradient
                      └─ tile 1 ─ MLP ─┘                          of the tile's input, and of weights: added up

The input is kept by an operation of its own that comes before the tiles (``_Kept``). A block that is recomputed as a
whole stops once all that was kept is there again: so it does not run the MLP for an output that nobody needs, and the
MLP's forward pass runs twice in a step, not three times. Where a norm follows it, which keeps what the MLP puts out, it
runs three times.

These are tiles of the sequence. Tiles of weights (``tiled``) are another matter, and do not go with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tonnage.model.anatomy import mlps_of, norms_of
from tonnage.model.attention import computed_anew
from tonnage.model.dropout import Drawn

Walk = Callable[[Sequence[slice]], Iterable[slice]]
"""Of tiles, by their tokens, those that are computed: all, but where no number is computed."""


def tile_sequence(
    blocks: Sequence[nn.Module],
    tokens: int,
    drawn: Drawn | None = None,
    *,
    compiled: bool = False,
    walk: Walk = iter,
    parts: int = 1,
) -> None:
    """Let the MLPs of ``blocks`` compute so many ``tokens`` at a time; rows that have no more are computed as ever.

    ``drawn`` has the keys of tokens by which adapters drop: of ``parts`` that ranks have of a row, one after another,
    and of which a tile has as many tokens each. With ``compiled``, what is computed of a tile is, and a
    compiled block calls it as it is.
    """
    for block in blocks:
        mlps = mlps_of(block)
        for part in mlps if compiled or not mlps else [*mlps, *norms_of(block)]:  # compiled, a norm keeps little
            forward = torch.compile(part.forward, dynamic=True) if compiled else part.forward
            run = partial(_run, _Tiles(part, forward, tokens, drawn, walk, parts))
            part.forward = torch.compiler.disable(run) if compiled else run


def _run(tiles: _Tiles, *arguments: Tensor, **named: Tensor) -> Tensor:
    (hidden,) = (*arguments, *named.values())
    if hidden.numel() // hidden.shape[-1] <= tiles.tokens:
        whole: Tensor = tiles.compute(hidden)
        return whole
    trained = [parameter for parameter in tiles.part.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (trained or hidden.requires_grad):
        return tiles.forward(hidden)
    entering = _Kept.apply(hidden, *trained[:1])  # type: ignore[no-untyped-call]
    output: Tensor = _InTiles.apply(entering, tiles, *trained)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True)
class _Tiles:
    """A part of a block, and how its input is cut: after every so many ``tokens`` of all rows, one after another."""

    part: nn.Module
    compute: Callable[[Tensor], Tensor]
    tokens: int
    drawn: Drawn | None
    walk: Walk
    parts: int

    def forward(self, hidden: Tensor) -> Tensor:
        """What the part makes of ``hidden``, (rows, tokens, hidden), without gradients."""
        rows, output = _rows(hidden.detach()), torch.empty_like(hidden, memory_format=torch.contiguous_format)
        with torch.no_grad(), computed_anew():
            for tokens in self.of(rows):
                with self.drawing(tokens):
                    _rows(output)[:, tokens] = self.compute(rows[:, tokens])
        return output

    def of(self, rows: Tensor) -> Iterable[slice]:
        """The tokens of each tile of ``rows``, (1, tokens, hidden)."""
        length = rows.shape[1]
        return self.walk([slice(start, min(start + self.tokens, length)) for start in range(0, length, self.tokens)])

    def drawing(self, tokens: slice) -> AbstractContextManager[None]:
        """Within it, adapters drop what they drop of these tokens."""
        if self.drawn is None or self.drawn.keys is None:
            return nullcontext()
        return self.drawn.for_tokens(self.drawn.keys.unflatten(0, (self.parts, -1))[:, tokens].flatten())


def _rows(tensor: Tensor) -> Tensor:
    """All rows as one, (1, tokens, hidden)."""
    return tensor.reshape(1, -1, tensor.shape[-1])


class _Kept(torch.autograd.Function):
    """``hidden`` as it is, kept for the backward pass of who takes it next."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *beside: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


class _InTiles(torch.autograd.Function):
    """A part of a block whose parameters that are ``trained`` are given besides, so that each has its gradient once."""

    @staticmethod
    def forward(ctx: Any, entering: Tensor, tiles: _Tiles, *trained: Tensor) -> Tensor:
        ctx.keeper, ctx.tiles, ctx.trained = entering.grad_fn, tiles, trained
        return tiles.forward(entering)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tiles, trained = ctx.tiles, ctx.trained
        (hidden,) = ctx.keeper.saved_tensors
        rows, slopes = _rows(hidden), _rows(gradient)
        of_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        sums: list[Tensor | None] = [None] * len(trained)
        for tokens in tiles.of(rows):
            with torch.enable_grad(), tiles.drawing(tokens):
                tile = rows[:, tokens].detach().requires_grad_()
                output = tiles.compute(tile)
            of_tile, *of_trained = torch.autograd.grad(output, (tile, *trained), slopes[:, tokens], allow_unused=True)
            del output
            _rows(of_hidden)[:, tokens] = of_tile
            sums = list(map(_added, sums, of_trained))
            del of_tile, of_trained
        return of_hidden, None, *(_taken(sums, number, weight.dtype) for number, weight in enumerate(trained))


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """The sum of gradients of tiles; nothing where who computes them has added them up elsewhere."""
    if part is None:
        return total
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
    return total.add_(part)


def _taken(sums: list[Tensor | None], number: int, dtype: torch.dtype) -> Tensor | None:
    """A sum in another type, in place of which there is nothing among the ``sums`` from then on."""
    total, sums[number] = sums[number], None
    return None if total is None else total.to(dtype)
