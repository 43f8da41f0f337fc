"""Products with packed weights are those with the widened ones, forward and backward, in parts that are never all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from golden_quantized import FORMATS, bell
from tonnage.host import quantized as sizes
from tonnage.host.quantized import Format
from tonnage.kernels import grouped, products, quantized_loops, quantized_products
from tonnage.kernels.grouped import grouped_product
from tonnage.kernels.quantized import DTYPES, PackedWeight, pack, unpack, widen
from tonnage.kernels.quantized_products import linear
from tonnage.kernels.switches import switched_off

WAYS = {"loops": (), "torch": ("quantized",)}
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Of the type: results are rounded once."""
SHAPES = [(96, 64), (64, 192), (320, 448), (40, 30)]
ENDS = torch.tensor([0, 9, 9, 26, 26])


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 rows or columns."""
    monkeypatch.setattr(sizes, "WORKING_NUMBERS", 1)


def near(ours: Tensor | None, exact: Tensor | None, dtype: torch.dtype) -> bool:
    assert ours is not None
    assert exact is not None
    assert ours.dtype == dtype
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm()) < TOLERANCES[dtype]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("way", "slow"), [("loops", False), ("loops", True), ("torch", False)])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_and_its_gradients(
    shape: tuple[int, int], dtype: torch.dtype, form: Format, way: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without bias, on processors that have 16-bit products and on those that have not."""
    monkeypatch.setattr(products, "processor_is_slow", lambda kind: slow and kind != torch.float32)
    torch.manual_seed(0)
    packed = pack(bell(shape, 0), form)
    inputs = torch.randn(3, 7, shape[1]).to(dtype).requires_grad_()
    bias, gradient = torch.randn(shape[0]).to(dtype).requires_grad_(), torch.randn(3, 7, shape[0]).to(dtype)
    with switched_off(WAYS[way]):
        output, without = linear(inputs, packed, bias), linear(inputs.detach(), packed)
        output.backward(gradient)
    wide, exact_bias = (tensor.detach().double().requires_grad_() for tensor in (inputs, bias))
    weight = unpack(packed, dtype).double()
    expected = F.linear(wide, weight, exact_bias)
    expected.backward(gradient.double())
    assert near(output, expected, dtype)
    assert near(without, F.linear(wide, weight), dtype)
    assert near(inputs.grad, wide.grad, dtype)
    assert near(bias.grad, exact_bias.grad, dtype)


@pytest.mark.parametrize("form", FORMATS)
def test_parts_make_up_the_whole(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole numbers in fp32, whose sums are exact: no row and no column is left out or counted twice."""
    packed = pack(torch.full((200, 320), 2.0), form)
    inputs, gradient = torch.arange(5 * 320.0).view(5, 320).requires_grad_(), torch.arange(5 * 200.0).view(5, 200)
    found = []
    for numbers in (1 << 21, 1):
        monkeypatch.setattr(sizes, "WORKING_NUMBERS", numbers)
        output = linear(inputs, packed)
        found.append((output, *torch.autograd.grad(output, inputs, gradient)))
    for whole, of_parts in zip(*found, strict=True):
        assert of_parts.equal(whole)
    assert found[0][0].equal(2.0 * inputs.sum(1, keepdim=True).expand(5, 200))


class Called(Exception):
    """Of what should not be."""


def test_what_is_held_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of a weight is widened at a time than a cache holds; all of it without the loops."""
    monkeypatch.setattr(sizes, "WORKING_NUMBERS", 1 << 14)
    widened: list[int] = []

    def watched(packed: PackedWeight, out: Tensor, *place: int) -> None:
        widened.append(out.untyped_storage().nbytes())
        widen(packed, out, *place)

    monkeypatch.setattr(quantized_products, "widen", watched)
    for shape in ((1000, 576), (576, 1000), (100, 64)):
        packed = pack(bell(shape, 1).bfloat16(), "nf4")
        for off, whole in (((), False), (("quantized",), True)):
            inputs = torch.ones(2, shape[1], dtype=torch.bfloat16, requires_grad=True)
            with switched_off(off):
                linear(inputs, packed).sum().backward()
            assert max(widened) <= 2 * (shape[0] * shape[1] if whole else max(sizes.WORKING_NUMBERS, 64 * max(shape)))
            assert len(widened) == (2 if whole or shape == (100, 64) else len(widened))
            widened.clear()


def test_the_loops_are_not_used_where_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: Any) -> None:
        raise Called

    packed, inputs = pack(bell((96, 64), 2), "nf4"), torch.ones(2, 64, dtype=torch.bfloat16)
    with_loops = linear(inputs, packed)
    for name in ("pack_blocks", "to_fp32", "to_bf16_by_lanes", "to_bf16_by_pairs"):
        monkeypatch.setattr(quantized_loops, name, called)
    with pytest.raises(Called):
        linear(inputs, packed)
    with pytest.raises(Called):
        pack(bell((96, 64), 2), "nf4")
    with switched_off(["quantized"]):
        assert linear(inputs, pack(bell((96, 64), 2), "nf4")).equal(with_loops)


