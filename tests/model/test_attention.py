"""Attention of packed rows on the CPU in bf16: our backward passes against the exact one, in fp64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tonnage.kernels import attention_loops, threads
from tonnage.model import attention
from tonnage.model.attention import PackedRow, Shared
from tonnage.model.cached import Scores
from tonnage.parallel.recompute import RecomputeMode, recompute_blocks
from tonnage.training.ledger import Ledger


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Each part of the row with all that it goes on from, in fp64, by definition."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    parts = torch.arange(query.shape[2]).split(row.lengths)
    outputs = []
    for number, own in enumerate(parts):
        before = [parts[one.part] for one in row.shared if one.part < number <= one.part + one.parts]
        seen = torch.cat([*sorted(before, key=lambda part: int(part[0])), own])
        scores = query[:, :, own] @ key[:, :, seen].transpose(2, 3) * query.shape[-1] ** -0.5
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        hidden = torch.ones(len(own), len(seen), dtype=torch.bool).triu(len(seen) - len(own) + 1)
        if sliding_window is not None:
            hidden |= ~torch.ones_like(hidden).triu(len(seen) - len(own) + 1 - sliding_window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        outputs.append(F.softmax(scores, -1)[..., : len(seen)] @ value[:, :, seen])
    return torch.cat(outputs, 2).transpose(1, 2)


def nested(*shared: tuple[int, int]) -> tuple[Shared, ...]:
    return tuple(Shared(part, parts) for part, parts in shared)


ROWS = {
    "three": PackedRow((1, 2, 40)),
    "one": PackedRow((300,)),
    "one of one": PackedRow((17, 256, 1)),
    "one of several blocks": PackedRow((40, 700, 33, 5, 64)),
    "a prefix": PackedRow((20, 5, 1, 40), shared=nested((0, 3))),
    "prefixes within prefixes": PackedRow(
        (7, 16, 3, 30, 9, 600, 1, 17, 5, 33, 2, 600), shared=nested((3, 2), (1, 6), (8, 3), (9, 2))
    ),
}


GRADIENTS_APART = {torch.bfloat16: 0.005, torch.float32: 2e-6}
"""From the exact ones, in parts of their length."""


def check_exact(heads: tuple[int, int], row: PackedRow, size: int, dtype: torch.dtype, **given: Any) -> None:
    """Hold ours to the exact one, in values and gradients."""
    torch.manual_seed(0)
    tokens = sum(row.lengths)
    shapes = [(1, tokens, number, size) for number in (heads[0], heads[1], heads[1])]
    inputs = [(2 * torch.randn(shape)).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]
    wide = [one.detach().double().requires_grad_() for one in inputs]
    of_wide = dict(given)
    if "s_aux" in given:
        inputs.append(sinks := (3 * torch.randn(heads[0])).requires_grad_())  # whose rounding would show
        wide.append(wide_sinks := sinks.detach().double().requires_grad_())
        given, of_wide = given | {"s_aux": sinks}, of_wide | {"s_aux": wide_sinks}
    upstream = torch.randn(1, tokens, heads[0], size).to(dtype)
    output, _ = attention.packed_attention(nn.Module(), inputs[0], inputs[1], inputs[2], None, row=row, **given)
    assert type(output.grad_fn).__name__ == "_PackedAttentionBackward"
    output.backward(upstream)
    expected = exact(wide[0], wide[1], wide[2], row, **of_wide)
    expected.backward(upstream.double())
    if dtype == torch.bfloat16:
        torch.testing.assert_close(output.double(), expected, rtol=2**-7, atol=2**-7)
    else:  # as near as torch's own operations in fp32
        query, key, value = (one.detach() for one in inputs[:3])
        theirs = exact(query, key, value, row, **given).detach()
        assert (output - expected).abs().max() < 2 * (theirs - expected).abs().max() + 1e-6
    for one, other in zip(inputs, wide, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad.double() - other.grad).norm() < GRADIENTS_APART[dtype] * other.grad.norm()


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("size", [16, 64, 80])
def test_gradients_are_the_exact_ones_rounded(heads: tuple[int, int], row: PackedRow, size: int) -> None:
    for dtype in GRADIENTS_APART:
        check_exact(heads, row, size, dtype)


SCORES: dict[str, dict[str, Any]] = {
    "a window": {"sliding_window": 100},
    "a window of tiles": {"sliding_window": 401},
    "caps": {"softcap": 3.0},
    "sinks": {"s_aux": True},
    "all": {"sliding_window": 70, "softcap": 5.0, "s_aux": True},
}


NUMBERS = {"fp32": (torch.float32, 16), "bf16": (torch.bfloat16, 16), "bf16, whole registers": (torch.bfloat16, 64)}
"""Types of numbers, and sizes of heads: tile registers multiply those that are a multiple of 32."""


@pytest.mark.parametrize("given", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("row", ["one of several blocks", "prefixes within prefixes"])
def test_windows_caps_and_sinks_are_the_exact_ones(
    given: dict[str, Any], numbers: tuple[torch.dtype, int], row: str
) -> None:
    dtype, size = numbers
    check_exact((4, 2), ROWS[row], size, dtype, **given)


def test_a_window_of_two_is_the_exact_one() -> None:
    """In fp32: backward passes know a row by its output, and of two tokens the rounding of that to bf16 shows."""
    for row in ("one of several blocks", "prefixes within prefixes"):
        check_exact((4, 2), ROWS[row], 16, torch.float32, sliding_window=2)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"sliding_window": 1024}], ids=["all", "a window"])
def test_a_long_document_is_the_exact_one(given: dict[str, Any]) -> None:
    check_exact((3, 1), PackedRow((2500, 1, 1200)), 64, torch.bfloat16, **given)


def test_bits_do_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 1000, 16, requires_grad=True) for heads in (3, 1, 1)]
    query, key, value = inputs
    results, before = [], threads.num_threads()
    try:
        for number in (1, before):
            threads.use_loop_threads(number)
            output = attention.packed_attention(nn.Module(), query, key, value, None, row=PackedRow((900, 100)))[0]
            results.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
    finally:
        threads.use_loop_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_what_is_no_number_stays_in_its_document(numbers: tuple[torch.dtype, int]) -> None:
    """Though a thread uses the same memory for the next one, whose tiles it does not fill."""
    torch.manual_seed(0)
    row, (dtype, size) = PackedRow((400, 5)), numbers
    whole = [torch.randn(1, 2, 405, size).to(dtype) for _ in range(3)]
    results = []
    for spoilt in (False, True):
        inputs = [one.clone() for one in whole]
        if spoilt:
            for one in inputs:
                one[:, :, :400] = float("nan")
        for one in inputs:
            one.requires_grad_()
        query, key, value = inputs
        output = attention.packed_attention(nn.Module(), query, key, value, None, row=row)[0]
        gradients = torch.autograd.grad(output[:, 400:].sum(), inputs)
        results.append((output[:, 400:], *(one[:, :, 400:] for one in gradients)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert output[:, :400].isnan().all()


TILES = {"6 x 16": (6, 16, 48), "8 x 32": (8, 32, 64)}


@pytest.mark.matrix
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles_of_all_processors_give_the_exact_ones(tile: tuple[int, int, int], tmp_path: Path) -> None:
    script = f"""
