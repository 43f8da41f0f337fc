"""Attention for packs: documents that lie side by side in one row and never see each other.

A micro-batch is one row of tokens, documents one after another, no padding. Positions restart at each document,
and attention is computed within each document only, so a packed document gets exactly the numbers it would get
alone. The function is registered with transformers under ``NAME`` through its ``AttentionInterface``; a name
that is not registered as a mask maker makes transformers build no mask at all, so no ``tokens x tokens`` matrix
ever exists.

* CPU: loops of our own over tiles of documents and heads, windows, capped scores and sinks included
  (``attention_loops``).
* CPU with dropout, or where the loops are switched off (``kernels.switches``): one ``scaled_dot_product_attention`` per
  document.
* CUDA, bf16 or fp16: ``torch.nn.attention.varlen``, one kernel for the row, or a newer FlashAttention in its place
  (``flash``); on cards before Ampere, and for heads that it does not take, as with a window on a CPU. Capped scores,
  and those beside sinks, are computed for some queries at a time, so that there is no ``tokens x tokens`` matrix
  either.

The documents' lengths travel as keyword arguments through the model's own forward (``packing_arguments``).
What cannot be isolated is refused, never warned about: a family that takes no attention function by ``check_packable``,
attention that is more than ours by ``packed_attention``. Documents can meet elsewhere, in a convolution or a
recurrence, say: whether they do is found by asking the model (``training.isolation``).

Documents that begin with the same tokens may have these in the row once (``Shared``; CPU). What they go on with attends
to itself and to all of the prefix, and prefixes may lie within what goes on from others:

    row   prefix | rest of a | rest of b | ...     a's queries see prefix + rest of a, b's see prefix + rest of b

Tokens of an image may see those of the same image that come after them (``Ahead``). Such a document is computed by
itself, with a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tonnage.errors import Problem, UserError, user_error
from tonnage.host.locked import sent
from tonnage.kernels import attention_loops
from tonnage.kernels.attention_tiles import EVERYTHING, TILE, cut, in_waves
from tonnage.kernels.products import goes_through_fp32
from tonnage.kernels.scratch import kept_memory
from tonnage.kernels.switches import is_on
from tonnage.kernels.threads import num_threads
from tonnage.model import flash
from tonnage.model.cached import Cached, Scores, attend
from tonnage.model.context import Context

NAME = "tonnage_packed"
QUERIES = 256
"""Of a document whose scores a GPU has in its memory at a time, where no kernel of torch's computes what they are."""
AMPERE = (8, 0)
"""The oldest generation of cards, as CUDA counts them, for which FlashAttention is made."""
IN_ALL, IN_WINDOWS = "all", "windows"
"""Layers in which tokens of an image look ahead: all, or those that have a window."""
ATTEMPTED = 64
"""Tokens with which a kind of attention is tried."""
ABOUT_OTHERS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that families hand to attention on their way to somewhere else. Any other that ours does not know is
refused: it would change what attention computes."""


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


@dataclass(frozen=True)
class Ahead:
    """Tokens that see those after them: of the same image, in their own document."""

    images: tuple[Tensor | None, ...]
    """Of every part of a row, int64 (tokens,): which image a token is of, -1 of none; None of a part without any."""
    layers: str
    """In which layers. A window hides what is before it from them, too."""

    def in_layer(self, window: int | None) -> Sequence[Tensor | None]:
        """``images``, where the tokens of a layer with such a ``window`` look ahead."""
        return (None,) * len(self.images) if self.layers == IN_WINDOWS and window is None else self.images


class PackedRow:
    """Where documents lie in a row. An object, because compiled code would take numbers among its arguments for
    constants, and be compiled anew for every row."""

    def __init__(self, lengths: tuple[int, ...], borders: Tensor | None = None, shared: Sequence[Shared] = ()) -> None:
        self.lengths = lengths
        """Tokens of each part: a document, what several have in common, or what one of these goes on with."""
        self.borders = borders
        """int32 (parts + 1,): first token of each part, and the end of the row; on CUDA only."""
        self.shared = shared
        self.cached: Cached | None = None
        """Where keys and values are kept, if documents go on from what was computed before."""
        self.ahead: Ahead | None = None
        """Which tokens see some that come after them, if any do."""
        self.context: Context | None = None
        """The ranks that divide its tokens, if any do."""
        parents = [-1] * len(lengths)
        self.before = [0] * len(lengths)
        """Tokens of the prefixes that each part goes on from."""
        for span in sorted(shared, key=lambda span: span.part):  # from the outside in
            for part in range(span.part + 1, span.part + 1 + span.parts):
                self.before[part] += lengths[span.part]
                parents[part] = span.part
        self._cut = cut(lengths, self.before, parents)
        self.tiles = torch.tensor(self._cut)
        """int64 (tiles, 4): of each what ``attention_tiles.Tile`` is."""
        self._waves: dict[int, tuple[Tensor, Tensor]] = {}
        self.arrived = False
        """Whether any attention was told of the row."""
        self.heads: set[tuple[int, int, int, int]] = set()
        """Of the kinds of attention that were told of it: how many there are of queries, how many of keys and values,
        the size of the first and that of values."""
        self.can_share = True
        """Whether attention so far could have let documents share prefixes."""

    def waves(self, window: int) -> tuple[Tensor, Tensor]:
        """Pairs of tiles, int64 (pairs, 4), and the first one of each wave, int64 (waves + 1,): ``in_waves``."""
        if window not in self._waves:
            pairs, starts = in_waves(self._cut, window)
            self._waves[window] = torch.tensor(pairs), torch.tensor(starts)
        return self._waves[window]

    def positions(self) -> Tensor:
        """Place of every token in its document, int64 (tokens,)."""
        parts = zip(self.before, self.lengths, strict=True)
        return torch.cat([torch.arange(before, before + length) for before, length in parts])


def packing_arguments(
    lengths: Sequence[int], device: torch.device, shared: Sequence[Shared] = (), context: Context | None = None
) -> dict[str, Any]:
    """Keyword arguments of the model's forward that describe one packed row.

    ``lengths``: tokens of each part of the row (``PackedRow``); their sum is the length of the row. ``position_ids``
    has shape (1, tokens) and restarts at zero in each document; of a row that the ranks of a ``context`` divide,
    those of this rank's tokens.
    """
    row = _row_on(device, lengths, shared)
    row.context, positions = context, row.positions()
    if context is not None:
        positions = positions[context.slice_of(len(positions))]
    return {"position_ids": sent(positions.unsqueeze(0), device), "row": row}


def _row_on(device: torch.device, lengths: Sequence[int], shared: Sequence[Shared] = ()) -> PackedRow:
    borders = None
    if device.type == "cuda":
        borders = sent(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
    return PackedRow(tuple(lengths), borders, shared)


def looking_ahead(packing: Mapping[str, Any], images: Tensor, layers: str, device: torch.device) -> dict[str, Any]:
    """Arguments as ``packing``, or of rows of one document each where that says nothing of a row, of a model in which
    tokens of an image see those after them. ``images``: int64 (rows, tokens), and ``layers``, as in ``Ahead``."""
    row = packing.get("row") or _row_on(device, (images.shape[1],) * images.shape[0])
    parts = images.flatten().split(row.lengths)
    row.ahead = Ahead(tuple(sent(part, device) if int(part.max()) >= 0 else None for part in parts), layers)
    return {**packing, "row": row}


def cached_arguments(lengths: Sequence[int], device: torch.device, cached: Cached) -> dict[str, Any]:
    """As ``packing_arguments``, for a row whose documents go on from what is kept, or begin and are kept."""
    row = PackedRow(tuple(lengths))
    row.cached = cached
    return {"position_ids": cached.positions(lengths).unsqueeze(0).to(device), "row": row}


@contextmanager
def as_in_transformers(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Let a model that was built with an ``attention`` of ours attend as transformers does, for its ``generate``: to
    rows padded on the left, and to what is in a cache."""
    if attention != NAME:
        yield
        return
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # a family that has none
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)


