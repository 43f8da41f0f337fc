"""Attention for packs: documents that lie side by side in one row and never see each other.

A micro-batch is one row of tokens, documents one after another, no padding. Positions restart at each document,
and attention is computed within each document only, so a packed document gets exactly the numbers it would get
alone. The function is registered with transformers under ``NAME`` through its ``AttentionInterface``; a name
that is not registered as a mask maker makes transformers build no mask at all, so no ``tokens x tokens`` matrix
ever exists.

* CPU, bf16: torch's fused kernel per document forward, five products backward (``_backward_of_documents``).
* CPU otherwise, and any dtype that the CUDA kernel does not take: one ``scaled_dot_product_attention`` per document.
* CUDA, bf16 or fp16: ``torch.nn.attention.varlen``, one kernel for the row.

The documents' lengths travel as keyword arguments through the model's own forward (``packing_arguments``).
What cannot be isolated is refused by ``check_packable``, never warned about.

Documents that begin with the same tokens may have these in the row once (``Shared``; CPU). What they go on with attends
to itself, as a document does, and to the prefix, all of it, in one more product for all of them together:

    row   prefix | rest of a | rest of b | ...     a's queries see prefix + rest of a, b's see prefix + rest of b

Both are softmaxes over a part of the keys; their outputs, weighed by the sums of their exponentials, are the whole one.
The backward pass needs no more than that sum, so each part has it by itself, and gradients add up. Prefixes may lie
within what goes on from others: each is one more part of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tonnage.errors import Problem, UserError
from tonnage.model.products import goes_through_fp32

NAME = "tonnage_packed"
ROUND_TO = 32
"""Documents are computed as if they had a multiple of so many tokens: for each size that it has not seen oneDNN
compiles loops, which takes milliseconds and keeps a megabyte."""
QUERY_ROWS = 512
"""Of a document at a time in the backward pass on the CPU: as many rows of weights exist."""
WEIGHTS_TOGETHER = 2**21
"""Of attention, at most, where several documents are computed at a time: 4 MB."""
NOWHERE = 1e4
"""Normaliser of a row that is not there: its weights are zero."""


def register() -> str:
    """Make ``packed_attention`` known to transformers; returns the name to build a model with."""
    # Compiled blocks call it as it is: lengths differ from pack to pack, and its kernels are fused already.
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    return NAME


@dataclass(frozen=True)
class Shared:
    """A part of a row that several documents begin with; the parts after it are what they go on with, some of which
    several of them may have in common again."""

    part: int
    """Its number in the row."""
    parts: int
    """How many after it go on from it."""


class PackedRow:
    """Where documents lie in a row. An object, because compiled code would take numbers among its arguments for
    constants, and be compiled anew for every row."""

    def __init__(self, lengths: tuple[int, ...], borders: Tensor | None = None, shared: Sequence[Shared] = ()) -> None:
        self.lengths = lengths
        """Tokens of each part: a document, what several have in common, or what one of these goes on with."""
        self.borders = borders
        """int32 (parts + 1,): first token of each part, and the end of the row; on CUDA only."""
        self.shared = shared
        ends = [0, *accumulate(lengths)]
        self.spans = [
            border for one in shared for border in (ends[one.part], ends[one.part + 1], ends[one.part + 1 + one.parts])
        ]
        """Of every prefix that documents share: its first token, the first after it, the first after the documents."""
        self.before = [0] * len(lengths)
        """Tokens of the prefixes that each part goes on from."""
        for one in shared:
            for part in range(one.part + 1, one.part + 1 + one.parts):
                self.before[part] += lengths[one.part]
        self.can_share = True
        """Whether attention so far could have let documents share prefixes."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(map(sum, zip(self.before, self.lengths, strict=True)))

    def positions(self) -> Tensor:
        """Place of every token in its document, int64 (tokens,)."""
        parts = zip(self.before, self.lengths, strict=True)
        return torch.cat([torch.arange(before, before + length) for before, length in parts])


