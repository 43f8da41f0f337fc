"""Frozen weights in 4 and 8 bits: bitsandbytes' own quantisers, bit for bit, over plain tensors.

    weight --pack--> PackedWeight: codes, scales [, outer, mean] --unpack--> weight in bf16, fp16 or fp32

* ``nf4`` is ``quantize_4bit(weight, quant_type="nf4", blocksize=64)``: each block of 64 numbers along the flattened
  weight is divided by its largest absolute number, and each quotient becomes the number of the nearest of 16 levels
  (the lower one of two that are equally near). Two codes make a byte, the first in its high half.
* ``nf4-double`` is the same with ``compress_statistics=True``: the mean of all scales is subtracted from them, and what
  is left becomes 8 bits in blocks of 256, on a map of 256 numbers that is fine near zero.
* ``int8`` is ``int8_vectorwise_quant(weight)`` without a threshold: rows are divided by their largest absolute number
  over 127 and rounded half to even.

What bitsandbytes 0.50 computes on a CPU counts. Its 8-bit map there is looked up in a table of 65,536 steps, which its
CUDA kernels do not do: next to a border between two of the 256 numbers, scales of nf4-double may differ by one code
from what a GPU wrote. The mean is ``Tensor.mean``, which for weights above 2 million numbers depends in its last bit on
the number of threads, theirs as ours.

A packed weight is some named tensors of the sizes that ``host.quantized`` says, so it can be saved, counted and sharded
as any other. ``quantized_products`` multiplies with it, and with what a checkpoint holds in a form of its own
(``stored_forms``), which is never packed here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tonnage.errors import user_error
from tonnage.host.locked import sent
from tonnage.host.quantized import (
    BLOCK,
    OUTER_BLOCK,
    WORKING_NUMBERS,
    Format,
    packed_tensors,
    rows_and_columns,
)
from tonnage.host.stored_forms import stored_form
from tonnage.kernels import quantized_loops as loops
from tonnage.kernels.gpu import takes_triton
from tonnage.kernels.stored_forms import widen_rows
from tonnage.kernels.switches import is_on

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""What the 16 codes of nf4 stand for: quantiles of a normal distribution (QLoRA, arXiv 2305.14314)."""
TILE = 1 << 20
"""Numbers that are packed or widened in plain torch at a time: 4 MB in fp32, a multiple of ``BLOCK``."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of numbers that are packed, and into which they are widened."""

_SMALLEST = 1e-38
_STEPS = 65536


@dataclass(frozen=True)
class PackedWeight:
    """A weight in 4 or 8 bits."""

    form: Format
    shape: tuple[int, ...]
    """Of the weight; all dimensions but the last are rows."""
    codes: Tensor
    """uint8 (groups, bytes in a group of rows); in int8, int8 (rows, columns)."""
    scales: Tensor
    """fp32 (groups, blocks in a group); in nf4-double uint8, in int8 (rows, 1)."""
    outer: Tensor | None = None
    """nf4-double: fp32 (blocks of ``OUTER_BLOCK`` scales,)."""
    mean: Tensor | None = None
    """nf4-double: fp32, no dimension."""

    def named(self) -> dict[str, Tensor]:
        """Its tensors by the names under which they are saved."""
        parts = {"codes": self.codes, "scales": self.scales, "outer": self.outer, "mean": self.mean}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}


# Packing.


