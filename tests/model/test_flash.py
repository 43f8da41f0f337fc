"""A newer FlashAttention in place of torch's own: when it is taken, what it is asked, and when it is taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library
from torch.nn.attention import _registry, current_flash_attention_impl, register_flash_attention_impl

from tonnage.kernels.switches import switched_off
from tonnage.model import flash
from tonnage.model.attention import PackedRow, packed_attention
from tonnage.parallel.recompute import RecomputeMode, recompute_blocks

CUDA = torch.device("cuda")


class Handle:
    """Kernels of an implementation that computes document after document, and notes what it was asked."""

    def __init__(self, refuses: Callable[[Tensor], bool] = lambda query: False) -> None:
        self.refuses, self.asked = refuses, list[dict[str, Any]]()
        self.library: Library | None = Library("aten", "IMPL", "CPU")
        self.library.impl("_flash_attention_forward", self.forward, "CPU")
        self.library.impl("_flash_attention_backward", self.backward, "CPU")

    def remove(self) -> None:
        self.library = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> Any:
        if self.refuses(query):
            raise RuntimeError("no such heads\nand more")
        borders, _, longest, *_ = given
        self.asked.append({"borders": borders.tolist(), "longest": longest, **named})
        output = computed(query, key, value, borders, named["window_size_left"], named["scale"])
        return output, torch.zeros(query.shape[1], len(query)), torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def backward(self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> Any:
        found, scale = [], named["scale"]
        for first, end in pairwise(given[2].tolist()):
            g, q, k, v = (one[first:end].transpose(0, 1).float() for one in (gradient, query, key, value))
            groups = len(q) // len(k)
            k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
            weights, by_weight = weights_of(q, k, named["window_size_left"], scale), g @ v.transpose(1, 2)
            by_score = weights * (by_weight - (by_weight * weights).sum(-1, keepdim=True)) * scale
            of_keys, of_values = by_score.transpose(1, 2) @ q, weights.transpose(1, 2) @ g
            summed = (one.unflatten(0, (-1, groups)).sum(1) for one in (of_keys, of_values))
            found.append([one.transpose(0, 1) for one in (by_score @ k, *summed)])
        return tuple(torch.cat(parts).to(query.dtype) for parts in zip(*found, strict=True))


def weights_of(query: Tensor, key: Tensor, left: int, scale: float) -> Tensor:
    """Weights of a document's attention, for (heads, tokens, size)."""
    position = torch.arange(query.shape[1])
    distance = position[:, None] - position[None]
    seen = (distance >= 0) & (distance <= left) if left >= 0 else distance >= 0
    return (query @ key.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")).softmax(-1)


def computed(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, left: int, scale: float) -> Tensor:
    """Attention of documents in a row: (tokens, heads, size)."""
    found = []
    for first, end in pairwise(borders.tolist()):
        q, k, v = (one[first:end].transpose(0, 1).float() for one in (query, key, value))
        groups = len(q) // len(k)
        weights = weights_of(q, k.repeat_interleave(groups, 0), left, scale)
        found.append((weights @ v.repeat_interleave(groups, 0)).transpose(0, 1))
    return torch.cat(found).to(query.dtype)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What is logged; with a registry, cards and packages of the test's own."""
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "_log", None)
    monkeypatch.setattr(flash, "_tried", set())
    monkeypatch.syspath_prepend(tmp_path)
    yield []
    flash.use_own()


def install(folder: Path, *packages: str) -> None:
    for package in packages:
        place = folder.joinpath(*package.split("."))
        place.mkdir(parents=True)
        (place.parent / "__init__.py").touch()
        (place / "__init__.py").write_text("raise ImportError('made for another torch')")


@pytest.mark.parametrize(
    ("capability", "found"), [((8, 0), []), ((9, 0), ["FA3", "FA4"]), ((10, 0), ["FA4"]), ((12, 0), [])]
)
def test_a_card_has_those_that_are_installed_and_made_for_it(
    capability: tuple[int, int], found: list[str], tmp_path: Path, said: list[str]
) -> None:
    assert flash.installed_for(capability) == []
    install(tmp_path, "flash_attn_interface", "flash_attn.cute")
    assert [one.key for one in flash.installed_for(capability)] == found


def test_another_package_of_that_name_is_not_taken_for_it(tmp_path: Path, said: list[str]) -> None:
    """``flash_attn`` is FlashAttention 2, too."""
    install(tmp_path, "flash_attn.layers")
    assert flash.installed_for((9, 0)) == []


def test_what_cannot_be_imported_is_told_and_the_next_is_taken(tmp_path: Path, said: list[str]) -> None:
    install(tmp_path, "flash_attn_interface", "flash_attn.cute")
    register_flash_attention_impl("FA4", register_fn=Handle)
    chosen = flash.choose(CUDA, said.append, newer=True)
    assert chosen is not None
    assert chosen.key == current_flash_attention_impl() == "FA4"
    assert said[0].startswith("FlashAttention 3 (flash_attn_interface) is installed, and attention does without: ")
    assert said[0].endswith("ImportError: made for another torch")
    assert said[1].startswith("attention: FlashAttention 4 (flash_attn.cute)")