def packing_arguments(lengths: Sequence[int], device: torch.device, shared: Sequence[Shared] = ()) -> dict[str, Any]:
    """Keyword arguments of the model's forward that describe one packed row.

    ``lengths``: tokens of each part of the row (``PackedRow``); their sum is the length of the row. ``position_ids``
    has shape (1, tokens) and restarts at zero in each document.
    """
    borders = None
    if device.type == "cuda":
        borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    row = PackedRow(tuple(lengths), borders, shared)
    return {"position_ids": row.positions().unsqueeze(0).to(device), "row": row}


def check_packable(model: PreTrainedModel) -> None:
    """Refuse a model whose attention cannot be told where documents end.

    Raises:
        UserError: the family does not take transformers' attention back ends.
    """
    if not model.is_backend_compatible():
        raise UserError(
            Problem(
                where=f"model type {model.config.model_type}",
                found=f"{type(model).__name__} does not accept an attention function from outside",
                needed="a family that supports transformers' attention back ends, so that packed documents "
                "can be kept from attending to each other",
                change="choose another model family",
            )
        )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    row: PackedRow | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document of a packed row.

    Shapes: ``query`` (1, heads, tokens, head_dim); ``key`` and ``value`` (1, key_value_heads, tokens, head_dim).
    Returns (1, tokens, heads, head_dim). ``sliding_window`` counts the token itself, as in transformers.
    """
    row = row or PackedRow((query.shape[2],))
    lengths = row.lengths
    sees_all = sliding_window is None or row.longest <= sliding_window
    plain = query.device.type == "cpu" and softcap is None and not dropout and sees_all
    row.can_share &= plain
    assert plain or not row.shared, "a plan lets documents share prefixes only where attention can"
    if (
        row.borders is not None
        and softcap is None
        and dropout == 0.0
        and query.dtype in (torch.bfloat16, torch.float16)
    ):
        return _varlen_attention(query, key, value, lengths, row.borders, scaling, sliding_window), None
    if plain and (row.shared or goes_through_fp32(query) or query.dtype == torch.bfloat16):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output: Tensor = _PackedAttention.apply(query, key, value, lengths, row.spans, scaling)  # type: ignore[no-untyped-call]
        return output, None
    if goes_through_fp32(query):
        wide = (query.float(), key.float(), value.float())
        narrow = packed_attention(module, *wide, attention_mask, dropout, scaling, sliding_window, softcap, row)[0]
        return narrow.to(query.dtype), None
    outputs = [
        _one_document(q, k, v, dropout, scaling, sliding_window, softcap)
        for q, k, v in zip(
            query.split(lengths, dim=2),
            key.split(lengths, dim=2),
            value.split(lengths, dim=2),
            strict=True,
        )
    ]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1), None


@torch.library.custom_op("tonnage::packed_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], spans: Sequence[int], scaling: float
) -> tuple[Tensor, Tensor]:
    """Output (1, tokens, heads, head_dim), and log of the sum of exponentials, fp32 (heads, tokens)."""
    _, heads, tokens, size = query.shape
    output, normaliser = query.new_empty(1, tokens, heads, size), torch.empty(heads, tokens)
    widened = goes_through_fp32(query)

    def attend(queries: slice, keys: slice, *, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (_cut(one, part) for one, part in ((query, queries), (key, keys), (value, keys)))
        if widened:
            q, k, v = q.float(), k.float(), v.float()
        found, normalised = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scaling
        )
        return found.transpose(1, 2), normalised[0]

    start = 0
    for length in lengths:
        part, beyond = slice(start, start + length), start + (length if widened else _rounded(length))
        # What comes after a document is hidden from it, as what is to come always is: the next one, or zeros.
        found, normalised = attend(slice(start, beyond), slice(start, beyond), causal=True)
        output[:, part] = found[:, :length]
        normaliser[:, part] = normalised[:, :length]
        start += length
    wide = output.float() if spans else output  # what several prefixes add is rounded once
    for begin, own, end in _triples(spans):
        part, length = slice(own, end), end - own
        found, normalised = attend(slice(own, own + _rounded(length)), slice(begin, own), causal=False)
        whole = torch.logaddexp(normaliser[:, part], normalised[:, :length])
        share = (normalised[:, :length] - whole).exp_().t()[None, :, :, None]
        wide[:, part].lerp_(found[:, :length].float(), share)
        normaliser[:, part] = whole
    return wide.to(output.dtype), normaliser


def _triples(spans: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Of every prefix, where it begins, where what comes after it does, and where that ends."""
    return zip(spans[::3], spans[1::3], spans[2::3], strict=True)