def pack(weight: Tensor, form: Format) -> PackedWeight:
    """``weight`` (bf16, fp16 or fp32, of any shape) in 4 or 8 bits, on its device; what is not contiguous is copied.

    Besides the result, a few times ``TILE`` numbers are in memory at a time, and 4 bytes for 64 numbers in nf4-double.

    Raises:
        UserError: a number is infinite or NaN.
        ValueError: the weight is empty, or of another type.
    """
    if weight.dtype not in DTYPES or weight.numel() == 0:
        raise ValueError(f"{weight.dtype} {tuple(weight.shape)} cannot be packed: bf16, fp16 or fp32 numbers can")
    shape = tuple(weight.shape)
    rows, columns = rows_and_columns(shape)
    matrix = weight.detach().contiguous().view(rows, columns)
    codes, scales = _pack_rows(matrix) if form == "int8" else _pack_blocks(matrix.view(-1))
    if not bool(scales.isfinite().all()):
        num_bad = sum(int(piece.isfinite().logical_not().sum()) for piece in matrix.view(-1).split(TILE))
        raise user_error(
            found=f"{num_bad:,} of {weight.numel():,} numbers of a weight of {shape} are infinite or no numbers",
            needed=f"finite numbers, to be packed as {form}",
            change="leave this weight out of `adapter.targets`, or take weights that are whole",
        )
    outer = mean = None
    if form == "nf4-double":
        scales, outer, mean = _pack_scales(scales)
    sizes = {name: size for name, (_, size) in packed_tensors(shape, form).items()}
    return PackedWeight(form, shape, codes.view(sizes["codes"]), scales.view(sizes["scales"]), outer, mean)


def _by_loops(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and is_on("quantized")


def _pack_blocks(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two a byte, and scales of flat numbers. As bitsandbytes has it, the last block, where it is shorter, is
    divided instead of multiplied by an inverse, and its scale is never zero."""
    number, whole = flat.numel(), flat.numel() // BLOCK * BLOCK
    codes = torch.empty(-(-number // 2), dtype=torch.uint8, device=flat.device)
    scales = torch.empty(-(-number // BLOCK), dtype=torch.float32, device=flat.device)
    levels = torch.tensor(LEVELS, device=flat.device)
    bounds = (levels[:-1] + levels[1:]) / 2
    for start in range(0, whole, TILE):
        stop = min(whole, start + TILE)
        numbers = flat[start:stop].float()
        places = codes[start // 2 : stop // 2], scales[start // BLOCK : stop // BLOCK]
        if _by_loops(flat):
            loops.pack_blocks(numbers.numpy(), bounds.numpy(), *(place.numpy() for place in places))
            continue
        blocks = numbers.view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        scaled = blocks * (1.0 / largest.clamp(min=_SMALLEST))[:, None]
        places[0].copy_(_pairs(scaled.view(-1), bounds))
        places[1].copy_(largest)
    if whole < number:
        rest = flat[whole:].float()
        scales[-1] = rest.abs().amax().clamp(min=_SMALLEST)
        scaled = torch.nn.functional.pad(rest / scales[-1], (0, number % 2))
        codes[whole // 2 :] = _pairs(scaled, bounds)
    return codes, scales


def _pairs(scaled: Tensor, bounds: Tensor) -> Tensor:
    codes = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8)
    return (codes[::2] << 4) | codes[1::2]


def _pack_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    step = max(1, TILE // matrix.shape[1])
    for start in range(0, len(matrix), step):
        part = slice(start, start + step)
        numbers = matrix[part].float()
        if _by_loops(matrix):
            loops.pack_rows(numbers.numpy(), codes[part].numpy(), scales[part].numpy())
            continue
        scales[part] = numbers.abs().amax(1)
        factor = (scales[part].reciprocal() * 127.0)[:, None]
        codes[part] = torch.where(factor.isfinite(), numbers * factor, 0.0).nan_to_num(0.0).round().to(torch.int8)
    return codes, scales


def _pack_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales in 8 bits, the scale of each block of them, and the mean that was subtracted before."""
    mean = scales.mean()
    rest = scales - mean
    lacking = -len(rest) % OUTER_BLOCK
    blocks = torch.nn.functional.pad(rest, (0, lacking)).view(-1, OUTER_BLOCK)
    outer = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / outer)[:, None]).clamp(-1.0, 1.0)
    steps = (scaled + 1.0) * 0.5 * (_STEPS - 1) + 0.5
    codes = _steps_of_book().to(scales.device)[steps.nan_to_num(0.0).to(torch.int64)]
    return codes.view(-1)[: len(scales)].contiguous(), outer, mean


