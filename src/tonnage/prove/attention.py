"""Attention over packs, forward and backward, beside torch's own in fp32, document by document."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tonnage.model.attention import packed_attention, packing_arguments
from tonnage.prove.proof import Proof

LENGTHS = (1, 7, 64, 129, 300, 523)
"""Of the documents of a row."""
FEW = (1, 7, 33, 80)
HEADS = 8
WINDOW = 100


class _Causal(nn.Module):
    is_causal = True


def prove(proof: Proof) -> None:
    """Heads of three sizes, grouped and not, with and without a window."""
    few = proof.brief
    lengths = FEW if few else LENGTHS
    for size, groups, window in itertools.product((64,) if few else (64, 128, 256), (2, HEADS), (None, WINDOW)):
        kind = f"heads of {size}, {HEADS} of queries, {groups} of keys" + (f", window {window}" if window else "")
        _one(proof, kind, size, groups, window, lengths)


def _one(proof: Proof, kind: str, size: int, groups: int, window: int | None, lengths: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(size + groups)
    tokens = sum(lengths)

    def drawn(heads: int) -> Tensor:
        return torch.randn(1, heads, tokens, size, generator=generator).to(torch.bfloat16)

    tensors = [drawn(HEADS), drawn(groups), drawn(groups)]
    upstream = torch.randn(1, tokens, HEADS, size, generator=generator).to(torch.bfloat16)
    tensors, upstream = [tensor.to(proof.device) for tensor in tensors], upstream.to(proof.device)
    row = packing_arguments(lengths, proof.device)["row"]

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, _ = packed_attention(_Causal(), query, key, value, None, sliding_window=window, row=row)
        return output

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _by_document(query, key, value, lengths, window)

    exact = _numbers(theirs, [tensor.float() for tensor in tensors], upstream.float())
    mine_all, usual = _numbers(ours, tensors, upstream), _numbers(theirs, tensors, upstream)
    for name, right, mine, other in zip(
        ("output", "gradient of queries", "gradient of keys", "gradient of values"), exact, mine_all, usual, strict=True
    ):
        error, usually = float((mine.float() - right).norm()), float((other.float() - right).norm())
        proof.found("attention", f"{kind}, {name}", error / max(usually, 1e-12))
        cosine = F.cosine_similarity(mine.float().flatten(), right.flatten(), dim=0)
        proof.found("attention, cosine", f"{kind}, {name}", float(cosine))


def _numbers(function: object, inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)  # type: ignore[operator]
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def _by_document(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], window: int | None) -> Tensor:
    """torch's attention, a document at a time, with masks written out."""
    outputs, groups = [], query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    for q, k, v in zip(*(tensor.split(list(lengths), dim=2) for tensor in (query, key, value)), strict=True):
        tokens = q.shape[2]
        place = torch.arange(tokens, device=q.device)
        behind = place[:, None] - place[None, :]
        sees = (behind >= 0) & (behind < (window or tokens))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=sees))
    return torch.cat(outputs, dim=2).transpose(1, 2)
