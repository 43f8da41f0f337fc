"""Weights that rest in fewer bits than they are trained in, read as bf16 one tensor at a time.

    q_proj.weight (8-bit floats) ┐                          experts.gate_up_proj_blocks (pairs of 4-bit floats) ┐
    q_proj.weight_scale_inv      ┴─► q_proj.weight          experts.gate_up_proj_scales                         ┴─► ...

A tensor and its scales count as one stored tensor in bf16 under the name that the weight has in a model that is not
packed, so whoever loads, checks or exports need not know. The numbers are transformers' own (``Fp8Dequantize`` and what
``Mxfp4Dequantize`` calls); only the blocks of the rows that somebody asks for are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tonnage.model.stored import StoredTensor

FP8, MXFP4 = "fp8", "mxfp4"
SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
IN_WORDS = {FP8: "8-bit floats with scales", MXFP4: "4-bit floats with scales"}


@dataclass(frozen=True)
class PackedPair(StoredTensor):
    """A tensor that two stored ones make up."""

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None for pairs of 4-bit floats, whose scales say it themselves."""

    def view(self) -> PackedPair:
        """What reads parts of it, as a slice of safetensors does of another tensor: itself."""
        return self

    def __getitem__(self, index: Any) -> Tensor:
        """The part at ``index``, in bf16: an ellipsis, or slices for the first dimensions."""
        slices = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        bounds = [part.indices(size)[:2] for part, size in zip(slices, self.shape, strict=False)]
        region = [slice(*pair) for pair in bounds] + [slice(0, size) for size in self.shape[len(bounds) :]]
        return self._of_pairs(region) if self.block is None else self._of_blocks(region, self.block)

    def _of_pairs(self, region: Sequence[slice]) -> Tensor:
        """``region`` of the transposed matrices that 4-bit floats make up; those of an expert are read whole."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = (_part(tensor, (region[0],)) for tensor in (self.values, self.scales))
        whole: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        return whole[(slice(None), *region[1:])]

    def _of_blocks(self, region: Sequence[slice], block: tuple[int, int]) -> Tensor:
        """``region`` of matrices of 8-bit floats; whole blocks are read."""
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        *first, rows, columns = region
        pairs = list(zip((rows, columns), block, self.shape[-2:], strict=True))
        around = [slice(p.start // size * size, min(-(-p.stop // size) * size, whole)) for p, size, whole in pairs]
        grid = [slice(part.start // size, -(-part.stop // size)) for part, size, _ in pairs]
        values = _part(self.values, (*first, *around)).float()
        if len(self.scales.shape) == len(self.shape):
            scales = _part(self.scales, (*first, *grid))
        else:
            scales = _part(self.scales, ()).reshape(1, 1)
        # transformers divides a matrix into equal blocks, so one whose last blocks are cut short is filled up
        lacking = [
            blocks * size - side for blocks, size, side in zip(scales.shape[-2:], block, values.shape[-2:], strict=True)
        ]
        filled = pad(values, (0, lacking[1], 0, lacking[0]))
        (whole,) = Fp8Dequantize(None).convert({"weight": filled, "weight_scale_inv": scales}).values()
        if isinstance(whole, list):  # as that of transformers 5.17 gives it
            (whole,) = whole
        assert isinstance(whole, Tensor)
        inside = [slice(p.start - at.start, p.stop - at.start) for (p, _, _), at in zip(pairs, around, strict=True)]
        return whole[..., inside[0], inside[1]].to(torch.bfloat16)


def _part(stored: StoredTensor, region: Sequence[slice]) -> Tensor:
    from safetensors import safe_open

    with safe_open(stored.file, framework="pt") as source:
        part: Tensor = source.get_slice(stored.key)[tuple(region) if region else ...]
        return part


def unpack(stored: Sequence[StoredTensor], config: Any) -> tuple[StoredTensor, ...]:
    """``stored``, with one tensor in bf16 in the place of each packed one and its scales.

    What ``config`` does not say to be packed in a way that is known, or what does not fit together, is left as it is.
    """
    by_key = {one.key: one for one in stored}
    entry = getattr(config, "quantization_config", None) or {}
    described: Mapping[str, Any] = entry if isinstance(entry, Mapping) else entry.to_dict()
    method = described.get("quant_method")
    packed = (
        _pairs_of_8_bits(by_key, described) if method == FP8 else _pairs_of_4_bits(by_key) if method == MXFP4 else {}
    )
    gone = {part for one in packed.values() for part in (one.values, one.scales)}
    scales = {f"{key.removesuffix('weight')}activation_scale" for key in packed if key.endswith(".weight")}
    gone |= {one for one in stored if one.key in scales}
    return (*(one for one in stored if one not in gone), *packed.values())


def packing(stored: Sequence[StoredTensor]) -> str | None:
    """How those of ``unpack`` that are packed are stored, in words; None if none is."""
    kinds = {MXFP4 if one.block is None else FP8 for one in stored if isinstance(one, PackedPair)}
    return " and ".join(f"{kind} ({IN_WORDS[kind]})" for kind in sorted(kinds)) or None


def _pairs_of_8_bits(by_key: Mapping[str, StoredTensor], described: Mapping[str, Any]) -> dict[str, PackedPair]:
    size = described.get("weight_block_size")
    pairs = {}
    for key, scales in by_key.items():
        values = by_key.get(key.removesuffix(SCALE))
        if not key.endswith(SCALE) or values is None or len(values.shape) < 2 or not values.dtype.startswith("F8_E"):
            continue
        block = values.shape[-2:] if scales.shape in ((), (1,)) else tuple(size or ())
        grid = tuple(-(-side // part) for side, part in zip(values.shape[-2:], block, strict=False) if part)
        if scales.dtype in ("F32", "BF16") and scales.shape in ((), (1,), (*values.shape[:-2], *grid)):
            named = (values.key, values.file, "BF16", values.shape)
            pairs[values.key] = PackedPair(*named, values, scales, (block[0], block[1]))
    return pairs


def _pairs_of_4_bits(by_key: Mapping[str, StoredTensor]) -> dict[str, PackedPair]:
    pairs = {}
    for key, blocks in by_key.items():
        name = key.removesuffix(BLOCKS)
        scales = by_key.get(name + SCALES)
        if not key.endswith(BLOCKS) or scales is None or len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape:
            continue
        if blocks.dtype == scales.dtype == "U8":
            experts, rows, groups, width = blocks.shape
            shape = (experts, groups * width * 2, rows)
            pairs[name] = PackedPair(name, blocks.file, "BF16", shape, blocks, scales, None)
    return pairs