@cache
def book() -> Tensor:
    """What the 256 codes of a scale of nf4-double stand for, fp32, ascending: bitsandbytes' ``create_dynamic_map()``.

    Seven ranges from 1e-6 to 1, each ten times as far as the one before and with twice as many steps, both signs, and 0
    and 1. It is computed number by number, in the steps in which it is rounded there (with fused multiply and add), as
    vectors of another length would round otherwise.
    """
    fp32 = np.float32
    levels = [fp32(0.0), fp32(1.0)]
    start, end = fp32(0.1), fp32(1.0)
    for power in range(7):
        number = 2**power
        step = float((end - start) / fp32(number))
        borders = [
            fp32(float(start) + step * place if place < (number + 1) // 2 else float(end) - step * (number - place))
            for place in range(number + 1)
        ]
        for low, high in pairwise(borders):
            value = fp32(10.0 ** (power - 6)) * ((low + high) / fp32(2.0))
            levels += [value, -value]
    return torch.tensor(sorted(levels), dtype=torch.float32)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    return sent(torch.tensor(LEVELS), device), sent(book(), device)


@cache
def _steps_of_book() -> Tensor:
    """The code next to each of 65,536 even steps from -1 to 1."""
    steps = -1.0 + (2.0 * torch.arange(_STEPS, dtype=torch.float32)) / (_STEPS - 1)
    return torch.bucketize(steps, 0.5 * (book()[:-1] + book()[1:])).to(torch.uint8)


# Widening.


def unpack(packed: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight that ``packed`` stands for, of its shape: code times scale in fp32, rounded once to ``dtype``.

    Raises:
        ValueError: ``dtype`` is not bf16, fp16 or fp32.
    """
    out = torch.empty(rows_and_columns(packed.shape), dtype=dtype, device=packed.codes.device)
    widen(packed, out)
    return out.view(packed.shape)


def squares_and_lost(weight: Tensor, form: Format) -> tuple[float, float]:
    """Sums of the squares of ``weight`` and of ``weight - unpack(pack(weight, form))``, in fp64. Besides the packed
    weight, a few times ``TILE`` numbers are in memory at a time.

    Raises:
        UserError, ValueError: as ``pack``.
    """
    packed = pack(weight, form)
    matrix = weight.detach().contiguous().view(rows_and_columns(packed.shape))
    step, squares, lost = max(1, TILE // matrix.shape[1]), 0.0, 0.0
    for row in range(0, len(matrix), step):
        part = matrix[row : row + step].double()
        widened = torch.empty_like(part, dtype=torch.float32)
        widen(packed, widened, row)
        squares += float(part.square().sum())
        lost += float(part.sub_(widened).square_().sum())
    return squares, lost


def widen(packed: PackedWeight, out: Tensor, row: int = 0, column: int = 0) -> None:
    """Write into ``out`` (two dimensions, contiguous) the part of the weight that begins at ``row`` and ``column``.

    A GPU has a kernel for it (``quantized_triton``). In plain torch whole rows are widened, a few times ``TILE``
    numbers at a time.

    Raises:
        ValueError: ``out`` is not bf16, fp16 or fp32.
    """
    if out.dtype not in DTYPES:
        raise ValueError(f"numbers are widened into bf16, fp16 or fp32, not {out.dtype}")
    if (stored := stored_form(packed.form)) is not None:
        rows = slice(row, row + len(out))
        widen_rows(stored, packed.codes[rows], packed.scales[rows], packed.shape[-1], out, column)
    elif _by_triton(packed, out, column):
        from tonnage.kernels.quantized_triton import widen as widen_on_gpu

        tensors = packed.codes, packed.scales, packed.outer, packed.mean
        tables = None if packed.form == "int8" else _tables(out.device)
        widen_on_gpu(out, tensors, tables, (packed.shape[-1], row, column))
    elif not _by_loops(out):
        step = max(1, TILE // packed.shape[-1])
        for part, first_row in zip(out.split(step), range(row, row + len(out), step), strict=True):
            part.copy_(_plain_rows(packed, first_row, len(part))[:, column : column + out.shape[1]])
    elif out.dtype == torch.float32 or (out.dtype == torch.bfloat16 and _whole_blocks(packed, out, column)):
        _by_loop(packed, out, row, column)
    else:  # fp16, which numba does not know, and blocks that rows or columns cut
        step = max(1, WORKING_NUMBERS // max(1, out.shape[1]))
        wide = torch.empty(min(step, len(out)), out.shape[1])
        for part, first_row in zip(out.split(step), range(row, row + len(out), step), strict=True):
            _by_loop(packed, wide[: len(part)], first_row, column)
            part.copy_(wide[: len(part)])


def _by_triton(packed: PackedWeight, out: Tensor, column: int) -> bool:
    whole_pairs = packed.form == "int8" or not (packed.shape[-1] % 2 or column % 2 or out.shape[1] % 2)
    return whole_pairs and out.device.type == "cuda" and is_on("quantized") and takes_triton(out.device)


def _whole_blocks(packed: PackedWeight, out: Tensor, column: int) -> bool:
    return packed.form == "int8" or not (packed.shape[-1] % BLOCK or column % BLOCK or out.shape[1] % BLOCK)


def _arrays(packed: PackedWeight) -> tuple[Any, ...]:
    """A weight as arguments of the nf4 loops."""
    flat = _as_array(packed.codes).reshape(-1), _as_array(packed.scales).reshape(-1)
    if packed.outer is None or packed.mean is None:
        return (*flat, None, None, None, _levels())
    return (*flat, book().numpy(), packed.outer.numpy(), np.float32(packed.mean.item()), _levels())


def _as_array(tensor: Tensor) -> Any:
    """A contiguous tensor as an array, valid while somebody holds the tensor: memory that torch itself gives to numpy
    cannot be freed any more, and sharding frees that of parameters."""
    kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if not tensor.numel():
        return np.empty(tensor.shape, kind)
    memory: Any = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memory, kind).reshape(tensor.shape)


@cache
def _levels() -> Any:
    return np.array(LEVELS, np.float32)


def _by_loop(packed: PackedWeight, out: Tensor, row: int, column: int) -> None:
    """Widen into fp32, or whole blocks into bf16."""
    wide, by_rows = out.dtype == torch.float32, packed.form == "int8"
    by_lanes = not wide and not by_rows and loops.HAS_LANES
    numbers = (out if wide else out.view(torch.uint32 if by_lanes else torch.uint16)).numpy()
    if by_rows:
        loop = loops.rows_to_fp32 if wide else loops.rows_to_bf16
        loop(_as_array(packed.codes), _as_array(packed.scales).reshape(-1), row, column, numbers)
    else:
        loop = loops.to_fp32 if wide else loops.to_bf16_by_lanes if by_lanes else loops.to_bf16_by_pairs
        loop(*_arrays(packed), packed.shape[-1], row, column, numbers)


def _plain_rows(packed: PackedWeight, row: int, number: int) -> Tensor:
    """``number`` rows from ``row`` on, in fp32: what the loops do, in torch."""
    width = packed.shape[-1]
    if packed.form == "int8":
        rows = slice(row, row + number)
        return packed.codes[rows] * packed.scales[rows] * 7.874015718698502e-3
    start, stop = row * width, (row + number) * width
    blocks = slice(start // BLOCK, -(-stop // BLOCK))
    scales = packed.scales.view(-1)[blocks]
    if packed.outer is not None and packed.mean is not None:
        places = torch.arange(blocks.start, blocks.stop, device=scales.device)
        inner = sent(book(), scales.device)[scales.to(torch.int32)]
        scales = inner * packed.outer[places // OUTER_BLOCK] + packed.mean
    pairs = packed.codes.view(-1)[blocks.start * BLOCK // 2 : blocks.stop * BLOCK // 2]
    codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).view(-1).to(torch.int32)
    values = sent(torch.tensor(LEVELS), codes.device)[codes]
    values = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK) * scales[:, None]
    return values.view(-1)[start - blocks.start * BLOCK :][: stop - start].view(number, width)