def test_torchs_own_stays_where_nothing_is_installed_or_it_is_wanted(tmp_path: Path, said: list[str]) -> None:
    register_flash_attention_impl("FA3", register_fn=Handle)
    assert flash.choose(CUDA, said.append, newer=True) is None
    install(tmp_path, "flash_attn_interface")
    assert flash.choose(torch.device("cpu"), said.append, newer=True) is None
    assert flash.choose(CUDA, said.append, newer=True) is not None
    assert flash.choose(CUDA, said.append, newer=False) is None
    assert not flash.is_newer()
    assert len(said) == 1


def attend(size: int, window: int | None = None) -> list[Tensor]:
    """Attention of three documents as on a GPU, and gradients."""
    draw = torch.Generator().manual_seed(0)
    lengths = (40, 7, 25)
    query, key, value = (
        torch.randn(1, heads, sum(lengths), size, generator=draw, dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    )
    borders = torch.tensor([0, 40, 47, 72], dtype=torch.int32)
    row = PackedRow(lengths, borders)
    output, _ = packed_attention(nn.Identity(), query, key, value, None, sliding_window=window, row=row)
    return [output, *torch.autograd.grad(output.float().square().sum(), (query, key, value))]


def on_cpu(size: int, window: int | None = None) -> list[Tensor]:
    """The same by the kernels for CPUs."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 72, size, generator=draw, dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)
    )
    output, _ = packed_attention(
        nn.Identity(), query, key, value, None, sliding_window=window, row=PackedRow((40, 7, 25))
    )
    return [output, *torch.autograd.grad(output.float().square().sum(), (query, key, value))]


@pytest.mark.parametrize("window", [None, 9])
def test_a_row_of_documents_is_computed_by_it(window: int | None, tmp_path: Path, said: list[str]) -> None:
    """Forward and backward, with fewer heads of keys, and a window: torch asks it, not its own."""
    handle = Handle()
    install(tmp_path, "flash_attn_interface")
    register_flash_attention_impl("FA3", register_fn=lambda: handle)
    flash.choose(CUDA, said.append, newer=True)
    ours = attend(16, window)
    tried, asked = handle.asked
    assert tried["borders"] == [0, 32, 64]  # once, before the first row
    assert asked["borders"] == [0, 40, 47, 72]
    assert asked["longest"] == 40
    assert (asked["window_size_left"], asked["window_size_right"]) == ((-1, 0) if window is None else (8, 0))
    for one, other in zip(ours, on_cpu(16, window), strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)
    attend(16, window)
    assert len(handle.asked) == 3
    assert len(said) == 1


def test_heads_that_it_does_not_take_bring_torchs_own_back(tmp_path: Path, said: list[str]) -> None:
    handle = Handle(refuses=lambda query: query.shape[-1] > 16)
    install(tmp_path, "flash_attn_interface")
    register_flash_attention_impl("FA3", register_fn=lambda: handle)
    flash.choose(CUDA, said.append, newer=True)
    attend(16)
    with pytest.raises(NotImplementedError):  # which a CPU has not
        attend(24)
    assert not flash.is_newer()
    assert said[1:] == [
        "attention: torch's own FlashAttention, as FA3 does not take rows of documents, 4 heads of 24 over 2 in "
        "bfloat16: RuntimeError: no such heads"
    ]
    assert len(handle.asked) == 2


def test_documents_one_after_another_are_tried_too(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scores that drop out are, which no newer one takes; a CPU asks none."""
    install(tmp_path, "flash_attn_interface")
    register_flash_attention_impl("FA3", register_fn=Handle)
    flash.choose(CUDA, said.append, newer=True)
    own: Any = F.scaled_dot_product_attention

    def refusing(*given: Any, **named: Any) -> Any:
        if flash.is_newer() and named["dropout_p"]:
            raise RuntimeError("no dropout")
        return own(*given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", refusing)
    query = torch.randn(1, 2, 30, 20, dtype=torch.bfloat16)
    with switched_off(["widening"]):
        packed_attention(nn.Identity(), query, query, query, None, dropout=0.5, row=PackedRow((30,)))
    assert not flash.is_newer()
    assert said[1:] == [
        "attention: torch's own FlashAttention, as FA3 does not take single documents, 2 heads of 20 over 2 in "
        "bfloat16, with dropout: RuntimeError: no dropout"
    ]


class Block(nn.Module):
    """Attention of three documents over what a layer makes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 96, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.layer(hidden).view(1, 72, 3, 2, 16).permute(2, 0, 3, 1, 4)
        row = PackedRow((40, 7, 25), torch.tensor([0, 40, 47, 72], dtype=torch.int32))
        output, _ = packed_attention(self, query, key, value, None, row=row)
        return output.flatten(2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_tried_is_no_part_of_a_block_that_is_recomputed(
    mode: RecomputeMode, tmp_path: Path, said: list[str]
) -> None:
    handle = Handle()
    install(tmp_path, "flash_attn_interface")
    register_flash_attention_impl("FA3", register_fn=lambda: handle)
    flash.choose(CUDA, said.append, newer=True)
    torch.manual_seed(0)
    block, hidden = Block(), torch.randn(1, 72, 32, dtype=torch.bfloat16)
    recompute_blocks([block], mode)
    found = []
    for tries in (True, False):
        assert bool(flash._tried) is not tries
        block.zero_grad()
        block(hidden).float().square().sum().backward()
        assert block.layer.weight.grad is not None
        found.append(block.layer.weight.grad.clone())
    assert torch.equal(*found)
    assert flash.is_newer()
    assert len(said) == 1
