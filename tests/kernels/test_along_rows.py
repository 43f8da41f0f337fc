"""Products along the rows of two matrices, by tile registers, against exact ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tonnage.kernels import along_rows, products, threads
from tonnage.kernels.tile_registers import AMX

pytestmark = pytest.mark.skipif(not AMX, reason="a processor without tile registers")

SIZES = [(1, 1, 1), (33, 16, 40), (100, 50, 70), (300, 33, 800), (513, 600, 96), (260, 1, 2)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize(("rows", "left", "right"), SIZES)
@pytest.mark.parametrize("at_a_time", [along_rows.LAID_OUT, 1])
def test_sums_are_exact_but_for_one_rounding(
    rows: int, left: int, right: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(along_rows, "LAID_OUT", at_a_time)
    torch.manual_seed(0)
    slopes, inputs = drawn(rows, left), drawn(rows, right)
    exact = slopes.double().t() @ inputs.double()
    with FlopCounterMode(display=False) as counter:
        result = products.product(slopes.t(), inputs)
    assert counter.get_total_flops() == 2 * rows * left * right
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-5)
    total = torch.full((left, right), 3.0)
    along_rows.bring_product(total, slopes, inputs)
    torch.testing.assert_close(total, 3 + result.float(), rtol=0, atol=0)


def test_parts_of_larger_matrices() -> None:
    """Rows that are further apart than they are long, results that lie in another, and rows that are all one."""
    torch.manual_seed(0)
    slopes, inputs = drawn(70, 90)[:, 10:60], drawn(70, 80)[:, :40]
    exact = slopes.double().t() @ inputs.double()
    out = torch.zeros(60, 40, dtype=torch.bfloat16)
    assert products.product(slopes.t(), inputs, out=out[5:55]).data_ptr() == out[5].data_ptr()
    torch.testing.assert_close(out[5:55].double(), exact, rtol=2**-8, atol=1e-5)
    assert not out[:5].any()
    assert not out[55:].any()
    equal = torch.ones(1, 50).bfloat16().expand(70, 50)
    summed = inputs.double().sum(0).expand(50, 40)
    torch.testing.assert_close(products.product(equal.t(), inputs).double(), summed, rtol=2**-8, atol=1e-5)


def test_what_is_no_number_stays_where_it_belongs() -> None:
    """The next product, whose tiles are not full, finds nothing of it in memory that both use."""
    torch.manual_seed(0)
    slopes, inputs = drawn(600, 64), drawn(600, 64)
    slopes[5, 7] = float("nan")
    spoilt = products.product(slopes.t(), inputs)
    assert spoilt[7].isnan().all()
    assert spoilt[:7].isfinite().all()
    assert products.product(slopes[9:20, :5].t(), inputs[9:20, :9]).isfinite().all()


def test_bits_do_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    slopes, inputs, results, before = drawn(700, 300), drawn(700, 900), [], threads.num_threads()
    try:
        for number in (1, before):
            threads.use_loop_threads(number)
            results.append(products.product(slopes.t(), inputs))
    finally:
        threads.use_loop_threads(before)
    assert torch.equal(*results)


def test_a_layer_adds_its_gradient_to_the_sum_of_micro_batches() -> None:
    torch.manual_seed(0)
    weight, inputs, upstream = drawn(40, 30).requires_grad_(), drawn(50, 30), drawn(50, 40)
    weight.grad_dtype = None
    total = weight.grad = torch.full((40, 30), 2.0)
    products.linear(inputs, weight, None).backward(upstream)
    assert weight.grad is total
    assert torch.equal(total, 2 + products.product(upstream.t(), inputs).float())