def test_only_what_is_packed_is_kept() -> None:
    """And with neither inputs nor a bias to train there is no graph."""
    packed = pack(bell((256, 128), 3), "nf4-double")
    kept: list[Tensor] = []
    inputs = torch.randn(50, 128, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = linear(inputs, packed, torch.ones(256))
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in packed.named().values()}
    assert output.requires_grad
    assert not linear(inputs.detach(), packed, torch.ones(256)).requires_grad


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("way", "grows"), [("loops", False), ("loops", True), ("torch", False)])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "shape"), [*((dtype, (5, 128, 64)) for dtype in DTYPES), (torch.bfloat16, (5, 20, 30))]
)
def test_experts(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    form: Format,
    way: str,
    grows: bool,
    turned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of rows, as with experts in 16 bits; some have none, and two rows are in none."""
    monkeypatch.setattr(grouped, "sizes_matter", lambda *_: grows)
    torch.manual_seed(0)
    packed = pack(bell(shape, 4), form)
    _, high, wide = shape
    rows = torch.randn(28, high if turned else wide).to(dtype).requires_grad_()
    gradient = torch.randn(28, wide if turned else high).to(dtype)
    with switched_off(WAYS[way]):
        output = quantized_products.grouped_product(rows, packed, ENDS, turned=turned)
        output.backward(gradient)
    exact = rows.detach().double().requires_grad_()
    expected = grouped_product(exact, unpack(packed, dtype).double(), ENDS, turned=turned)
    expected.backward(gradient.double())
    assert near(output, expected, dtype)
    assert near(rows.grad, exact.grad, dtype)
    assert not output[26:].any()


def test_operations_are_counted_and_traced_without_numbers() -> None:
    packed, experts = pack(bell((96, 64), 5), "nf4-double"), pack(bell((5, 96, 64), 6), "nf4")
    inputs = torch.ones(2, 13, 64, requires_grad=True)
    rows = torch.ones(28, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        linear(inputs, packed).sum().backward()
        assert counter.get_total_flops() == 2 * (2 * 26 * 96 * 64)  # forward, and backward to the inputs
        quantized_products.grouped_product(rows, experts, ENDS).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 26 * 96 * 64) + 2 * (2 * 28 * 96 * 64)
    with FakeTensorMode() as fake:
        tensors = {name: fake.from_tensor(tensor) for name, tensor in packed.named().items()}
        given = torch.ones(2, 13, 64, dtype=torch.bfloat16, requires_grad=True)
        output = linear(given, PackedWeight("nf4-double", (96, 64), **tensors), torch.ones(96, dtype=torch.bfloat16))
        output.sum().backward()
        assert output.shape == (2, 13, 96)
        assert output.dtype == torch.bfloat16
        assert given.grad is not None
        assert given.grad.shape == given.shape


@pytest.mark.parametrize("operation", ["linear", "grouped"])
def test_the_operations_are_what_torch_asks_of_its_own(operation: str) -> None:
    packed = pack(bell((96, 64) if operation == "linear" else (5, 96, 64), 7), "nf4-double")
    rows, tensors = torch.randn(28, 64, requires_grad=True), (*packed.named().values(),)
    call: Any
    given: tuple[Any, ...]
    if operation == "linear":
        call, given = quantized_products.quantized_linear, (rows, *tensors, torch.ones(96), "nf4-double", 96, False)
    else:
        call = quantized_products.quantized_grouped_product
        given = (rows, *tensors, ENDS, "nf4-double", [5, 96, 64], False)
    torch.library.opcheck(call, given)


@pytest.mark.slow
def test_compiled_and_recomputed() -> None:
    torch.manual_seed(0)
    packed, inputs = pack(bell((96, 64), 8), "nf4"), torch.randn(4, 64, requires_grad=True)

    def block(given: Tensor) -> Tensor:
        return torch.tanh(linear(torch.tanh(given), packed))

    def gradient(call: Callable[[Tensor], Any]) -> Tensor:
        (found,) = torch.autograd.grad(call(inputs).sum(), inputs)
        return found

    expected = gradient(block)
    torch.testing.assert_close(gradient(torch.compile(block, fullgraph=True)), expected)
    assert gradient(lambda given: checkpoint(block, given, use_reentrant=False)).equal(expected)


def test_what_does_not_fit_together_is_refused() -> None:
    packed = pack(bell((96, 64), 9), "nf4")
    with pytest.raises(ValueError, match="cannot be multiplied by a weight"):
        linear(torch.ones(2, 96), packed)
    with pytest.raises(ValueError, match="cannot be multiplied by weights"):
        quantized_products.grouped_product(torch.ones(2, 64), packed, ENDS)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_a_layer_above_250_megabytes(form: Format) -> None:
    """261 MB in bf16. Of signs times one power of two a block, which nf4 packs without loss; a product with rows of
    one 1 picks columns, and its gradient rows, at both ends and between."""
    high, wide = 8160, 16000
    down, across = 2.0 ** (torch.arange(high) % 3), (-1.0) ** (torch.arange(wide) % 7)
    weight = (down[:, None] * across).bfloat16()
    assert weight.nbytes > 250_000_000
    packed = pack(weight, form)
    if form != "nf4-double":  # whose scales are rounded
        assert unpack(packed).equal(weight)
    assert float((unpack(packed) - weight).abs().max()) < 0.02 * 4
    weight = unpack(packed)
    rows, gradient = torch.zeros(3, wide), torch.zeros(3, high)
    rows[0, 0] = rows[1, wide // 2 + 1] = rows[2, -1] = 1.0
    gradient[0, 0] = gradient[1, high // 2 + 1] = gradient[2, -1] = 1.0
    inputs = rows.bfloat16().requires_grad_()
    output = linear(inputs, packed)
    output.backward(gradient.bfloat16())
    assert output.equal(weight[:, [0, wide // 2 + 1, -1]].t())
    assert inputs.grad is not None
    assert inputs.grad.equal(weight[[0, high // 2 + 1, -1]])


def test_a_model_of_packed_layers_learns_what_it_would_with_the_widened_ones() -> None:
    """An adapter in front of two frozen layers: gradients reach it through both."""
    torch.manual_seed(0)
    packed = [pack(bell((96, 64), 10), "nf4"), pack(bell((64, 96), 11), "int8")]
    inputs = torch.randn(9, 64)

    def losses(call: Callable[[Tensor, PackedWeight], Tensor]) -> list[float]:
        adapter = nn.Parameter(torch.eye(64))
        optimizer = torch.optim.SGD([adapter], lr=0.02)
        found = []
        for _ in range(5):
            loss = call(torch.tanh(call(inputs @ adapter, packed[0])), packed[1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    ours = losses(linear)
    assert ours[-1] < 0.9 * ours[0]
    assert ours == pytest.approx(losses(lambda given, weight: F.linear(given, unpack(weight, torch.float32))), rel=1e-6)