import torch
from tonnage.kernels import tiles
tiles.ROWS, tiles.COLUMNS, tiles.BLOCK = {tile}
tiles.PAIRS = False
tiles.set_product, tiles.add_product = (tiles._make_product(adds=adds) for adds in (False, True))
from model import test_attention as tests
for row in ("one of several blocks", "prefixes within prefixes"):
    for given in tests.SCORES["a window"], tests.SCORES["all"], dict():
        for dtype in tests.GRADIENTS_APART:
            tests.check_exact((6, 2), tests.ROWS[row], 80, dtype, **given)
"""
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_positions_go_on_from_prefixes() -> None:
    row = PackedRow((2, 3, 2, 1, 2, 4), shared=nested((2, 2), (1, 4)))
    assert row.positions().tolist() == [0, 1, *(0, 1, 2), *(3, 4), 5, *(5, 6), *(3, 4, 5, 6)]


def test_what_cannot_let_documents_share_says_so() -> None:
    query, key, value = (torch.randn(1, 2, 12, 8) for _ in range(3))
    for given in ({}, {"sliding_window": 11}, {"softcap": 20.0}, {"s_aux": torch.zeros(2)}):
        row = PackedRow((12,))
        attention.packed_attention(nn.Module(), query, key, value, None, row=row, **given)
        assert row.can_share
    row = PackedRow((12,))
    attention.packed_attention(nn.Module(), query, key, value, None, row=row, dropout=0.1)
    attention.packed_attention(nn.Module(), query, key, value, None, row=row)
    assert not row.can_share, "one layer that cannot is enough"


def test_a_window_that_hides_something_is_not_ignored() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 8).bfloat16() for _ in range(3))
    row = PackedRow((9,))
    narrow, _ = attention.packed_attention(nn.Module(), query, key, value, None, sliding_window=3, row=row)
    whole, _ = attention.packed_attention(nn.Module(), query, key, value, None, sliding_window=9, row=row)
    torch.testing.assert_close(narrow[:, :3], whole[:, :3], rtol=2**-7, atol=2**-7)
    assert not torch.allclose(narrow[:, 3:], whole[:, 3:], atol=0.05)


@pytest.mark.parametrize("size", [1, 4])
def test_inputs_and_gradients_may_lie_in_any_way(size: int) -> None:
    torch.manual_seed(0)
    plain = [torch.randn(1, 2, 9, size, requires_grad=True) for _ in range(3)]
    turned = [one.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for one in plain]
    outputs = []
    for query, key, value in (plain, turned):
        outputs.append(attention.packed_attention(nn.Module(), query, key, value, None)[0])
        outputs[-1].sum().backward()  # whose gradient has no memory of its own
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    for one, other in zip(plain, turned, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_is_left_to_compile_in_a_step(dtype: torch.dtype) -> None:
    attention.compile_loops(dtype)
    loops = attention_loops.forward, attention_loops.backward
    compiled = [set(one.signatures) for one in loops]
    query, key, value = torch.randn(3, 9, 1, 4, 8, dtype=dtype).permute(0, 2, 3, 1, 4).requires_grad_()
    row = PackedRow((3, 2, 4), shared=nested((0, 2)))
    attention.packed_attention(nn.Module(), query, key, value, None, row=row)[0].sum().backward()
    assert [set(one.signatures) for one in loops] == compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_their_own_equal_one_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, heads, 7, 8).to(dtype) for heads in (4, 2, 2))
    apart = [
        attention.packed_attention(nn.Module(), query[row], key[row], value[row], None)[0]
        for row in (slice(at, at + 1) for at in range(3))
    ]
    together = attention.packed_attention(nn.Module(), query, key, value, None)[0]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize("scaling", [-0.3, 0.0])
def test_scores_may_be_turned_around_or_all_alike(scaling: float) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 8) for _ in range(3))
    output, _ = attention.packed_attention(nn.Module(), query, key, value, None, scaling=scaling)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(output, (scores.softmax(-1) @ value).transpose(1, 2))  # torch's fused one has no numbers


def test_values_of_another_size_than_keys() -> None:
    """As in latent attention."""
    torch.manual_seed(0)
    query, key = (torch.randn(1, heads, 9, 12, requires_grad=True) for heads in (4, 4))
    value = torch.randn(1, 4, 9, 8, requires_grad=True)
    output = attention.packed_attention(nn.Module(), query, key, value, None, row=PackedRow((5, 4)))[0]
    parts = [(query[:, :, at], key[:, :, at], value[:, :, at]) for at in (slice(5), slice(5, 9))]
    apart = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts]
    expected = torch.cat(apart, 2).transpose(1, 2)
    assert output.shape == (1, 9, 4, 8)
    torch.testing.assert_close(output, expected)
    ours, theirs = (torch.autograd.grad(of.square().sum(), (query, key, value)) for of in (output, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sinks_equal_those_of_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    module.sinks = nn.Parameter(torch.randn(4) * 3)
    output = attention.packed_attention(
        module, query, key, value, None, s_aux=module.sinks, sliding_window=3, row=PackedRow((5, 4))
    )[0]
    for start, end in ((0, 5), (5, 9)):
        ids = torch.arange(end - start)
        hidden = (ids[:, None] < ids) | (ids[:, None] - ids >= 3)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None]
        q, k, v = (one[:, :, start:end] for one in (query, key, value))
        expected = eager_attention_forward(module, q, k, v, mask, scaling=8**-0.5)[0]
        torch.testing.assert_close(output[:, start:end], expected)
    assert module.sinks.untyped_storage().resizable()  # as whoever shards it frees it


def of_documents(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, _: Tensor, *longest: int, scale: float, **given: Any
) -> Tensor:
    """What ``varlen_attn`` computes, a document at a time."""
    assert given.pop("window_size") == (-1, 0)
    assert longest == (int(borders.diff().max()),) * 2
    parts = []
    for start, end in pairwise(borders.tolist()):
        q, k, v = (one[start:end].transpose(0, 1).unsqueeze(0) for one in (query, key, value))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def as_in_torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, return_aux: None = None, scale: float, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    return of_documents(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def as_now(*given: Any, enable_gqa: bool = False, **named: Any) -> Tensor:
    assert enable_gqa
    return of_documents(*given, **named)


@pytest.mark.parametrize("varlen_attn", [as_in_torch_2_11, as_now])
def test_the_kernel_for_documents_is_called_as_its_torch_knows_it(
    varlen_attn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 43, 16) for heads in (6, 2, 2))
    row = PackedRow((1, 2, 40), torch.tensor([0, 1, 3, 43], dtype=torch.int32))
    scores = Scores(0.25, window=None, softcap=None, sinks=None, dropout=0.0)
    found = attention._varlen_attention(query, key, value, row, scores)
    torch.testing.assert_close(found, exact(query, key, value, row))


@pytest.mark.parametrize(
    ("dtype", "size", "of_values", "card", "takes"),
    [
        (torch.bfloat16, 128, 128, (9, 0), True),
        (torch.float16, 256, 256, (8, 0), True),
        (torch.float16, 64, 64, (7, 5), False),
        (torch.bfloat16, 20, 20, (9, 0), False),
        (torch.bfloat16, 320, 320, (9, 0), False),
        (torch.bfloat16, 192, 128, (9, 0), False),
        (torch.float32, 64, 64, (9, 0), False),
    ],
)
def test_cards_and_heads_that_the_kernel_for_documents_takes(
    dtype: torch.dtype,
    size: int,
    of_values: int,
    card: tuple[int, int],
    takes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    there = torch.device("cuda", 0)
    query, value = (SimpleNamespace(shape=(1, 2, 9, one), dtype=dtype, device=there) for one in (size, of_values))
    assert attention._varlen_takes(cast(Tensor, query), cast(Tensor, value)) == takes


def on_a_gpu(*lengths: int) -> PackedRow:
    """A row as it is there, for tensors that are here."""
    return PackedRow(lengths, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


CAPPED: dict[str, dict[str, Any]] = {
    "caps": {"softcap": 3.0},
    "caps and a window": {"softcap": 3.0, "sliding_window": 5},
    "sinks and a wide window": {"s_aux": True, "sliding_window": 17},
}


@pytest.mark.parametrize("given", CAPPED.values(), ids=CAPPED)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_gpu_has_the_scores_of_some_queries_at_a_time(
    given: dict[str, Any], recompute: RecomputeMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a document gives that has all of them at a time, and never one matrix of tokens by tokens."""
    monkeypatch.setattr(attention, "QUERIES", 8)
    monkeypatch.setattr(attention, "is_on", lambda _: False)  # the CPU's loops have no such matrix either
    torch.manual_seed(0)
    heads, lengths = 4, (3, 8, 260, 21)
    inputs = [(2 * torch.randn(1, number, sum(lengths), 6)).requires_grad_() for number in (heads, 2, 2)]
    sinks = nn.Parameter(torch.randn(heads) * 3)
    given = given | ({"s_aux": sinks} if "s_aux" in given else {})
    wanted = [*inputs, *([sinks] if "s_aux" in given else [])]
    gradient = torch.randn(1, sum(lengths), heads, 6)
    found, most = [], []
    for row in (PackedRow(lengths), on_a_gpu(*lengths)):
        module = nn.Module()
        module.forward = partial(attention.packed_attention, module, attention_mask=None, row=row, **given)
        recompute_blocks([module], recompute)
        with Ledger() as ledger:
            output = module(*inputs)[0]
            gradients = torch.autograd.grad(output, wanted, gradient)
            most.append(max(ledger.mark().heights))
        found.append((output, *gradients))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    matrix = heads * 260 * 260 * 4
    assert most[0] > 2 * matrix
    assert most[1] < matrix / 2  # those of some queries, all of which are kept, would be more