def _cut(tensor: Tensor, part: slice) -> Tensor:
    """Tokens of a (1, heads, tokens, head_dim), and zeros where it has no more."""
    found = tensor[:, :, part]
    missing = part.stop - part.start - found.shape[2]
    return F.pad(found, (0, 0, 0, missing)) if missing else found


class _Documents:
    """Documents of a row that are computed together: of one length, when that is rounded up."""

    def __init__(self, parts: list[slice], rounded: int) -> None:
        self.parts, self.rounded = parts, rounded
        within = torch.arange(rounded)
        lengths = torch.tensor([part.stop - part.start for part in parts])[:, None]
        self.beyond = within >= lengths
        """(documents, rounded) places that are no token of the document."""
        self._tokens = (torch.tensor([part.start for part in parts])[:, None] + within.minimum(lengths - 1)).flatten()

    def __len__(self) -> int:
        return len(self.parts)

    def gather(self, row: Tensor) -> Tensor:
        """(tokens, heads, ...) to (documents, heads, rounded, ...); a document's last token is repeated to its end."""
        return row.index_select(0, self._tokens).view(len(self), self.rounded, *row.shape[1:]).transpose(1, 2)

    def scatter(self, found: Tensor, row: Tensor) -> None:
        """The other way, into ``row``, (heads, tokens, ...); what lies beyond a document is dropped."""
        for part, one in zip(self.parts, found, strict=True):
            row[:, part] = one[:, : part.stop - part.start]


def _by_token(row: Tensor) -> Tensor:
    """(heads, tokens, ...) to (tokens, heads, ...), in this order in memory, whichever it was."""
    return row.transpose(0, 1).contiguous()


def _documents_of_one_size(lengths: Sequence[int], heads: int) -> Iterator[_Documents]:
    """All documents, as many at a time as are of one size and small enough for a cache."""
    by_size: dict[int, list[slice]] = {}
    start = 0
    for length in lengths:
        by_size.setdefault(_rounded(length), []).append(slice(start, start + length))
        start += length
    for rounded, parts in by_size.items():
        number = max(1, WEIGHTS_TOGETHER // (heads * rounded * min(rounded, QUERY_ROWS)))
        for first in range(0, len(parts), number):
            yield _Documents(parts[first : first + number], rounded)


def _rounded(length: int) -> int:
    return -(-length // ROUND_TO) * ROUND_TO


@_attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], spans: Sequence[int], scaling: float
) -> tuple[Tensor, Tensor]:
    _, heads, tokens, size = query.shape
    return query.new_empty(1, tokens, heads, size), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("tonnage::packed_attention_backward", mutates_args=())
