"""A linear layer that computes what it will when its weight rests in few bits (quantisation-aware training).

What is rounded, and how a gradient passes, is torchao's: the fake quantisers are those that its own step gives a layer
(``QATConfig(..., step="prepare")``). Here is when they run. In torchao's layer every result on the way from a weight to
its rounded twin is kept for the backward pass, three numbers in fp32 for each of the weight's, in all layers at the
same time. This layer keeps its input and its weight, which are there anyway, and quantises a second time in the
backward pass. It does so in pieces of whole rows, which no scale crosses: what is in memory beside a weight is its
rounded twin, the gradient of that, and one piece's results.

    inputs (rows, in) ── rounded, where the scheme does that ──┐
    weight (out, in) ─── rounded ──────────────────────────────┴─► product + bias + factor * (drop(inputs) A') B'

An addition (LoRA) gets the inputs as they are, as in torchtune: it will be computed in 16 bits beside the quantised
layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tonnage.errors import user_error
from tonnage.kernels.adapted import add_to, low_of, mask_of, through_addition
from tonnage.kernels.dropout import Mask
from tonnage.kernels.products import product
from tonnage.kernels.sums import handed_over

SchemeName = Literal["int4", "int8", "int8-int4", "mxfp4", "nvfp4"]
PIECE = 1 << 18
"""Numbers of a weight that are quantised at a time on a CPU: 1 MB for each result, which stay in its cache."""
MOST_PIECES = 4
"""Of a weight; a piece is a launch of each operation."""
INPUT_PIECES = 2
"""Of a layer's inputs, however many they are."""
OLDEST_TORCHAO = (0, 18)
GROUPS: dict[SchemeName, int] = {"int4": 128, "int8-int4": 32, "mxfp4": 32, "nvfp4": 16}
"""torchao's numbers of a row that share a scale, where no other is asked for; ``int8`` has one for a row."""


@dataclass(frozen=True)
class Scheme:
    """How weights, and inputs of layers, will be computed with."""

    name: SchemeName
    group_size: int = 0
    """Numbers of a row that share a scale; 0 is a whole row."""

    def for_torchao(self) -> Any:
        """torchao's configuration: of the training, of the conversion, and in a converted model's ``config.json``."""
        from torchao.quantization import (
            Int4WeightOnlyConfig,
            Int8DynamicActivationIntxWeightConfig,
            IntxWeightOnlyConfig,
            PerAxis,
            PerGroup,
        )

        int4: torch.dtype = getattr(torch, "int4")  # noqa: B009 (torch's stubs do not have it)
        match self.name:
            case "int4":
                return Int4WeightOnlyConfig(group_size=self.group_size)
            case "int8":
                return IntxWeightOnlyConfig(torch.int8, PerAxis(0))
            case "int8-int4":
                return Int8DynamicActivationIntxWeightConfig(int4, PerGroup(self.group_size))
            case "mxfp4":
                from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
                from torchao.quantization.quantize_.common import KernelPreference

                four = torch.float4_e2m1fn_x2
                emulated = KernelPreference.EMULATED  # by products in 16 bits: the same numbers on every device
                return MXDynamicActivationMXWeightConfig(self.group_size, four, four, kernel_preference=emulated)
            case "nvfp4":
                from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig

                return NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)


def check_torchao(key: str = "quantize_aware", otherwise: str = "quantize_aware=none") -> str:
    """The version of torchao that is installed, which a ``key`` of the config needs.

    Raises:
        UserError: there is none, or an older one than ours.
    """
    try:
        installed = version("torchao")
    except PackageNotFoundError:
        installed = ""
    if tuple(int(part) for part in re.findall(r"\d+", installed)[:2]) < OLDEST_TORCHAO:
        raise user_error(
            where=key,
            found=f"torchao {installed}" if installed else "torchao, which is not installed",
            needed="torchao {}.{} or newer, whose numbers {} computes with".format(*OLDEST_TORCHAO, key),
            change=f"pip install 'tonnage[torchao]', or {otherwise}",
        )
    return installed


Quantizer = Callable[[Tensor], Tensor]
"""Rounds rows of a matrix."""
Maker = Callable[[Tensor], Quantizer]
"""Makes what rounds the rows of a matrix, which it is given whole."""


class FakeQuantizers:
    """torchao's fake quantisers of a scheme, which the layers of a model share, and whether they are used."""

    def __init__(self, scheme: Scheme) -> None:
        check_torchao()
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        self.scheme = scheme
        self.enabled = True
        holder = nn.Sequential(nn.Linear(max(scheme.group_size, 1), 1, bias=False))
        quantize_(holder, QATConfig(scheme.for_torchao(), step="prepare"))
        layer: Any = holder[0]
        self.of_weight: Maker
        self.of_inputs: Maker | None
        if scheme.name == "mxfp4":
            self.of_weight, self.of_inputs = _microscaled(layer.weight_config), _microscaled(layer.activation_config)
        elif scheme.name == "nvfp4":
            self.of_weight = self.of_inputs = _scaled_twice
        else:
            self.of_weight = _forgetful(layer.weight_fake_quantizer)
            inputs = layer.activation_fake_quantizer
            self.of_inputs = None if inputs is None else _forgetful(inputs)

    @contextmanager
    def used(self, enabled: bool) -> Iterator[None]:
        """Let layers that run inside quantise, or not."""
        before, self.enabled = self.enabled, enabled
        try:
            yield
        finally:
            self.enabled = before


def _forgetful(quantizer: Any) -> Maker:
    """A fake quantiser that does not keep the scales of what it saw last."""

    def quantized(numbers: Tensor) -> Tensor:
        result: Tensor = quantizer.forward(numbers)  # no hooks of modules inside a layer
        quantizer.scale = quantizer.zero_point = None
        return result

    return lambda matrix: quantized