def check_packable(model: PreTrainedModel) -> None:
    """Refuse a model whose attention cannot be told where documents end.

    Raises:
        UserError: the family does not take transformers' attention back ends.
    """
    if not model.is_backend_compatible():
        raise UserError(takes_no_function(model.config.model_type, type(model).__name__))


def takes_no_function(model_type: str, name: str) -> Problem:
    """What is said of a family that does not take transformers' attention back ends."""
    return Problem(
        where=f"model type {model_type}",
        found=f"{name} does not accept an attention function from outside",
        needed="a family that supports transformers' attention back ends, so that packed documents "
        "can be kept from attending to each other",
        change="choose another model family",
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
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    row: PackedRow | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document of a packed row, or within each of several rows.

    Shapes: ``query`` (1, heads, tokens, head_dim); ``key`` (1, key_value_heads, tokens, head_dim); ``value`` the same,
    or with heads of another size; rows instead of 1 without a ``row``. Returns (1, tokens, heads, size of the values).
    ``sliding_window`` counts the token itself, as in transformers. ``s_aux`` (heads,) are scores of nothing, which
    every token may attend to instead ("sinks").

    Raises:
        UserError: the family's attention is another, or is given what ours does not know.
    """
    _check_known(module, attention_mask, is_causal, more)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux, dropout)
    if query.shape[0] > 1:
        return _in_rows(query, key, value, row, scores), None
    if row is not None and row.cached is not None:
        return _going_on(id(module), query, key, value, row, row.cached, scores), None
    if row is not None and row.context is not None:
        return row.context.attend(query, key, value, partial(_of_some_heads, row, scores)), None
    return _in_one_row(query, key, value, row or PackedRow((query.shape[2],)), scores), None


def _in_one_row(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scores: Scores) -> Tensor:
    """Attention of documents that lie in one row."""
    row.arrived = True
    row.heads.add((query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
    on_cpu = query.device.type == "cpu"
    images = (None,) * len(row.lengths) if row.ahead is None else row.ahead.in_layer(scores.window)
    is_causal = all(of_part is None for of_part in images)
    by_loops = on_cpu and is_causal and not scores.dropout and is_on("attention")
    row.can_share &= by_loops
    assert by_loops or not row.shared, "a plan lets documents share prefixes only where attention can"
    if row.borders is not None and is_causal and scores.are_plain and _varlen_takes(query, value):
        return _varlen_attention(query, key, value, row, scores)
    if on_cpu and (query.dtype == torch.float16 or (not by_loops and goes_through_fp32(query))):
        return _in_one_row(query.float(), key.float(), value.float(), row, scores).to(query.dtype)
    if by_loops and query.dtype in (torch.bfloat16, torch.float32):
        if scores.scaling <= 0:  # what is hidden has the lowest score before it is scaled
            query, scores = query * scores.scaling, replace(scores, scaling=1.0)
        size, of_values = query.shape[-1], value.shape[-1]
        if size != of_values:  # zeros add nothing to a score, and columns of zeros come out as such
            query, key, value = (
                F.pad(tensor, (0, max(size, of_values) - tensor.shape[-1])) for tensor in (query, key, value)
            )
        output: Tensor = _PackedAttention.apply(query, key, value, scores.sinks, row, scores)  # type: ignore[no-untyped-call]
        return output if output.shape[-1] == of_values else output[..., :of_values]
    split = (tensor.split(row.lengths, dim=2) for tensor in (query, key, value))
    on_gpu = row.borders is not None
    parts = zip(*split, images, strict=True)
    outputs = [_one_document(q, k, v, scores, of_part, on_gpu=on_gpu) for q, k, v, of_part in parts]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)


def _of_some_heads(row: PackedRow, scores: Scores, query: Tensor, key: Tensor, value: Tensor, heads: slice) -> Tensor:
    """``_in_one_row`` of some of the heads of queries, and of the keys and values that go with them."""
    sinks = None if scores.sinks is None else scores.sinks[heads]
    return _in_one_row(query, key, value, row, replace(scores, sinks=sinks))


def _in_rows(query: Tensor, key: Tensor, value: Tensor, row: PackedRow | None, scores: Scores) -> Tensor:
    """Attention of rows of one document each, as of one ``row`` of so many documents; what a row ends with is padding,
    which comes after all that counts."""
    rows, _, tokens, _ = query.shape
    row = row or _row_on(query.device, (tokens,) * rows)
    assert row.lengths == (tokens,) * rows, "documents lie in one row, or in rows of their own"
    query, key, value = (
        tensor.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2) for tensor in (query, key, value)
    )
    output = _in_one_row(query, key, value, row, scores)
    return output.view(rows, tokens, *output.shape[2:])


def _going_on(
    number: int, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, cached: Cached, scores: Scores
) -> Tensor:
    """Attention of documents of which one token is here and the others are kept, and of those that begin after them;
    what is here is kept as well. ``number`` is the layer's."""
    row.arrived = True
    memory, going = cached.put(number, key, value, row.lengths), len(cached.before)
    outputs = []
    if going:
        keys, values = (tensor[:going, :, : max(cached.before) + 1] for tensor in memory)
        queries = query[:, :, :going]
        if query.device.type == "cpu" and (query.dtype == torch.float16 or goes_through_fp32(query)):
            queries, keys, values = queries.float(), keys.float(), values.float()
        mask = cached.mask(scores.window, query.device)
        output = attend(queries, keys, values, mask, scores)
        outputs.append(output.to(query.dtype))
    if len(row.lengths) > going:
        query, key, value = (tensor[:, :, going:] for tensor in (query, key, value))
        outputs.append(_in_one_row(query, key, value, _row_on(query.device, row.lengths[going:]), scores))
    return torch.cat(outputs, dim=1)


def _check_known(
    module: nn.Module, attention_mask: Tensor | None, is_causal: bool | None, more: Mapping[str, Any]
) -> None:
    """Refuse attention that is given more than ours computes with."""
    unknown = [name for name, value in more.items() if not (name in ABOUT_OTHERS or value is None or value is False)]
    if attention_mask is not None:
        unknown.insert(0, "attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.insert(0, "is_causal=False")
    if unknown:
        raise user_error(
            where=type(module).__name__,
            found=f"attention that is given {', '.join(unknown)}",
            needed="causal attention of queries, keys and values, with a window, a cap or sinks at most",
            change="choose another model family",
        )


@torch.library.custom_op("tonnage::packed_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, tiles: Tensor, window: int, numbers: list[float]
) -> tuple[Tensor, Tensor]:
    """Output (1, tokens, heads, head_dim), and log of the sum of exponentials, fp32 (heads, tokens). ``numbers``:
    scaling, and the cap of scores, 0 for none."""
    _, heads, tokens, size = query.shape
    output, normalisers = query.new_empty(1, tokens, heads, size), torch.empty(heads, tokens)
    by_head = [_flat(tensor) for tensor in (query, key, value, output.transpose(1, 2))]
    scaling, cap = map(np.float32, numbers)
    beside = sinks.clone().numpy(), normalisers.numpy()  # a parameter's own memory, given to numpy, cannot be freed
    attention_loops.forward(tiles.numpy(), *by_head, *beside, key.shape[1], size, scaling, window, cap, _scratch(size))
    return output, normalisers


def _flat(tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A tensor (1, heads, tokens, head_dim) as loops take it: its memory, and where its tokens and heads lie in it."""
    _, head_step, token_step, step = tensor.stride()
    assert step == 1
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((last + 1,), (1,))
    bits = memory.view(torch.uint16) if tensor.dtype == torch.bfloat16 else memory
    return bits.numpy(), np.array([0, token_step, head_step])


def _with_whole_heads(tensor: Tensor) -> Tensor:
    """A tensor in which the numbers of each head lie side by side."""
    return tensor if tensor.stride(3) == 1 else tensor.clone(memory_format=torch.contiguous_format)


@_attend.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _, heads, tokens, size = query.shape
    return query.new_empty(1, tokens, heads, size), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("tonnage::packed_attention_backward", mutates_args=("sums",))
def _attend_backward(
    gradient: Tensor,
    saved: list[Tensor],
    sums: list[Tensor],
    schedule: list[Tensor],
    window: int,
    numbers: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. ``saved``: these, normalisers, and of each row the dot product of its output
    with its gradient; ``sums``: memory for gradients in fp32, in the shapes of the three, or none if these are fp32;
    ``schedule``: tiles of the row, their pairs and waves."""
    query, key, value, normalisers, along = saved
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    scaling, cap = map(np.float32, numbers)
    attention_loops.backward(
        *(tensor.numpy() for tensor in schedule),
        *(_flat(tensor) for tensor in (query, key, value, gradient.transpose(1, 2))),
        normalisers.numpy(),
        along.numpy(),
        *((*_flat(total), *_flat(result)) for total, result in zip(sums or gradients, gradients, strict=True)),
        key.shape[1],
        query.shape[3],
        scaling,
        window,
        cap,
        _scratch(query.shape[3]),
    )
    return gradients


def _scratch(size: int) -> np.ndarray:
    """Memory for the loops of heads of such a ``size``: fp32 (threads, numbers)."""
    numbers = attention_loops.scratch_numbers(size)
    return kept_memory(4 * num_threads() * numbers).view(np.float32).reshape(num_threads(), numbers)


@_attend_backward.register_fake
def _(gradient: Tensor, saved: list[Tensor], *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(saved[0]), torch.empty_like(saved[1]), torch.empty_like(saved[2])


@torch.library.custom_op("tonnage::attention_along", mutates_args=())
def _along(output: Tensor, gradient: Tensor) -> Tensor:
    """Of each token and head the dot product of the output, (1, tokens, heads, head_dim), with its gradient: fp32
    (heads, tokens)."""
    _, tokens, heads, _ = output.shape
    products = torch.empty(heads, tokens)
    for part in range(0, tokens, TILE):  # nothing in fp32 is as large as the output
        rows = slice(part, part + TILE)
        products[:, rows] = (output[0, rows].float() * gradient[0, rows]).sum(-1).T
    return products


@_along.register_fake
def _(output: Tensor, gradient: Tensor) -> Tensor:
    return output.new_empty(output.shape[2], output.shape[1], dtype=torch.float32)


def compile_loops(dtype: torch.dtype) -> None:
    """Compile the CPU's loops for what is computed in ``dtype``: 10 to 20 s for each, once on a machine."""
    with torch.enable_grad():
        one = torch.zeros(1, 1, 1, 1, dtype=dtype, requires_grad=True)
        packed_attention(nn.Identity(), one, one, one, None)[0].sum().backward()


class _PackedAttention(torch.autograd.Function):
    """Attention of all documents of a row on the CPU."""

    clear_saved_tensors_on_access = True  # the output goes before gradients come

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, row: PackedRow, scores: Scores
    ) -> Tensor:
        query, key, value = _with_whole_heads(query), _with_whole_heads(key), _with_whole_heads(value)
        beside = query.new_full(query.shape[1:2], float("-inf")) if sinks is None else sinks
        ctx.row, ctx.window = row, EVERYTHING if scores.window is None else scores.window
        ctx.numbers = [scores.scaling, scores.softcap or 0.0]
        output: Tensor
        output, normalisers = _attend(query, key, value, beside.float(), row.tiles, ctx.window, ctx.numbers)
        ctx.save_for_backward(query, key, value, output, normalisers, sinks)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normalisers, sinks = ctx.saved_tensors
        gradient = _with_whole_heads(gradient)
        along = _along(output, gradient)
        del output
        schedule, saved = [ctx.row.tiles, *ctx.row.waves(ctx.window)], [query, key, value, normalisers, along]
        in_fp32 = query.dtype == torch.float32
        sums = [] if in_fp32 else [torch.empty_like(tensor, dtype=torch.float32) for tensor in saved[:3]]
        of_inputs = _attend_backward(gradient, saved, sums, schedule, ctx.window, ctx.numbers)
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.float()[:, None] - normalisers).exp() * along).sum(-1).to(sinks.dtype)
        return (*of_inputs, of_sinks, None, None)


def _one_document(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, images: Tensor | None, *, on_gpu: bool
) -> Tensor:
    """Causal attention of one document, but for tokens of the same of its ``images``: (1, heads, length, head_dim) in
    and out."""
    length = query.shape[2]
    if scores.softcap is not None or scores.sinks is not None:
        if on_gpu and length > QUERIES and not scores.dropout:
            return cast(Tensor, _SomeQueriesAtATime.apply(query, key, value, scores.sinks, scores, images))  # type: ignore[no-untyped-call]
        return _scored_attention(query, key, value, _seen(0, length, 0, scores.window, query.device, images), scores)
    mask = None
    if images is not None or (scores.window is not None and length > scores.window):
        mask = _seen(0, length, 0, scores.window, query.device, images)
    if on_gpu and key.shape[1] != query.shape[1]:  # but for FlashAttention, kernels without dense scores take no groups
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))

    computed = partial(
        F.scaled_dot_product_attention,
        attn_mask=mask,
        dropout_p=scores.dropout,
        is_causal=mask is None,
        scale=scores.scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    if flash.is_newer() and mask is None:  # no FlashAttention takes one
        kind = f"single documents, {_kind_of(query, key, value)}{', with dropout' * bool(scores.dropout)}"
        flash.check(kind, lambda: _attempted(computed, query, key, value, 2))
    return computed(query, key, value)


def _kind_of(query: Tensor, key: Tensor, value: Tensor) -> str:
    """What kernels for attention may take or not, in words: tensors of heads in the second dimension."""
    sizes = " and ".join(map(str, dict.fromkeys((query.shape[-1], value.shape[-1]))))
    dtype = str(query.dtype).removeprefix("torch.")
    return f"{query.shape[1]} heads of {sizes} over {key.shape[1]} in {dtype}"


def _attempted(compute: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, axis: int) -> None:
    """Compute attention of as many tokens as there are in a short document, and gradients; ``axis`` is that of
    tokens."""
    few = [
        torch.zeros_like(tensor.narrow(axis, 0, min(ATTEMPTED, tensor.shape[axis]))) for tensor in (query, key, value)
    ]
    output = compute(*(tensor.requires_grad_() for tensor in few))
    torch.autograd.grad(output, few, torch.zeros_like(output))
    if query.device.type == "cuda":
        torch.cuda.synchronize(query.device)


def _seen(
    start: int, stop: int, first: int, window: int | None, device: torch.device, images: Tensor | None = None
) -> Tensor:
    """Which tokens from ``first`` on those from ``start`` to ``stop`` see: bool (stop - start, stop - first), or (stop
    - start, length - first) of a document with ``images`` (length,), whose tokens see all of their image."""
    place = torch.arange(first, stop if images is None else len(images), device=device)
    distance = place[start - first : stop - first, None] - place[None, :]
    visible = distance >= 0
    if images is not None:
        own = images[start:stop, None]
        visible |= (own >= 0) & (own == images[None, first:])
    return visible if window is None else visible & (distance < window)


def _scored_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Attention whose scores are squashed or stand beside sinks: no fused kernel here knows either. ``mask``: bool
    (queries, keys)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    weights = scores.weights(query, key, mask, (1, -1, 1, 1))
    return F.dropout(weights, scores.dropout) @ value


class _SomeQueriesAtATime(torch.autograd.Function):
    """``_scored_attention`` of a document, of which no more than the scores of some queries are ever there: those of
    all would be heads x length x length. The backward pass computes them anew."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scores: Scores,
        images: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.scores, ctx.images = scores, images
        outputs = []
        with computed_anew():
            for rows, columns, mask in _some_queries(query, scores.window, images):
                parts = (query[:, :, rows], key[:, :, columns], value[:, :, columns])
                outputs.append(_scored_attention(*parts, mask, scores))
        return torch.cat(outputs, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), _zeros_for_sums(key), _zeros_for_sums(value)
        of_sinks = None if sinks is None else _zeros_for_sums(sinks)
        for rows, columns, mask in _some_queries(query, ctx.scores.window, ctx.images):
            parts = (query[:, :, rows], key[:, :, columns], value[:, :, columns])
            some = [one.detach().requires_grad_() for one in parts]
            beside = None if sinks is None else sinks.detach().requires_grad_()
            with torch.enable_grad():
                output = _scored_attention(some[0], some[1], some[2], mask, replace(ctx.scores, sinks=beside))
            leaves = some if beside is None else [*some, beside]
            derivatives = torch.autograd.grad(output, leaves, gradient[:, :, rows])
            of_query[:, :, rows] = derivatives[0]
            of_key[:, :, columns] += derivatives[1]
            of_value[:, :, columns] += derivatives[2]
            if of_sinks is not None:
                of_sinks += derivatives[3]
        rounded = None if of_sinks is None else of_sinks.to(sinks.dtype)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), rounded, None, None


def _zeros_for_sums(tensor: Tensor) -> Tensor:
    """Zeros in the shape of a tensor, to sum up gradients of its type: in fp32 at least."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _some_queries(query: Tensor, window: int | None, images: Tensor | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries of a document that are taken together, the keys that any of them sees, and ``_seen``."""
    length = query.shape[2]
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        first = 0 if window is None else max(0, start + 1 - window)
        mask = _seen(start, stop, first, window, query.device, images)
        yield slice(start, stop), slice(first, first + mask.shape[1]), mask


_anew = False


@contextmanager
def computed_anew() -> Iterator[None]:
    """Within it, nothing is worth keeping for the backward pass: that computes it from its inputs."""
    global _anew
    before, _anew = _anew, True
    try:
        yield
    finally:
        _anew = before


def is_computed_anew() -> bool:
    """Whether the operation that is called is within ``computed_anew``."""
    return _anew


def _varlen_takes(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel for a row of documents, which is FlashAttention's, takes such heads on such a card."""
    size = query.shape[-1]
    if query.dtype not in (torch.bfloat16, torch.float16) or value.shape[-1] != size or size % 8 or size > 256:
        return False
    is_there = query.device.type == "cuda"  # and not a tensor without content, by which a model is weighed
    return not is_there or torch.cuda.get_device_capability(query.device) >= AMPERE


@cache
def _says_groups(varlen_attn: Callable[..., Any]) -> bool:
    """Whether the kernel must be told that several heads share keys and values; torch 2.11's finds out by itself."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scores: Scores) -> Tensor:
    """All documents of the row in one kernel (CUDA, bf16 or fp16)."""
    from torch.nn.attention.varlen import varlen_attn

    assert row.borders is not None
    is_grouped = key.shape[1] != query.shape[1]
    grouped: dict[str, Any] = {"enable_gqa": True} if is_grouped and _says_groups(varlen_attn) else {}
    window = (-1, 0) if scores.window is None else (scores.window - 1, 0)

    def computed(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int) -> Tensor:
        output = varlen_attn(
            query, key, value, borders, borders, longest, longest, scale=scores.scaling, window_size=window, **grouped
        )
        assert isinstance(output, Tensor)
        return output

    def attempt() -> None:
        tokens = min(ATTEMPTED, len(query))
        ends = torch.tensor([0, (tokens + 1) // 2, tokens], dtype=torch.int32, device=query.device)
        _attempted(partial(computed, borders=ends, longest=(tokens + 1) // 2), query, key, value, 0)

    # one[0] would be copied into zeros in the backward pass
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if flash.is_newer():
        windowed = "" if scores.window is None else ", with a window"
        flash.check(f"rows of documents, {_kind_of(query, key, value)}{windowed}", attempt)
    return computed(query, key, value, row.borders, max(row.lengths)).unsqueeze(0)