def _backward_of_documents(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normaliser: Tensor,
    lengths: Sequence[int],
    spans: Sequence[int],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from FlashAttention-2's formulas (Dao 2023, algorithm 2).

    torch's fused CPU kernel multiplies far below the rate of large products here. These are five products in bf16 over
    blocks of queries, keys only as far as a block may see; heads that share a key are one product. What a bf16 product
    gives is rounded relative to its size, so the two numbers that are subtracted from products, the normaliser of a
    row and the sum along its gradient, are subtracted *within* them, as two more columns (``_extended``): what is left
    is small where a weight is large, and its rounding as well.
    """
    if goes_through_fp32(query):
        return _backward_in_fp32(gradient, query, key, value, output, normaliser, lengths, spans, scaling)
    to_query, to_key, to_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    (heads, size), shared = (query.shape[1], query.shape[3]), key.shape[1]
    by_token = [_by_token(one[0]) for one in (query, key, value)]
    normalisers, slopes_and_outputs = _by_token(normaliser), [one[0].contiguous() for one in (gradient, output)]
    for documents in _documents_of_one_size(lengths, heads):
        number, whole = len(documents), documents.rounded
        q, k, v = (documents.gather(one) for one in by_token)
        g, o = (documents.gather(one) for one in slopes_and_outputs)
        # A row that is not there weighs nothing.
        normalised = documents.gather(normalisers).masked_fill(documents.beyond[:, None], NOWHERE)
        less_normaliser = _extended(q * scaling, normalised)
        less_along = _extended(g, (g.float() * o.float()).sum(-1))
        ones = key.new_ones(number, shared, whole, 2)
        k_ones, v_ones = (torch.cat([one, ones], -1).view(-1, whole, size + 2) for one in (k, v))
        for_query = query.new_empty(number, heads, whole, size)
        sums = [torch.zeros(number * shared, whole, size) for _ in range(2)] if whole > QUERY_ROWS else []
        for first in range(0, whole, QUERY_ROWS):
            end = min(whole, first + QUERY_ROWS)
            queries, slopes_of = (
                one[:, :, first:end].reshape(number * shared, -1, size + 2) for one in (less_normaliser, less_along)
            )
            found, for_keys, for_values = _five_products(queries, slopes_of, k_ones[:, :end], v_ones[:, :end], first)
            for_query[:, :, first:end] = found.mul_(scaling).view(number, heads, -1, size)
            for one, part in zip(sums, (for_keys, for_values), strict=False):
                one[:, :end] += part
        for_keys, for_values = sums or (for_keys, for_values)
        documents.scatter(for_query, to_query[0])
        documents.scatter(for_keys.view(number, shared, whole, size), to_key[0])
        documents.scatter(for_values.view(number, shared, whole, size), to_value[0])
    for begin, own, end in _triples(spans):
        ones = key.new_ones(shared, own - begin, 2)
        k_ones, v_ones = (torch.cat([one[0, :, begin:own], ones], -1) for one in (key, value))
        sums = [one[0, :, begin:own].float() for one in (to_key, to_value)]
        for first in range(own, end, QUERY_ROWS):
            rows = slice(first, min(first + QUERY_ROWS, end))
            missing = _rounded(rows.stop - first) - (rows.stop - first)
            g, o = (one[rows].transpose(0, 1) for one in slopes_and_outputs)
            less_normaliser = _extended(query[0, :, rows] * scaling, normaliser[:, rows])
            less_along = _extended(g, (g.float() * o.float()).sum(-1))
            queries, slopes_of = (  # a row that is not there has no slope, and its weights meet none
                F.pad(one, (0, 0, 0, missing)).reshape(shared, -1, size + 2) for one in (less_normaliser, less_along)
            )
            found, *gradients = _five_products(queries, slopes_of, k_ones, v_ones, None)
            to_query[0, :, rows] += found.mul_(scaling).view(heads, -1, size)[:, : rows.stop - first]
            for one, added in zip(sums, gradients, strict=True):
                one += added
        to_key[0, :, begin:own], to_value[0, :, begin:own] = sums
    return to_query, to_key, to_value


def _five_products(
    queries: Tensor, slopes_of: Tensor, keys: Tensor, values: Tensor, first: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What some rows of weights give query (not yet scaled), key and value.

    Shapes: all (products, rows, size + 2), extended as ``_backward_of_documents`` says: the queries, scaled, by their
    normalisers, the gradients of their outputs by the sums along them, keys and values by ones. The rows begin
    ``first`` keys into their document, and see no key after their own; without it they see all keys.
    """
    size = keys.shape[2] - 2
    weights = torch.bmm(queries, keys.transpose(1, 2)).exp_()
    if first is not None:
        weights.view(-1, keys.shape[1] - first, keys.shape[1]).tril_(first)
    slopes = torch.bmm(slopes_of, values.transpose(1, 2)).mul_(weights)
    return (
        torch.bmm(slopes, keys[..., :size]),
        torch.bmm(slopes.transpose(1, 2), queries[..., :size]),
        torch.bmm(weights.transpose(1, 2), slopes_of[..., :size]),
    )


def _backward_in_fp32(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normaliser: Tensor,
    lengths: Sequence[int],
    spans: Sequence[int],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with torch's fused kernel, which is at its best in fp32; document by document, so that little of the
    row is in fp32 at a time."""
    to_query, to_key, to_value = (torch.empty_like(one) for one in (query, key, value))
    by_head = gradient.transpose(1, 2), query, key, value, output.transpose(1, 2)

    def gradients(queries: slice, keys: slice, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        parts = (queries, queries, keys, keys, queries)
        wide = (one[:, :, part].float() for one, part in zip(by_head, parts, strict=True))
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, normaliser[None, :, queries], 0.0, causal, scale=scaling
        )
        return found

    start = 0
    for length in lengths:
        part = slice(start, start + length)
        to_query[:, :, part], to_key[:, :, part], to_value[:, :, part] = gradients(part, part, causal=True)
        start += length
    for begin, own, end in _triples(spans):
        prefix, rest = slice(begin, own), slice(own, end)
        of_query, of_key, of_value = gradients(rest, prefix, causal=False)
        to_query[:, :, rest] += of_query
        to_key[:, :, prefix] += of_key
        to_value[:, :, prefix] += of_value
    return to_query, to_key, to_value


def _extended(rows: Tensor, subtracted: Tensor) -> Tensor:
    """Rows with two more columns, which a product with ones subtracts: the high and the low part of ``subtracted``.

    Shapes: bf16 (heads, rows, size) and fp32 (heads, rows); bf16 (heads, rows, size + 2).
    """
    high = subtracted.to(rows.dtype)
    low = (subtracted - high.float()).to(rows.dtype)
    return torch.cat([rows, -high[..., None], -low[..., None]], -1)


@_backward_of_documents.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normaliser: Tensor,
    lengths: Sequence[int],
    spans: Sequence[int],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _PackedAttention(torch.autograd.Function):
    """Attention of all documents of a row; on the CPU, of 16 bits or where documents share a prefix."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        spans: Sequence[int],
        scaling: float,
    ) -> Tensor:
        output: Tensor
        output, normaliser = _attend(query, key, value, lengths, spans, scaling)
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.row = (lengths, spans, scaling)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward_of_documents(gradient, *ctx.saved_tensors, *ctx.row)
        return (*gradients, None, None, None)


def _one_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of one document: (1, heads, length, head_dim) in and out."""
    length = query.shape[2]
    mask = None
    if sliding_window is not None and length > sliding_window:
        position = torch.arange(length, device=query.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < sliding_window)
    if softcap is not None:
        return _softcapped_attention(query, key, value, mask, dropout, scaling, softcap)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _softcapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Attention whose scores are squashed to (-softcap, softcap), as Gemma 2 does; no fused kernel knows it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    length = query.shape[2]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, float("-inf"))
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def _varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    borders: Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """All documents of the row in one kernel (CUDA, bf16 or fp16)."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(lengths)
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        borders,
        borders,
        longest,
        longest,
        scale=scaling,
        window_size=window,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)
