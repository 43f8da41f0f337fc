"""Weights of 4 and 8 bits: bit for bit what bitsandbytes makes of them, by its digests and, where it is installed, by
itself; packed and widened by loops and in torch alike; cut between blocks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from golden_quantized import FORMATS, GOLDEN, bell, digest, theirs, weights
from tonnage.errors import UserError
from tonnage.host.quantized import Format, packed_tensors
from tonnage.kernels import quantized, quantized_loops
from tonnage.kernels.quantized import DTYPES, LEVELS, PackedWeight, book, pack, unpack, widen
from tonnage.kernels.switches import switched_off

EXPECTED = json.loads(GOLDEN.read_text())
"""Written by tests/golden_quantized.py, with bitsandbytes."""
WEIGHTS = weights()
WAYS = {"loops": (), "torch": ("quantized",)}


def bits(tensor: Tensor) -> Tensor:
    """Which are equal where the numbers are, what is no number as well."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_what_bitsandbytes_made_of_it(name: str, form: Format, way: str) -> None:
    with switched_off(WAYS[way]):
        packed = pack(WEIGHTS[name], form)
    if form == "int8":
        packed = PackedWeight(form, packed.shape, packed.codes, packed.scales.view(-1))
    elif form == "nf4":
        packed = PackedWeight(form, packed.shape, packed.codes.view(-1, 1), packed.scales.view(-1))
    else:
        flat = packed.codes.view(-1, 1), packed.scales.view(-1)
        packed = PackedWeight(form, packed.shape, *flat, packed.outer, packed.mean)
    assert digest(packed.named()) == EXPECTED[name][form]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_what_bitsandbytes_makes_of_it_here(name: str, form: Format) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight, packed = WEIGHTS[name], pack(WEIGHTS[name], form)
    wanted = theirs(weight, form)
    for part, tensor in packed.named().items():
        assert bits(tensor).flatten().equal(bits(wanted[part]).flatten()), part
    for dtype in (torch.float32, torch.float16):
        if form == "int8":
            again = functional.int8_vectorwise_dequant(wanted["codes"], wanted["scales"]).to(dtype)
        else:  # given flat, as theirs takes scales of other blocks in rows that are 16 n and no 64 n long
            options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": form == "nf4-double"}
            codes, state = functional.quantize_4bit(weight.flatten(), **options)
            state.dtype = dtype
            again = functional.dequantize_4bit(codes, state)
        assert bits(unpack(packed, dtype)).flatten().equal(bits(again).flatten())


def test_large_weights_have_the_mean_that_bitsandbytes_takes() -> None:
    pytest.importorskip("bitsandbytes")
    weight = bell((2500, 1024), 30, torch.bfloat16)
    for part, tensor in pack(weight, "nf4-double").named().items():
        assert bits(tensor).flatten().equal(bits(theirs(weight, "nf4-double")[part]).flatten())


def by_hand(packed: PackedWeight) -> Tensor:
    """The weight in fp32, number by number."""
    codes, scales = packed.codes.flatten().tolist(), packed.scales.flatten()
    number, width = int(np.prod(packed.shape)), packed.shape[-1]
    if packed.form == "int8":
        found = [np.float32(codes[i]) * np.float32(scales[i // width]) * np.float32(1 / 127) for i in range(number)]
    else:
        if packed.outer is not None and packed.mean is not None:
            scales = torch.stack([book()[int(c)] * packed.outer[i // 256] for i, c in enumerate(scales)]) + packed.mean
        nibbles = [nibble for byte in codes for nibble in (byte >> 4, byte & 15)]
        found = [np.float32(LEVELS[nibbles[i]]) * np.float32(scales[i // 64]) for i in range(number)]
    return torch.tensor(np.array(found)).view(packed.shape)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "name", ["random 7x129 torch.float32", "random 3x40x32 torch.float32", "outliers", "denormals"]
)
def test_widened_number_by_number(name: str, form: Format, way: str) -> None:
    packed = pack(WEIGHTS[name], form)
    wide = by_hand(packed)
    with switched_off(WAYS[way]):
        for dtype in DTYPES:
            assert unpack(packed, dtype).equal(wide.to(dtype))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(60, 256), (60, 100)])
def test_parts_of_a_weight(
    shape: tuple[int, int], dtype: torch.dtype, lanes: bool, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns from anywhere, on a processor with and without the instructions for it."""
    if lanes and not quantized_loops.HAS_LANES:
        pytest.skip("this processor has no AVX-512")
    monkeypatch.setattr(quantized_loops, "HAS_LANES", lanes)
    monkeypatch.setattr(quantized, "WORKING_NUMBERS", 900)
    packed = pack(bell(shape, 31), form)
    with switched_off(["quantized"]):
        whole = unpack(packed, dtype)
    places = [(0, 0, *shape), (7, 64, 20, 36), (59, 0, 1, shape[1]), (3, 1, 50, 99), (0, 64, 60, shape[1] - 64)]
    places += [(7, 64, 20, 128)] if shape[1] == 256 else []
    for row, column, high, wide in places:
        out = torch.full((high, wide), torch.nan, dtype=dtype)
        widen(packed, out, row, column)
        assert out.equal(whole[row : row + high, column : column + wide])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMATS)
def test_tiles_change_nothing(form: Format, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = bell((37, 130), 32, torch.float16)
    with switched_off(WAYS[way]):
        whole = pack(weight, form)
        wide = unpack(whole, torch.float32)
        monkeypatch.setattr(quantized, "TILE", 256)
        assert all(
            ours.equal(theirs)
            for ours, theirs in zip(pack(weight, form).named().values(), whole.named().values(), strict=True)
        )
        assert unpack(whole, torch.float32).equal(wide)


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_are_counted_exactly(form: Format) -> None:
    for weight in WEIGHTS.values():
        packed = pack(weight, form)
        allocated = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in packed.named().items()}
        assert allocated == {
            name: (f"torch.{dtype}", size) for name, (dtype, size) in packed_tensors(weight.shape, form).items()
        }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [70, -1])
def test_what_is_not_finite_is_refused(wrong: float, place: int, form: Format, way: str) -> None:
    weight = bell((5, 131), 34, torch.bfloat16)
    weight.view(-1)[place] = wrong
    with switched_off(WAYS[way]), pytest.raises(UserError, match="1 of 655 numbers of a weight of"):
        pack(weight, form)


def test_other_types_are_refused() -> None:
    for weight in (torch.zeros(4, 4, dtype=torch.float64), torch.zeros(0, 4)):
        with pytest.raises(ValueError, match="cannot be packed"):
            pack(weight, "nf4")
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        unpack(pack(torch.ones(2, 64), "nf4"), torch.float64)


def test_a_transposed_weight() -> None:
    weight: Any = bell((96, 64), 35)
    assert unpack(pack(weight.t(), "nf4")).equal(unpack(pack(weight.t().contiguous(), "nf4")))
