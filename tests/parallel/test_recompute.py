"""Gradients are the same however blocks recompute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tonnage.kernels.products import use_fast_products
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta
from tonnage.model.tiny import draw, shrink
from tonnage.parallel.recompute import RecomputeMode, recompute_blocks

MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")


class Block(nn.Module):
    """Two products with something between them, beside what comes in."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), between

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self.down(torch.tanh(self.between(self.up(hidden), hidden)))
        return hidden + product


def add_in_place(product: Tensor, hidden: Tensor) -> Tensor:
    product += hidden
    return product


def write_a_part(product: Tensor, hidden: Tensor) -> Tensor:
    product[..., :3] = hidden[..., :3]
    return product


def add_with_out(product: Tensor, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        torch.add(product, hidden, out=product)
    return product


BETWEEN = {one.__name__: one for one in (add_in_place, write_a_part, add_with_out)}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_product_that_is_written_to(between: str) -> None:
    """Whoever keeps it has to see that, although the product of three dimensions is a view without its counter."""
    found: dict[str, list[Tensor]] = {}
    for mode in MODES:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(BETWEEN[between]) for _ in range(3))
        hidden = torch.randn(2, 5, 8, requires_grad=True)
        recompute_blocks(list(blocks), mode)
        output = hidden
        for block in blocks:
            output = block(output)
            output += 1.0  # to what leaves a block, a product of its
        output.square().sum().backward()
        found[mode] = [torch.as_tensor(one.grad) for one in (hidden, *blocks.parameters())]
    for mode in MODES[1:]:
        for ours, kept in zip(found[mode], found["none"], strict=True):
            assert torch.equal(ours, kept), mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_nobody_writes_to_are_not_computed_again(dtype: torch.dtype) -> None:
    """In bf16, where the processor has that, layers with a bias are an operation of their own."""
    counted: dict[str, int] = {}
    for mode in MODES:
        block = Block(lambda product, hidden: product + hidden).to(dtype)
        use_fast_products(block)
        recompute_blocks([block], mode)
        output = block(torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)).square().sum()
        with FlopCounterMode(display=False) as counter:
            output.backward()
        counted[mode] = counter.get_total_flops()
    assert counted["full"] > counted["selective"] == counted["none"]


@pytest.mark.parametrize("name", ["falcon", "gemma3n_text", "gpt_oss"])
def test_families_that_write_to_what_they_have_computed(name: str) -> None:
    config, found = shrink(CONFIG_MAPPING[name]()), dict[str, dict[str, Tensor]]()
    ids = torch.randint(3, 90, (2, 17), generator=torch.Generator().manual_seed(1))
    for mode in MODES:
        model = build_on_meta(config, torch.float32, attention_name="eager")
        allocate(model, torch.device("cpu"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        draw(model.eval(), 1.0)
        recompute_blocks(dissect(model).blocks, mode)
        model(ids, labels=ids, use_cache=False).loss.backward()
        found[mode] = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    for mode in MODES[1:]:
        for name, kept in found["none"].items():
            assert torch.equal(found[mode][name], kept), f"{mode}: {name}"
