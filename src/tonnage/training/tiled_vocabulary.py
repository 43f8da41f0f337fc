"""Embedding, vocabulary projection and cross-entropy where the weight comes in tiles of tokens (``parallel.tiled``).

The projection goes through the tiles twice. Forward, logarithms of sums of exponentials are carried on from tile to
tile, in fp32 (the online softmax of Milakov and Gimelshein 2018), and each target's logit is taken up where it comes
by. Backward, from the last tile to the first, logits are computed again, are turned into their own gradient in place,
and that is multiplied by the tile, which is summed in fp32, and by the hidden states, which leaves with the tile. In
memory there are logits of a chunk of tokens and of a tile of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tonnage.kernels.products import add_product, linear, product
from tonnage.parallel.tiled import Tile, TiledWeight
from tonnage.planning.profile import HEAD_CHUNK, HEAD_PIECE
from tonnage.training.vocabulary import Vocabulary


class TiledHead:
    """The projection of hidden states to a vocabulary whose rows come in tiles, and its cross-entropy.

    ``scale`` and ``softcap`` are of the logits, ``bias`` that of the ``head``, whose gradient is autograd's.
    """

    def __init__(self, weight: TiledWeight, head: nn.Linear, scale: float, softcap: float | None) -> None:
        self.weight, self._head, self._vocabulary = weight, head, Vocabulary(scale=scale, softcap=softcap)

    def loss(self, hidden: Tensor, targets: Tensor, target_weights: Tensor) -> Tensor:
        """As ``Head.loss``."""
        if not torch.is_grad_enabled():
            return (-self.log_probabilities(hidden, targets) * target_weights).sum()
        loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, self._head.bias, _anchor(hidden), targets, target_weights, self
        )
        return loss

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor, targets: Tensor, *, likeliest_of: list[Tensor] | None = None) -> Tensor:
        """As ``Head.log_probabilities``."""
        normaliser, picked, likeliest = self.look_at(hidden.detach(), targets)
        if likeliest_of is not None:
            likeliest_of.append(likeliest)
        return picked - normaliser

    @torch.no_grad()
    def likeliest(self, hidden: Tensor) -> Tensor:
        """As ``Head.likeliest``."""
        return self.look_at(hidden, hidden.new_zeros(len(hidden), dtype=torch.int64))[2]

    def look_at(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every row of hidden states the logarithm of the sum of exponentials of its logits and the logit of its
        target, both fp32, and the token with the largest logit, the first of several, int64."""
        normaliser = torch.full((len(hidden),), -math.inf, device=hidden.device)
        picked, largest = torch.zeros_like(normaliser), normaliser.clone()
        likeliest = torch.zeros_like(targets)
        for tile in self.weight.tiles():
            tokens = torch.cat([torch.arange(run.start, run.stop, device=hidden.device) for run in tile.rows])
            for rows in _chunks(len(hidden)):
                logits = self.logits(tile, hidden[rows])
                is_inside, places = tile.places_of(targets[rows, None])
                picked[rows] += torch.where(is_inside, logits.gather(1, places), 0.0)[:, 0]
                top, at = logits.max(1)
                best = tokens[at]
                better = (top > largest[rows]) | ((top == largest[rows]) & (best < likeliest[rows]))
                likeliest[rows] = torch.where(better, best, likeliest[rows])
                largest[rows] = torch.maximum(top, largest[rows])
                total = logits.sub_(top[:, None]).exp_().sum(1).log_().add_(top)
                normaliser[rows] = torch.logaddexp(normaliser[rows], total)
                del logits
        return normaliser, picked, likeliest

    def logits(self, tile: Tile, hidden: Tensor) -> Tensor:
        """Those of the tokens of a tile, fp32 (rows, tokens)."""
        bias = None if self._head.bias is None else torch.cat([self._head.bias.detach()[rows] for rows in tile.rows])
        return self._vocabulary.scale_and_cap(linear(hidden, tile.matrix, bias).float())

    def slopes(self, tile: Tile, hidden: Tensor, targets: Tensor, weights: Tensor, normaliser: Tensor) -> Tensor:
        """The gradient with respect to the logits, before scale and cap, fp32 (rows, tokens); ``targets``, ``weights``
        and ``normaliser`` are of each row."""
        logits = self.logits(tile, hidden)
        capped = self._vocabulary.slope_of_cap(logits)
        slopes = logits.sub_(normaliser[:, None]).exp_()
        is_inside, places = tile.places_of(targets[:, None])
        slopes.scatter_add_(1, places, -is_inside.float())
        slopes.mul_(weights[:, None] * self._vocabulary.scale)
        return slopes if capped is None else slopes.mul_(capped)


