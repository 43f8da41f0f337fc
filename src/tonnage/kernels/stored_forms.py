"""Rows of weights in the forms of quantised checkpoints (``host.stored_forms``): made of their parts, and widened.

A number is a code times its scale, computed in fp32, where that is exact or rounded as the libraries that wrote the
checkpoint do, and rounded to the type in which they read it. Plain torch, on any device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tonnage.host.stored_forms import BYTES, StoredForm

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes of 4-bit floats stand for; the eighth bit of the second half is the sign."""
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e8m0": torch.float8_e8m0fnu}
TILE = 1 << 20
"""Numbers that are widened at a time."""


@cache
def _pairs_on(codes: str, device: torch.device) -> Tensor:
    """What the two codes of each byte stand for, fp32 (256, 2): the one in its low half first."""
    levels = torch.arange(16.0) if codes == "int4" else torch.tensor((*E2M1, *(-level for level in E2M1)))
    numbers = torch.arange(256)
    return torch.stack((levels[numbers & 15], levels[numbers >> 4]), 1).to(device)


def _type_of(scale: str) -> torch.dtype:
    kind: torch.dtype = FP8[scale] if scale in FP8 else getattr(torch, scale)
    return kind


def as_bytes(numbers: Tensor) -> Tensor:
    """The bytes of numbers, (..., bytes), in a copy whose strides are those of its shape: ``contiguous`` leaves others
    where a size is 1, through which types of other sizes cannot be seen."""
    return numbers.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def joined(form: StoredForm, scales: Tensor, zeros: Tensor | None = None, outer: Tensor | None = None) -> Tensor:
    """The bytes of rows beside their codes.

    Shapes: ``scales`` (..., rows, groups), ``zeros`` the same, uint8, ``outer`` (): the number of the matrix.
    """
    parts = [as_bytes(scales.to(_type_of(form.scale)))]
    if form.has_zeros:
        assert zeros is not None
        parts.append(zeros)
    if form.outer:
        assert outer is not None
        number = as_bytes(outer.float().reshape(1))
        parts.append(number.expand(*scales.shape[:-1], 4))
    return torch.cat(parts, -1)


def _numbers(form: StoredForm, codes: Tensor) -> Tensor:
    """What codes stand for before they are scaled, fp32, two for each byte of 4-bit ones."""
    if form.bits == 4:
        return torch.nn.functional.embedding(codes.int(), _pairs_on(form.codes, codes.device)).flatten(-2)
    return codes.view(FP8[form.codes]).float() if form.codes in FP8 else codes.float()


def _scales(form: StoredForm, scales: Tensor, num_groups: int) -> tuple[Tensor, Tensor | None]:
    """Scales, fp32, and zeros, uint8, of rows whose bytes ``joined`` made."""
    size = BYTES[form.scale] * num_groups
    numbers = scales[:, :size].clone(memory_format=torch.contiguous_format).view(_type_of(form.scale)).float()
    if form.outer:
        outer = scales[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        numbers = numbers * outer if form.outer == "times" else numbers / outer
    return numbers, scales[:, size : size + num_groups] if form.has_zeros else None


def widen_rows(form: StoredForm, codes: Tensor, scales: Tensor, columns: int, out: Tensor, column: int = 0) -> None:
    """Write into ``out`` the numbers of rows from ``column`` on, some rows at a time.

    Shapes: ``codes`` and ``scales`` (rows, bytes), of rows of ``columns`` numbers; ``out`` (rows, columns of the part).
    """
    if not out.numel():
        return
    step = max(1, TILE // out.shape[1])
    for start in range(0, len(out), step):
        rows = slice(start, start + step)
        out[rows].copy_(_widened(form, codes[rows], scales[rows], columns, slice(column, column + out.shape[1])))


def _widened(form: StoredForm, codes: Tensor, scales: Tensor, columns: int, part: slice) -> Tensor:
    each = 8 // form.bits
    first = part.start // each * each
    values = _numbers(form, codes[:, first // each : -(-part.stop // each)])
    values = values[:, part.start - first : part.stop - first]
    group = form.group or columns
    groups = slice(part.start // group, -(-part.stop // group))
    factors, zeros = _scales(form, scales, form.num_groups(columns))
    factors = factors[:, groups]
    zeros = None if zeros is None else zeros[:, groups]
    if part.start % group or (part.stop - part.start) % group:
        inside = slice(part.start - groups.start * group, part.stop - groups.start * group)
        factors = factors.repeat_interleave(group, 1)[:, inside]
        zeros = None if zeros is None else zeros.repeat_interleave(group, 1)[:, inside]
    else:
        factors = factors.unsqueeze(-1)
        zeros = None if zeros is None else zeros.unsqueeze(-1)
        values = values.unflatten(1, (-1, group))
    if zeros is not None:
        values = values - zeros
    return (values * factors).view(len(codes), -1).to(_type_of(form.rounds_to))


def columns_of(form: StoredForm, codes: Tensor, scales: Tensor, columns: int, part: slice) -> tuple[Tensor, Tensor]:
    """The codes and scales of some numbers of rows, which cut no group (``StoredForm.cuts``)."""
    if part == slice(0, columns):
        return codes, scales
    group, size, num_groups = form.group or columns, BYTES[form.scale], form.num_groups(columns)
    groups = slice(part.start // group, -(-part.stop // group))
    some = [scales[:, groups.start * size : groups.stop * size]]
    if form.has_zeros:
        some.append(scales[:, size * num_groups :][:, groups])
    if form.outer:
        some.append(scales[:, -4:])
    return codes[:, part.start * form.bits // 8 : part.stop * form.bits // 8], torch.cat(some, -1)


def are_finite(form: StoredForm, codes: Tensor, scales: Tensor, columns: int) -> bool:
    """Whether all numbers of some rows are."""
    factors, _ = _scales(form, scales, form.num_groups(columns))
    if not bool(factors.isfinite().all()):
        return False
    return form.codes not in FP8 or all(
        bool(part.view(FP8[form.codes]).float().isfinite().all()) for part in codes.split(64)
    )
