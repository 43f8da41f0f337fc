"""Reads weights of quantised checkpoints from their files: rows of codes and scales, or numbers.

Every layout of files becomes the same rows of bytes (``host.stored_forms``), whole rows of some matrices at a time;
numbers are made of these. So a weight that stays packed is, number by number, the one that is read as a plain weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tonnage.errors import user_error
from tonnage.host.stored_forms import StoredForm
from tonnage.kernels.quantized import PackedWeight, widen
from tonnage.kernels.stored_forms import as_bytes, joined
from tonnage.model.dtypes import DTYPES
from tonnage.model.stored import Reopened, StoredTensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the codes of eight rows are, counted from its low end."""


@dataclass(frozen=True)
class Packed(StoredTensor):
    """A weight that several stored tensors make up. ``dtype`` and ``shape`` are those of its numbers."""

    form: StoredForm
    parts: tuple[tuple[str, StoredTensor], ...]
    """Stored tensors by what they hold: codes, scales, zeros, outer, groups."""
    height: int = 1
    """Rows that share scales."""

    def part(self, name: str) -> StoredTensor | None:
        """The stored tensor that holds something of it."""
        return dict(self.parts).get(name)

    @property
    def can_stay(self) -> bool:
        """Whether the form can be computed with as it is: not if every number of a row has a scale of its own."""
        return self.form.group != 1

    def view(self) -> Packed:
        """What reads parts of it, as a slice of safetensors does of another tensor: itself."""
        return self

    def rows(self, matrices: Sequence[slice], rows: slice) -> PackedWeight:
        """Some rows of some matrices as they lie: (..., rows, columns)."""
        codes, scales = self._read(tuple(matrices), rows)
        shape = (*(part.stop - part.start for part in matrices), rows.stop - rows.start, self._lies[-1])
        return PackedWeight(
            self.form.name, shape, codes.reshape(-1, codes.shape[-1]), scales.reshape(-1, scales.shape[-1])
        )

    def whole(self) -> PackedWeight:
        """All of it."""
        *matrices, rows, _ = (slice(0, size) for size in self._lies)
        return self.rows(matrices, rows)

    @property
    def _lies(self) -> tuple[int, ...]:
        return self.form.packed_shape(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """The part at ``index``: an ellipsis, or slices for the first dimensions. Whole rows are read."""
        slices = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        bounds = [part.indices(size)[:2] for part, size in zip(slices, self.shape, strict=False)]
        region = [slice(*pair) for pair in bounds] + [slice(0, size) for size in self.shape[len(bounds) :]]
        *matrices, rows, columns = region
        if self.form.turned:
            rows, columns = columns, rows
        packed = self.rows(matrices, rows)
        out = torch.empty(math.prod(packed.shape[:-1]), columns.stop - columns.start, dtype=DTYPES[self.dtype])
        widen(packed, out, 0, columns.start)
        numbers = out.view(*packed.shape[:-1], out.shape[1])
        return numbers.mT if self.form.turned else numbers

    def _read(self, matrices: tuple[slice, ...], rows: slice) -> tuple[Tensor, Tensor]:
        """Codes and scales of rows, as bytes."""
        raise NotImplementedError

    def stored(self, name: str, region: Sequence[slice] = ()) -> Tensor:
        """What the file has of a ``part``; without a region all of it."""
        part: Tensor = Reopened(dict(self.parts)[name])[tuple(region) if region else ...]
        return part


class EightBitFloats(Packed):
    """Floats of 8 bits, as they are; scales of the matrix, of every row, or of blocks."""

    def _read(self, matrices: tuple[slice, ...], rows: slice) -> tuple[Tensor, Tensor]:
        codes = self.stored("codes", (*matrices, rows)).view(torch.uint8)
        if math.prod(dict(self.parts)["scales"].shape) == 1:
            scales = self.stored("scales").reshape(1, 1).expand(*codes.shape[:-1], 1)
        else:
            grid = slice(rows.start // self.height, -(-rows.stop // self.height))
            spread = self.stored("scales", (*matrices, grid)).repeat_interleave(self.height, -2)
            before = rows.start - grid.start * self.height
            scales = spread[..., before : before + rows.stop - rows.start, :]
        return codes, joined(self.form, scales)


class FourBitFloats(Packed):
    """Pairs of floats of 4 bits: in (rows, bytes), or as gpt-oss has them in (matrices, rows, groups, bytes)."""

    def _read(self, matrices: tuple[slice, ...], rows: slice) -> tuple[Tensor, Tensor]:
        codes, scales = self.stored("codes", (*matrices, rows)), self.stored("scales", (*matrices, rows))
        if codes.dim() > scales.dim():
            codes = codes.flatten(-2)
        powers = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        return codes, joined(self.form, powers, outer=self.stored("outer") if self.form.outer else None)


class Gptq(Packed):
    """Integers along the columns of words, (inputs, outputs), with the zeros of rows in words too."""

    _subtracted: ClassVar = 0
    """From zeros, as they stand in words."""

    def _read(self, matrices: tuple[slice, ...], rows: slice) -> tuple[Tensor, Tensor]:
        codes = as_bytes(self.stored("codes", (slice(None), rows)).t())
        per_word = 32 // self.form.bits
        words = slice(rows.start // per_word, -(-rows.stop // per_word))
        zeros = self.stored("zeros", (slice(None), words))
        zeros = zeros + self._subtracted * (0x11111111 if self.form.bits == 4 else 0x01010101)
        zeros = unpacked(zeros, self.form.bits)[:, rows.start - words.start * per_word :][:, : rows.stop - rows.start]
        scales = self.stored("scales", (slice(None), rows)).t()
        return codes, joined(self.form, *_by_groups(self, scales, zeros.t()))


class GptqLessOne(Gptq):
    """The same as it was first written."""

    _subtracted = 1


class Awq(Packed):
    """Integers of 4 bits along the rows of words, (inputs, outputs), eight outputs in an order of their own."""

    def _read(self, matrices: tuple[slice, ...], rows: slice) -> tuple[Tensor, Tensor]:
        words = slice(rows.start // 8, -(-rows.stop // 8))
        inside = slice(rows.start - words.start * 8, rows.stop - words.start * 8)

        def ordered(name: str) -> Tensor:
            codes = unpacked(self.stored(name, (slice(None), words)), 4).unflatten(-1, (-1, 8))
            in_order: Tensor = codes[..., list(AWQ_ORDER)].flatten(-2)
            return in_order[:, inside].t()

        codes = ordered("codes")
        zeros = ordered("zeros") if self.part("zeros") is not None else None
        scales = self.stored("scales", (slice(None), rows)).t()
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8) if zeros is None else zeros
        return codes[:, ::2] | (codes[:, 1::2] << 4), joined(self.form, scales, zeros)


class PackedIntegers(Packed):
    """Integers along the rows of words, (rows, words), or bytes with a sign; zeros along the columns of words."""

    def _read(self, matrices: tuple[slice, ...], rows: slice) -> tuple[Tensor, Tensor]:
        codes, scales = self.stored("codes", (rows,)), self.stored("scales", (rows,))
        in_words, middle = codes.dtype == torch.int32, 1 << self.form.bits - 1
        codes = as_bytes(codes) if in_words else codes.view(torch.uint8) ^ 128
        if (stored := self.part("zeros")) is None:
            zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
        elif stored.dtype == "I32":
            per_word = 32 // self.form.bits
            words = slice(rows.start // per_word, -(-rows.stop // per_word))
            columns = unpacked(self.stored("zeros", (words,)).t(), self.form.bits)
            zeros = columns[:, rows.start - words.start * per_word :][:, : rows.stop - rows.start].t()
        else:
            zeros = (self.stored("zeros", (rows,)).to(torch.int16) + middle).to(torch.uint8)
        return codes, joined(self.form, *_by_groups(self, scales, zeros))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes of words along the last dimension, from their low ends on, uint8."""
    numbers = as_bytes(words)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def _by_groups(packed: Packed, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros of rows, (rows, groups): as they are, or one for each column where the file says of which group
    it is and groups are not side by side."""
    if packed.part("groups") is None:
        return scales, zeros
    groups = packed.stored("groups").long()
    if packed.form.group == 1:
        return scales[:, groups], zeros[:, groups]
    size = packed.form.group or packed.shape[-1]
    if not torch.equal(groups, torch.arange(packed.shape[-1]) // size):
        raise user_error(
            where=f"{packed.file}: {packed.key}",
            found="columns of groups that are not side by side, and a configuration without desc_act",
            needed="a configuration that says how the weights are quantised",
            change='write "desc_act": true into quantization_config of config.json',
        )
    return scales, zeros
