"""Forms in which quantised checkpoints hold weights, and in which they may stay: codes, and scales for groups of a row.

=================== ============================================================ ================= ====================
name                a number is                                                  bytes a number    checkpoints
=================== ============================================================ ================= ====================
int4-128-float16    (code - zero) x scale, in the type of the scale              1/2 + 3/128       GPTQ, AWQ, ...
int8-128-float16    the same, of 8 bits                                          1 + 3/128         GPTQ, ...
e2m1-32-e8m0        4-bit float x power of two, in bf16                          1/2 + 1/32        mxfp4
e2m1-16-e4m3-times  4-bit float x (8-bit float x number of the matrix), in bf16  1/2 + 1/16        nvfp4 of modelopt
e2m1-16-e4m3-over   4-bit float x (8-bit float / number of the matrix), in bf16  1/2 + 1/16        nvfp4 of others
e4m3-128-float32    8-bit float x scale, in bf16                                 1 + 4/128         fp8
=================== ============================================================ ================= ====================

The number after the kind of codes says how many numbers of a row share a scale; 0: all of them do. In memory a row is
bytes, whatever order a checkpoint has: its codes, the first of two of 4 bits in the low half of a byte, in one tensor,
and in another its scales, then zeros, one byte each, then the number of the matrix in fp32. So rows can be cut and
gathered one by one, and no type is taken for one of numbers to train on. ``-turned`` are matrices that lie in memory
transposed, as the experts of gpt-oss. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "e4m3": 1, "e8m0": 1}
"""Of a scale."""
INTEGERS = ("int4", "int8")
TURNED = "turned"


@dataclass(frozen=True)
class StoredForm:
    """How the numbers of a weight are stored."""

    codes: str
    """``int4``, ``int8`` (with a zero for each scale), ``e2m1``, ``e4m3`` or ``e5m2``."""
    group: int
    """Numbers of a row that share a scale; 0: all."""
    scale: str
    """Type of the scales: one of ``BYTES``."""
    outer: str = ""
    """``times`` or ``over``: scales are multiplied, or divided, by one number of the matrix."""
    turned: bool = False
    """Whether the parameter is the transposed of what is stored."""

    @property
    def name(self) -> str:
        """As ``stored_form`` reads it."""
        parts = (self.codes, str(self.group), self.scale, self.outer, TURNED if self.turned else "")
        return "-".join(part for part in parts if part)

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.codes in ("int4", "e2m1") else 8

    @property
    def has_zeros(self) -> bool:
        """Whether each scale has a zero."""
        return self.codes in INTEGERS

    @property
    def rounds_to(self) -> str:
        """The type that numbers have where a checkpoint is read whole."""
        return self.scale if self.has_zeros else "bfloat16"

    def num_groups(self, columns: int) -> int:
        """Scales of a row of so many numbers."""
        return -(-columns // (self.group or max(1, columns)))

    def row_bytes(self, columns: int) -> tuple[int, int]:
        """Bytes of the codes of a row of so many numbers, and of its scales with what follows them."""
        scale = BYTES[self.scale] + (1 if self.has_zeros else 0)
        return -(-columns * self.bits // 8), self.num_groups(columns) * scale + (4 if self.outer else 0)

    def cuts(self, columns: int, part: int) -> bool:
        """Whether parts of so many of the numbers of a row begin inside of a group, or of a byte."""
        return part < columns and bool(part * self.bits % 8 or (self.group and part % self.group))

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in which a parameter of ``shape`` lies."""
        return (*shape[:-2], shape[-1], shape[-2]) if self.turned else tuple(shape)


@cache
def stored_form(name: str) -> StoredForm | None:
    """The form of a name; None if it is none of these (``host.quantized`` has others)."""
    codes, *rest = name.split("-")
    if len(rest) < 2 or rest[1] not in BYTES:
        return None
    outer = next((part for part in rest[2:] if part != TURNED), "")
    return StoredForm(codes, int(rest[0]), rest[1], outer, TURNED in rest[2:])


def is_turned(name: str) -> bool:
    """Whether a weight in the form of a ``name`` lies transposed."""
    return (form := stored_form(name)) is not None and form.turned
