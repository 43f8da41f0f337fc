"""Attention for packs: documents that lie side by side in one row and never see each other.

A micro-batch is one row of tokens, documents one after another, no padding. Positions restart at each document,
and attention is computed within each document only, so a packed document gets exactly the numbers it would get
alone. The function is registered with transformers under ``NAME`` through its ``AttentionInterface``; a name
that is not registered as a mask maker makes transformers build no mask at all, so no ``tokens x tokens`` matrix
ever exists.

* CPU, and any dtype that the CUDA kernel does not take: one ``scaled_dot_product_attention`` per document.
* CUDA, bf16 or fp16: ``torch.nn.attention.varlen``, one kernel for the row.

The documents' lengths travel as keyword arguments through the model's own forward (``packing_arguments``).
What cannot be isolated is refused by ``check_packable``, never warned about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tonnage.errors import Problem, UserError
from tonnage.model.products import goes_through_fp32

NAME = "tonnage_packed"


def register() -> str:
    """Make ``packed_attention`` known to transformers; returns the name to build a model with."""
    # Compiled blocks call it as it is: lengths differ from pack to pack, and its kernels are fused already.
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    return NAME


class PackedRow:
    """Where documents lie in a row. An object, because compiled code would take numbers among its arguments for
    constants, and be compiled anew for every row."""

    def __init__(self, lengths: tuple[int, ...], borders: Tensor | None = None) -> None:
        self.lengths = lengths
        """Tokens of each document."""
        self.borders = borders
        """int32 (documents + 1,): first token of each document, and the end of the row; on CUDA only."""


def packing_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the model's forward that describe one packed row.

    ``lengths``: tokens of each document; their sum is the length of the row. ``position_ids`` has shape
    (1, tokens) and restarts at zero in each document.
    """
    positions = torch.cat([torch.arange(length) for length in lengths])
    borders = None
    if device.type == "cuda":
        borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return {"position_ids": positions.unsqueeze(0).to(device), "row": PackedRow(tuple(lengths), borders)}


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
    if goes_through_fp32(query):
        wide = (query.float(), key.float(), value.float())
        narrow = packed_attention(module, *wide, attention_mask, dropout, scaling, sliding_window, softcap, row)[0]
        return narrow.to(query.dtype), None
    lengths = (query.shape[2],) if row is None else row.lengths
    if (
        row is not None
        and row.borders is not None
        and softcap is None
        and dropout == 0.0
        and query.dtype in (torch.bfloat16, torch.float16)
    ):
        return _varlen_attention(query, key, value, lengths, row.borders, scaling, sliding_window), None
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