def test_heads_of_a_gpu_are_not_grouped_where_its_kernel_would_keep_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that take groups and keep no scores are FlashAttention's, for other numbers than these."""
    called = list[tuple[int, bool]]()
    as_is = F.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
        called.append((key.shape[1], named["enable_gqa"]))
        return as_is(query, key, value, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(attention, "is_on", lambda _: False)
    query, key, value = (torch.randn(1, heads, 43, 16, requires_grad=True) for heads in (6, 2, 2))
    row = on_a_gpu(1, 2, 40)
    found = attention.packed_attention(nn.Module(), query, key, value, None, row=row)[0]
    assert called == [(6, False)] * 3
    expected = exact(query, key, value, row)
    torch.testing.assert_close(found, expected)
    for one in (query, key, value):
        ours, theirs = (torch.autograd.grad(of.square().sum(), one, retain_graph=True)[0] for of in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def looking_ahead(query: Tensor, key: Tensor, value: Tensor, images: Tensor, window: int | None, cap: float) -> Tensor:
    """Attention of one document by definition; ``images``: of every token, -1 of none."""
    groups, place = query.shape[1] // key.shape[1], torch.arange(len(images))
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    seen = place[:, None] >= place
    for image in images.unique().tolist():
        if image >= 0:
            seen |= torch.outer(images == image, images == image)
    if window is not None:
        seen &= place[:, None] - place < window
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    scores = torch.tanh(scores / cap) * cap if cap else scores
    return (F.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ value).transpose(1, 2)


@pytest.mark.parametrize("layers", ["all", "windows"])
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("row", ["one row", "one row on a GPU", "rows of their own"])
def test_tokens_of_an_image_see_those_after_them(
    layers: str, window: int | None, cap: float, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images of the first document, farther apart and longer than the window; a document without any; and one that
    begins with an image of the same number as that before. Attention of all layers, or of those with a window."""
    monkeypatch.setattr(attention, "QUERIES", 4)
    torch.manual_seed(0)
    lengths = (24, 24, 24) if row == "rows of their own" else (24, 9, 31)
    images = torch.full((sum(lengths),), -1)
    images[3:13], images[15:21] = 0, 1
    images[sum(lengths[:2]) : sum(lengths[:2]) + 8] = 0
    inputs = [(2 * torch.randn(1, heads, sum(lengths), 8)).requires_grad_() for heads in (4, 2, 2)]
    looks = images if layers == "all" or window is not None else torch.full_like(images, -1)
    split = (tensor.split(lengths, dim=2) for tensor in inputs)
    apart = zip(*split, looks.split(lengths), strict=True)
    expected = torch.cat([looking_ahead(q, k, v, of, window, cap) for q, k, v, of in apart], dim=1)

    if row == "rows of their own":
        arguments = attention.looking_ahead({}, images.view(3, 24), layers, torch.device("cpu"))
        given = [tensor[0].view(-1, 3, 24, 8).transpose(0, 1) for tensor in inputs]
    else:
        of_row = on_a_gpu(*lengths) if row == "one row on a GPU" else PackedRow(lengths)
        arguments, given = attention.looking_ahead({"row": of_row}, images[None], layers, torch.device("cpu")), inputs
    more: dict[str, Any] = {"sliding_window": window, "softcap": cap or None, **arguments}
    query, key, value = given
    output = attention.packed_attention(nn.Module(), query, key, value, None, **more)[0].view_as(expected)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    gradient = torch.randn_like(expected)
    of_expected = torch.autograd.grad(expected, inputs, gradient)
    for ours, theirs in zip(torch.autograd.grad(output, inputs, gradient), of_expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