def _microscaled(config: Any) -> Maker:
    """What torchao's layer for MX formats multiplies. Its function is the whole layer, of a weight and inputs of any
    size, and has no gradient for a bias."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    def rounded(numbers: Tensor) -> Tensor:
        how = config.dtype, config.block_size, config.scaling_mode, config.kernel_preference
        result: Tensor = MXTensor.to_mx(numbers.contiguous(), *how).dequantize(numbers.dtype)
        return result

    return lambda matrix: _straight_through(rounded)


def _scaled_twice(matrix: Tensor) -> Quantizer:
    """torchao's NVFP4: a scale in 8 bits for 16 numbers, under one of the whole matrix. torchao's layer multiplies such
    numbers on cards that have products of them; here they are widened first."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if not matrix.numel():  # of a rank that has no rows, or an expert that has none
        return lambda numbers: numbers
    low, high = torch.aminmax(matrix.detach())
    largest = torch.maximum(-low, high)
    scale = per_tensor_amax_to_scale(torch.where(largest == 0, 1.0, largest))

    def rounded(numbers: Tensor) -> Tensor:
        narrow = NVFP4Tensor.to_nvfp4(numbers.contiguous(), per_tensor_scale=scale)
        result: Tensor = narrow.dequantize(numbers.dtype)
        return result

    return _straight_through(rounded)


def _straight_through(rounded: Quantizer) -> Quantizer:
    """A function whose gradient is that of its result, as it comes."""

    def quantized(numbers: Tensor) -> Tensor:
        result: Tensor = _StraightThrough.apply(numbers, rounded)  # type: ignore[no-untyped-call]
        return result

    return quantized


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, rounded: Quantizer) -> Tensor:
        return rounded(numbers)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        return slopes, None


class Addition(NamedTuple):
    """What an adapter adds to a layer."""

    down: Tensor
    up: Tensor
    factor: float
    mask: Mask | None = None


def fake_quantized_linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, quantizers: FakeQuantizers, addition: Addition | None = None
) -> Tensor:
    """``F.linear`` of fake-quantised inputs and weight, in the type of ``inputs``, with an addition to unquantised
    inputs. Shapes are those of ``adapted_linear``; a weight under an addition gets no gradient."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    added: tuple[Any, ...] = (None, None, 1.0, None, None, 0, 0)
    if addition is not None:
        factor, mask = addition.factor, addition.mask
        drops = (factor, None, None, 0, 0) if mask is None else (factor / mask.kept_share, *mask)
        added = (addition.down, addition.up, *drops)
    output: Tensor = _Linear.apply(rows, weight, bias, quantizers, *added)  # type: ignore[no-untyped-call]
    return output.view(*inputs.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    """The rows of ``fake_quantized_linear``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, quantizers: FakeQuantizers, *added: Any
    ) -> Tensor:
        down, up, factor, keys, salt, first_channel, threshold = added
        multiplied = rows if quantizers.of_inputs is None else _quantized(rows, quantizers.of_inputs, INPUT_PIECES)
        output = product(multiplied, _quantized(weight, quantizers.of_weight, _pieces(weight)).t(), bias=bias)
        low = None
        if down is not None:
            low = low_of(rows, down, mask_of(keys, salt, first_channel, threshold))
            add_to(output, low, up.t(), factor)
        ctx.save_for_backward(rows, weight, low, down, up, keys, salt)
        ctx.quantizers, ctx.factor, ctx.drops = quantizers, factor, (first_channel, threshold)
        return output

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, low, down, up, keys, salt = ctx.saved_tensors
        need_rows, need_weight, need_bias = ctx.needs_input_grad[:3]
        quantizers: FakeQuantizers = ctx.quantizers
        of_rows = of_weight = of_down = of_up = None
        if need_weight:
            multiplied = rows if quantizers.of_inputs is None else _quantized(rows, quantizers.of_inputs, INPUT_PIECES)
            of_weight = product(slopes.t(), multiplied)
            del multiplied
        if need_rows or need_weight:
            twin = _quantized(weight, quantizers.of_weight, _pieces(weight), of_weight)
            if need_rows:
                of_rows = product(slopes, twin)
            del twin
        if of_rows is not None and quantizers.of_inputs is not None:
            _quantized(rows, quantizers.of_inputs, INPUT_PIECES, of_rows)
        if down is not None:
            mask = mask_of(keys, salt, *ctx.drops)
            of_rows, of_down, of_up = through_addition(slopes, of_rows, rows, low, down, up, ctx.factor, mask)
        of_bias = slopes.sum(0) if need_bias else None
        if of_weight is not None:
            of_weight = handed_over(weight, of_weight)
        return of_rows, of_weight, of_bias, None, of_down, of_up, *[None] * 5


def _pieces(weight: Tensor) -> int:
    return min(MOST_PIECES, max(1, weight.numel() // PIECE))


def _quantized(numbers: Tensor, maker: Maker, pieces: int, slopes: Tensor | None = None) -> Tensor:
    """The rounded twin of a matrix, made in so many pieces. Where there are ``slopes``, the gradient of the twin, they
    become in place that of ``numbers``."""
    quantizer = maker(numbers)
    result = torch.empty_like(numbers, memory_format=torch.contiguous_format)
    at_a_time = max(1, -(-len(numbers) // pieces))
    for first in range(0, len(numbers), at_a_time):
        some = slice(first, first + at_a_time)
        if slopes is None:
            with torch.no_grad():
                result[some] = quantizer(numbers[some])
            continue
        with torch.enable_grad():
            piece = numbers[some].detach().requires_grad_()
            twin = quantizer(piece)
        result[some] = twin.detach()
        (slopes[some],) = torch.autograd.grad(twin, piece, slopes[some])
    return result
