"""How Adam's two moments rest between updates. The update itself is always computed in fp32 (``kernels``).

===== ============= ==========================================================================================
codec bytes a pair  how
===== ============= ==========================================================================================
fp32  8             as they are
bf16  4             rounded stochastically: a small change of a large moment survives in expectation, where rounding
                    to nearest would drop it at every step
int8  2 + 8 / 256   in blocks of ``BLOCK`` elements that share a scale, on a map that is fine near zero:
                    ``m = m_scale * (c / 127) * abs(c / 127)`` with c in -127..127, and
                    ``sqrt(v) = v_scale * ((c + 1) / 256)^2`` with c in 0..255
===== ============= ==========================================================================================

The int8 maps are companded (codes are even steps of a square root; FlashOptim, arXiv 2602.23349, does likewise): a
first moment at a hundredth of the largest in its block is kept to 8%, the root of a second moment to 4%, where even
steps would lose both. The second moment has no code for zero: a second moment rounded to zero under a first moment
that is not would make the next step as large as m / eps. A block whose scale is below ``TINY`` is zero: an embedding
row that is never looked up decays there.

Blocks start anew in every row of dimension 0, so that a state sharded along rows has the same blocks in every world,
and its scales are a tensor of shape (rows, blocks in a row) that is sharded in the same way. Rows may be cut between
blocks as well, into parts of one size (``keeps_blocks``). Parameters whose rows
are shorter than ``SHORTEST_ROW`` (norms, biases: a thousandth of a model) keep fp32 moments under int8, as a scale for
every few elements would cost what it saves.

The random bits of stochastic rounding are a function of (seed, step, name of the parameter, index of the element in the
whole parameter): neither sharding, nor tiles, nor threads change a result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tonnage.host.moments import BLOCK as BLOCK

Codec = Literal["fp32", "bf16", "int8"]

# The loops in ``kernels`` have these and ``BLOCK`` compiled in, and numba's cache looks at the date of that file only.
SHORTEST_ROW = 64
"""Elements that a row must have for its moments to rest as int8."""
TINY = 1e-30
"""A scale below this is zero. Its inverse would overflow soon after."""


@dataclass(frozen=True)
class Moments:
    """Both moments of a parameter, or of a run of its elements, as they rest."""

    m: Tensor
    """fp32, bf16 or int8."""
    v: Tensor
    """fp32, bf16 or uint8."""
    m_scale: Tensor | None
    """Largest absolute first moment of each block, fp32; None if the codec is not int8."""
    v_scale: Tensor | None
    """Largest root of a second moment of each block, fp32."""
    row: int
    """Elements in a row of dimension 0."""

    @staticmethod
    def zeros(codec: Codec, shape: Sequence[int], device: torch.device) -> Moments:
        """Moments of a parameter, or a shard of whole rows, before its first update."""
        row = row_length(shape)
        flat = {
            name: torch.zeros(size, dtype=dtype, device=device)
            for name, (dtype, size) in streams(codec, math.prod(shape), row).items()
        }
        m, v = flat["m"].view(tuple(shape)), flat["v"].view(tuple(shape))
        if "m_scale" not in flat:
            return Moments(m, v, None, None, row)
        blocks = (shape[0], blocks_in(row))
        return Moments(m, v, flat["m_scale"].view(blocks), flat["v_scale"].view(blocks), row)

    def part(self, start: int, stop: int) -> Moments:
        """Elements ``start`` to ``stop`` (counted flat), as ``cut`` cuts them; flat views of the same memory."""
        m, v = self.m.view(-1)[start:stop], self.v.view(-1)[start:stop]
        if self.m_scale is None or self.v_scale is None:
            return Moments(m, v, None, None, stop - start)
        row = min(self.row, stop - start)
        first = start // self.row * blocks_in(self.row) + start % self.row // BLOCK
        blocks = slice(first, first + (stop - start) // row * blocks_in(row))
        return Moments(m, v, self.m_scale.view(-1)[blocks], self.v_scale.view(-1)[blocks], row)

    def named(self) -> dict[str, Tensor]:
        """The tensors by the names under which they are saved."""
        parts = {"m": self.m, "v": self.v, "m_scale": self.m_scale, "v_scale": self.v_scale}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}


@dataclass(frozen=True)
class Momentum:
    """The one moment of a rule that has no second one, as it rests: ``m`` of ``Moments``."""

    m: Tensor
    m_scale: Tensor | None
    row: int

    @staticmethod
    def zeros(codec: Codec, shape: Sequence[int], device: torch.device) -> Momentum:
        """Of a parameter, or a shard of whole rows, before its first update."""
        both = Moments.zeros(codec, shape, torch.device("meta"))
        m, scale = (None if one is None else torch.zeros_like(one, device=device) for one in (both.m, both.m_scale))
        assert m is not None
        return Momentum(m, scale, both.row)

    def part(self, start: int, stop: int) -> Momentum:
        """Elements ``start`` to ``stop``, as ``Moments.part``."""
        part = Moments(self.m, self.m, self.m_scale, self.m_scale, self.row).part(start, stop)
        return Momentum(part.m, part.m_scale, part.row)

    def named(self) -> dict[str, Tensor]:
        return {"m": self.m} | ({} if self.m_scale is None else {"m_scale": self.m_scale})

    def decoded(self) -> Tensor:
        """In fp32, flat."""
        if self.m_scale is None:
            return self.m.view(-1).float()
        code = _blocks(self.m, self.row).float()
        unit = self.m_scale.view(code.shape[:2]).unsqueeze(-1) * M_UNIT
        return _flat(unit * (code * code.abs()), self.row)

    def encode(self, m: Tensor, key: Tensor, first: Tensor) -> None:
        """Let a flat fp32 moment rest here; ``key`` and ``first`` as in ``random_bits``."""
        if self.m_scale is not None:
            blocks = _blocks(m, self.row)
            magnitude = ((blocks.abs() * _scaled(blocks, self.m_scale, M_LEVELS)).sqrt() + 0.5).to(torch.int32)
            self.m.view(-1).copy_(_flat(torch.where(blocks < 0.0, -magnitude, magnitude), self.row))
        elif self.m.dtype == torch.bfloat16:
            self.m.view(-1).copy_(_truncate(m, random_bits(m.numel(), key, first) & 0xFFFF))
        else:
            self.m.view(-1).copy_(m)


def moments_of(parts: Mapping[str, Tensor], row: int) -> Moments | Momentum:
    """What was ``named`` so, of rows of so many elements."""
    if "v" in parts:
        return Moments(parts["m"], parts["v"], parts.get("m_scale"), parts.get("v_scale"), row)
    return Momentum(parts["m"], parts.get("m_scale"), row)


def row_length(shape: Sequence[int]) -> int:
    """Elements in a row of dimension 0."""
    return math.prod(shape[1:])


def blocks_in(row: int) -> int:
    """Blocks in a row; the last may be shorter than the others."""
    return -(-row // BLOCK)


def effective_codec(codec: Codec, row: int) -> Codec:
    """The codec for a parameter with rows of ``row`` elements."""
    return "fp32" if codec == "int8" and row < SHORTEST_ROW else codec


def keeps_blocks(row: int, parts: int) -> bool:
    """Whether rows of ``row`` elements that are cut into equal ``parts`` have the blocks that they have whole."""
    return parts == 1 or row < SHORTEST_ROW or row % (parts * BLOCK) == 0


def streams(codec: Codec, num_elements: int, row: int) -> dict[str, tuple[torch.dtype, int]]:
    """Type and size of each tensor in which the moments of a run of elements rest: whole rows, or a part of one."""
    match effective_codec(codec, row):
        case "fp32":
            return {"m": (torch.float32, num_elements), "v": (torch.float32, num_elements)}
        case "bf16":
            return {"m": (torch.bfloat16, num_elements), "v": (torch.bfloat16, num_elements)}
        case "int8":
            length = max(1, min(row, num_elements))
            scales = (torch.float32, num_elements // length * blocks_in(length))
            return {
                "m": (torch.int8, num_elements),
                "v": (torch.uint8, num_elements),
                "m_scale": scales,
                "v_scale": scales,
            }


def border(start: int, limit: int, row: int, num_elements: int) -> int:
    """The furthest end of a run from ``start`` of at most ``limit`` elements whose borders are also borders of blocks.

    The run is a number of whole rows or, where ``start`` is inside a row or ``limit`` less than one, a part of one row.
    It is empty if ``limit`` is less than a block, or a shorter row.
    """
    inside = start % row
    if inside == 0 and limit >= row:
        return min(start + limit // row * row, num_elements)
    return min(start + limit // BLOCK * BLOCK, start - inside + row)


def cut(num_elements: int, row: int, limit: int) -> Iterator[tuple[int, int]]:
    """All elements in runs of at most ``limit`` (at least ``BLOCK``), as ``border`` ends them."""
    start = 0
    while start < num_elements:
        stop = border(start, limit, row, num_elements)
        yield start, stop
        start = stop


def noise_key(seed: int, step: int, name: str) -> int:
    """Key of the random bits for one update of one parameter: 32 bits."""
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


# The codecs in torch operations: what the loops in ``kernels`` do for the CPU, here for other devices.


def decode(moments: Moments) -> tuple[Tensor, Tensor]:
    """Both moments in fp32, flat."""
    m = Momentum(moments.m, moments.m_scale, moments.row).decoded()
    if moments.v_scale is None:
        return m, moments.v.view(-1).float()
    root = _blocks(moments.v, moments.row).float() + 1.0
    root = moments.v_scale.view(-1, blocks_in(moments.row), 1) * V_UNIT * (root * root)
    return m, _flat(root * root, moments.row)


def encode(moments: Moments, m: Tensor, v: Tensor, root: Tensor, key: Tensor, first: Tensor) -> None:
    """Let fp32 moments rest in ``moments``. ``root`` is sqrt(v); ``key`` and ``first`` as in ``random_bits``."""
    if moments.v_scale is not None:
        Momentum(moments.m, moments.m_scale, moments.row).encode(m, key, first)
        root = _blocks(root, moments.row)
        code = ((root * _scaled(root, moments.v_scale, V_LEVELS)).sqrt() - 0.5).to(torch.int32)
        moments.v.view(-1).copy_(_flat(code, moments.row))
    elif moments.m.dtype == torch.bfloat16:
        bits = random_bits(m.numel(), key, first)
        moments.m.view(-1).copy_(_truncate(m, bits & 0xFFFF))
        moments.v.view(-1).copy_(_truncate(v, (bits >> 16) & 0xFFFF))
    else:
        moments.m.view(-1).copy_(m)
        moments.v.view(-1).copy_(v)


def _scaled(blocks: Tensor, scale: Tensor, levels: float) -> Tensor:
    """Fill the ``scale`` of each block; returns by what its magnitudes are multiplied to be of so many ``levels``."""
    largest = blocks.abs().amax(-1)
    largest = torch.where(largest < TINY, 0.0, largest)
    scale.view(largest.shape).copy_(largest)
    return torch.where(largest == 0.0, 0.0, torch.full_like(largest, levels) / largest).unsqueeze(-1)


M_LEVELS, V_LEVELS = 127.0**2, 256.0**2
M_UNIT, V_UNIT = (float(torch.tensor(1.0 / levels)) for levels in (M_LEVELS, V_LEVELS))
"""Inverses of the levels, rounded to fp32."""


def random_bits(num: int, key: Tensor, first: Tensor) -> Tensor:
    """32 random bits for each of ``num`` elements from index ``first`` on, as int32.

    Every index has bits of its own, whatever ``first`` is (they repeat after 2^32 elements of one parameter). The
    mixing function is "lowbias32" of C. Wellons, "Prospecting for hash functions". ``key`` and ``first`` are int32
    scalars.
    """
    bits = (torch.arange(num, dtype=torch.int32, device=key.device) + first) ^ key
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def _truncate(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 as bf16, rounded up or down in proportion to the distance; ``noise`` holds 16 random bits."""
    bits = (values.view(torch.int32) + noise) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


def _blocks(values: Tensor, row: int) -> Tensor:
    """Shape (rows, blocks, BLOCK), the last block of a row filled up with zeros."""
    rows = values.view(-1, row)
    missing = blocks_in(row) * BLOCK - row
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.view(-1, blocks_in(row), BLOCK)


def _flat(blocks: Tensor, row: int) -> Tensor:
    """What ``_blocks`` made, flat again."""
    return blocks.view(-1, blocks_in(row) * BLOCK)[:, :row].reshape(-1)
