"""Keys and values of documents that go on token by token, for attention that is ours (``attention.packed_attention``).

A row of a forward pass then holds, side by side, one token of every document that goes on and all tokens of every
document that begins:

    slot     0  1  2    3             4
    row      t  t  t  | prompt of 3 | prompt of 4        t: the token after what is kept of the slot

Documents that go on are in the first slots, in their order; those that begin take the next ones. What is kept lies in
two tensors for each attention layer, (slots, heads, tokens, size of a head), of which a document fills up the first
tokens of its slot. Nothing here depends on where the weights are: each worker keeps what its own layers and heads made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class Store:
    """What is kept of all layers, for at most ``slots`` documents of at most ``tokens`` tokens."""

    def __init__(self, slots: int, tokens: int) -> None:
        self.slots, self.tokens = slots, tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Memory of a layer for keys and values that are like these, (1, heads, tokens, size)."""
        if number not in self._layers:
            shapes = ((self.slots, tensor.shape[1], self.tokens, tensor.shape[3]) for tensor in (key, value))
            # Zeros: what a slot does not have yet is multiplied by weights of zero, and no number times zero is none.
            self._layers[number] = (key.new_zeros(next(shapes)), value.new_zeros(next(shapes)))
        return self._layers[number]

    def move(self, source: int, to: int) -> None:
        """Let a document have another slot."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[to] = tensor[source]

    def resize(self, slots: int, tokens: int) -> None:
        """Other bounds, which all documents that are kept are within."""
        both = min(slots, self.slots), min(tokens, self.tokens)
        for number, tensors in self._layers.items():
            new = [tensor.new_zeros(slots, tensor.shape[1], tokens, tensor.shape[3]) for tensor in tensors]
            for tensor, before in zip(new, tensors, strict=True):
                tensor[: both[0], :, : both[1]] = before[: both[0], :, : both[1]]
            self._layers[number] = (new[0], new[1])
        self.slots, self.tokens = slots, tokens


@dataclass(frozen=True)
class Cached:
    """What a row adds to a store."""

    store: Store
    before: tuple[int, ...]
    """Tokens that are kept of each document that goes on; these are the first parts of the row, of one token each."""
    beginning: int
    """How many parts after them begin a document."""

    def positions(self, lengths: Sequence[int]) -> Tensor:
        """Place of every token of a row in its document, int64 (tokens,)."""
        going = torch.tensor(self.before, dtype=torch.int64)
        return torch.cat([going, *(torch.arange(length) for length in lengths[len(self.before) :])])

    def put(self, number: int, key: Tensor, value: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of a row, (1, heads, tokens, size); returns the memory of the layer."""
        layer = self.store.layer(number, key, value)
        going = len(self.before)
        for memory, new in zip(layer, (key, value), strict=True):
            if going:
                places = torch.tensor(self.before, device=new.device)
                memory[torch.arange(going, device=new.device), :, places] = new[0, :, :going].transpose(0, 1)
            at = going
            for slot, length in enumerate(lengths[going : going + self.beginning], start=going):
                memory[slot, :, :length] = new[0, :, at : at + length]
                at += length
        return layer

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """Which kept tokens each document that goes on sees, its own new one among them: bool (going, tokens)."""
        last = torch.tensor(self.before, device=device)[:, None]
        place = torch.arange(max(self.before) + 1, device=device)
        seen = place <= last
        return seen if window is None else seen & (place > last - window)


@dataclass(frozen=True)
class Scores:
    """What scores of queries and keys go through on their way to weights."""

    scaling: float
    window: int | None
    """Tokens that a token sees, itself among them."""
    softcap: float | None
    """They are squashed to (-softcap, softcap), as Gemma 2 does."""
    sinks: Tensor | None
    """(heads,): of each head a score of nothing, which stands beside the others, as in gpt-oss."""
    dropout: float

    @property
    def are_plain(self) -> bool:
        """Whether they are scaled and nothing else, where the window shows all."""
        return self.softcap is None and self.sinks is None and not self.dropout

    def weights(self, query: Tensor, key: Tensor, mask: Tensor, sinks_shape: tuple[int, ...]) -> Tensor:
        """Weights (..., queries, keys), before dropout, of the keys that ``mask`` shows. ``sinks_shape`` is that in
        which sinks stand beside scores."""
        scores = query @ key.transpose(2, 3) * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            nothing = self.sinks.view(sinks_shape).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, nothing.to(scores.dtype)], dim=-1)
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """Attention of one token of each of several documents to what is kept of them: (1, documents, heads, size).

    Shapes: ``query`` (1, heads, documents, head_dim); ``key`` and ``value`` (documents, key_value_heads, tokens, size);
    ``visible`` bool (documents, tokens).
    """
    documents, heads_kept, _, size = key.shape
    groups = query.shape[1] // heads_kept
    # Heads that share keys and values are queries of one head: nothing is repeated.
    queries = query[0].transpose(0, 1).reshape(documents, heads_kept, groups, size)
    mask = visible[:, None, None, :]
    if scores.softcap is None and scores.sinks is None:
        output = F.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scores.scaling)
    else:
        output = scores.weights(queries, key, mask, (1, heads_kept, groups, 1)) @ value
    return output.reshape(1, documents, heads_kept * groups, value.shape[3])
