"""The gradient of the token embedding, against torch's own in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tonnage.kernels.embedding import HeadsGradient, add_rows, use_fast_embedding
from tonnage.kernels.sums import PIECE


def embeddings(dtype: torch.dtype, padding: int | None = None, head: HeadsGradient | None = None) -> list[nn.Embedding]:
    """One that is torch's, and one that is ours, of the same weight."""
    torch.manual_seed(0)
    theirs = nn.Embedding(60, 24, padding_idx=padding)
    ours = nn.Embedding(60, 24, padding_idx=padding, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    use_fast_embedding(ours, head)
    return [theirs, ours]


@pytest.mark.parametrize("padding", [None, 7])
def test_fp32_is_torchs_to_the_bit(padding: int | None) -> None:
    ids = torch.randint(0, 20, (2, 50))
    ids[0, :5] = 7
    upstream = torch.randn(2, 50, 24)
    theirs, ours = embeddings(torch.float32, padding)
    for one in (theirs, ours):
        output = one(ids)
        assert output.equal(theirs.weight[ids])
        output.backward(upstream)
    assert theirs.weight.grad is not None
    assert ours.weight.grad is not None
    assert ours.weight.grad.equal(theirs.weight.grad)


def test_16_bits_are_rounded_once_however_often_a_token_comes() -> None:
    ids, upstream = torch.randint(0, 3, (1, 3000)), torch.rand(1, 3000, 24).bfloat16()
    theirs, ours = embeddings(torch.bfloat16)
    ours(ids).backward(upstream)
    theirs(ids).backward(upstream.float())
    assert theirs.weight.grad is not None
    assert ours.weight.grad is not None
    assert ours.weight.grad.equal(theirs.weight.grad.bfloat16())


def test_it_is_added_to_the_heads() -> None:
    head, ids = HeadsGradient(), torch.randint(0, 20, (1, 50))
    theirs, ours = embeddings(torch.float32, head=head)
    upstream, heads = torch.randn(1, 50, 24), torch.randn(60, 24)
    output = ours(ids)
    assert head.is_awaited()
    assert not head.is_awaited(), "by one pass"
    head.gradient = heads.clone()
    output.backward(upstream)
    theirs(ids).backward(upstream)
    assert theirs.weight.grad is not None
    assert ours.weight.grad is not None
    assert ours.weight.grad.equal(heads + theirs.weight.grad)
    assert head.fetch() is None
    with torch.no_grad():
        ours(ids)
    assert not head.is_awaited(), "by a pass without gradients"


def test_rows_wider_than_a_piece() -> None:
    ids = torch.randint(0, 9, (PIECE // 20,))
    rows = torch.randn(len(ids), 50)
    total = torch.ones(9, 50)
    expected = total.double().index_add(0, ids, rows.double())
    add_rows(total, ids, rows)
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-3)


def test_what_torch_does_besides_is_left_to_it() -> None:
    for module in (nn.Embedding(4, 3, max_norm=1.0), nn.Embedding(4, 3, scale_grad_by_freq=True)):
        use_fast_embedding(module)
        assert "forward" not in vars(module)
