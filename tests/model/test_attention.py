"""Attention of packed rows on the CPU in bf16: our backward passes against the exact one, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tonnage.model import attention


def exact(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Each document alone, in fp64, by definition."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs = []
    for q, k, v in zip(*(one.split(lengths, 2) for one in (query, key, value)), strict=True):
        length = q.shape[2]
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        outputs.append(F.softmax(scores, -1) @ v)
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [(1, 2, 40), (300,), (17, 256, 1), (40, 700, 33, 5, 64)])
@pytest.mark.parametrize("widened", [False, True], ids=["in bf16", "in fp32"])
def test_gradients_are_the_exact_ones_rounded(
    heads: tuple[int, int], lengths: tuple[int, ...], widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "goes_through_fp32", lambda tensor: widened)
    monkeypatch.setattr(attention, "WEIGHTS_TOGETHER", 2 * heads[0] * 64 * 64)  # two documents of 64 at a time
    torch.manual_seed(0)
    tokens = sum(lengths)
    shapes = [(1, number, tokens, 16) for number in (heads[0], heads[1], heads[1])]
    given = [(2 * torch.randn(shape)).bfloat16().requires_grad_() for shape in shapes]
    wide = [one.detach().double().requires_grad_() for one in given]
    upstream = torch.randn(1, tokens, heads[0], 16).bfloat16()
    row = attention.PackedRow(lengths)
    query, key, value = given
    output, _ = attention.packed_attention(nn.Module(), query, key, value, None, row=row)
    assert type(output.grad_fn).__name__ == "_PackedAttentionBackward"
    output.backward(upstream)
    expected = exact(wide[0], wide[1], wide[2], lengths)
    expected.backward(upstream.double())
    torch.testing.assert_close(output.double(), expected, rtol=2**-7, atol=2**-7)
    for one, other in zip(given, wide, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        error = (one.grad.double() - other.grad).norm() / other.grad.norm()
        assert error < 0.01  # a weight and a slope are rounded to 8 bits each


def test_a_window_that_hides_something_is_not_ignored() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 8).bfloat16() for _ in range(3))
    row = attention.PackedRow((9,))
    narrow, _ = attention.packed_attention(nn.Module(), query, key, value, None, sliding_window=3, row=row)
    whole, _ = attention.packed_attention(nn.Module(), query, key, value, None, sliding_window=9, row=row)
    assert torch.equal(narrow[:, :3], whole[:, :3])
    assert not torch.allclose(narrow[:, 3:], whole[:, 3:], atol=0.05)