class _CrossEntropy(torch.autograd.Function):
    """``TiledHead.loss`` as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        targets: Tensor,
        target_weights: Tensor,
        head: TiledHead,
    ) -> Tensor:
        normaliser, picked, _ = head.look_at(hidden, targets)
        ctx.save_for_backward(hidden, targets, target_weights, normaliser)
        ctx.head, ctx.bias = head, bias
        return ((normaliser - picked) * target_weights).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, weights, normaliser = ctx.saved_tensors
        head: TiledHead = ctx.head
        need_hidden, need_bias, *_ = ctx.needs_input_grad
        trains, weights = head.weight.parameter.requires_grad, weights * upstream
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_bias = torch.zeros_like(ctx.bias, dtype=torch.float32) if need_bias else None
        for tile in head.weight.tiles(backwards=True):
            of_tile = tile.room() if trains else None
            for rows in _chunks(len(hidden)):
                slopes = head.slopes(tile, hidden[rows], targets[rows], weights[rows], normaliser[rows])
                if of_bias is not None:
                    _add_to_rows(of_bias, tile, slopes.sum(0))
                slopes = slopes.to(hidden.dtype)
                of_hidden[rows] += product(slopes, tile.matrix)
                if of_tile is not None:
                    add_product(of_tile[: slopes.shape[1]], slopes.t(), hidden[rows], HEAD_PIECE)
                del slopes
            if of_tile is not None:
                tile.add(of_tile)
                del of_tile
        bias = None if of_bias is None else of_bias.to(ctx.bias.dtype)
        return (of_hidden.to(hidden.dtype) if need_hidden else None), bias, *(None,) * 4


class _LookUp(torch.autograd.Function):
    """Rows of a tiled embedding."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, anchor: Tensor, weight: TiledWeight, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, -1 if padding is None else padding
        return look_up(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        ids, gradient = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        for tile in weight.places():
            of_tile = tile.room()
            is_inside, places = tile.places_of(ids)
            is_inside &= ids != ctx.padding
            of_tile.index_add_(0, places, gradient.float().masked_fill(~is_inside[:, None], 0.0))
            tile.add(of_tile)
            del of_tile
        return None, None, None, None


@torch.no_grad()
def look_up(ids: Tensor, weight: TiledWeight) -> Tensor:
    """The rows of ``ids``, int64 (...,), of a tiled embedding: (..., columns)."""
    rows = torch.zeros(*ids.shape, weight.columns, dtype=weight.dtype, device=ids.device)
    for tile in weight.tiles():
        is_inside, places = tile.places_of(ids)
        rows += F.embedding(places, tile.matrix).masked_fill_(~is_inside[..., None], 0.0)
    return rows


def look_up_in_tiles(embedding: nn.Embedding, weight: TiledWeight) -> None:
    """Let a token embedding look its rows up tile by tile."""
    embedding.forward = partial(_forward, embedding, embedding.forward, weight)  # type: ignore[method-assign]


def _forward(embedding: nn.Embedding, forward: Any, weight: TiledWeight, ids: Tensor) -> Tensor:
    """What the embedding does with its rows (some scale them) is its own affair."""
    padding = embedding.padding_idx
    if weight.parameter.requires_grad and torch.is_grad_enabled():
        rows: Tensor = _LookUp.apply(ids, _anchor(ids), weight, padding)  # type: ignore[no-untyped-call]
    else:
        rows = look_up(ids, weight)
    if type(embedding).forward is nn.Embedding.forward:
        return rows
    parameters, table = embedding._parameters, rows.view(-1, rows.shape[-1])
    whole = parameters["weight"]
    parameters["weight"], embedding.padding_idx = table, None  # type: ignore[assignment]
    try:
        output: Tensor = forward(torch.arange(len(table), device=ids.device).view(ids.shape))
    finally:
        parameters["weight"], embedding.padding_idx = whole, padding
    return output


def _anchor(like: Tensor) -> Tensor:
    """Something that autograd has a gradient of: of the weight it knows nothing."""
    return torch.zeros((), device=like.device, requires_grad=True)


def _chunks(num_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + HEAD_CHUNK, num_rows)) for start in range(0, num_rows, HEAD_CHUNK))


def _add_to_rows(total: Tensor, tile: Tile, values: Tensor) -> None:
    """Add what the rows of a tile have to those of the whole."""
    runs = tile.rows
    for rows, part in zip(runs, values.split([run.stop - run.start for run in runs]), strict=True):
        total[rows] += part
