"""Weights of quantised checkpoints: recognised by their names, types and shapes, and by what the configuration says.

    q_proj.weight (8-bit floats) ┐                  q_proj.qweight (words) ┐        experts.down_proj_blocks ┐
    q_proj.weight_scale_inv      ┴─► q_proj.weight  q_proj.qzeros          ┼─► ...  experts.down_proj_scales ┴─► ...
                                                    q_proj.scales          ┘

All tensors of a weight count as one stored tensor under the name that it has in a model that is not packed, of the type
in which the library that wrote it reads it: so whoever loads, checks or exports need not know. ``packed_views`` reads
it. What does not fit together, or is none of these, is left as it is (and ``quantised`` refuses it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tonnage.host.stored_forms import StoredForm
from tonnage.model.packed_views import Awq, EightBitFloats, FourBitFloats, Gptq, GptqLessOne, Packed, PackedIntegers
from tonnage.model.stored import StoredTensor

By = Mapping[str, StoredTensor]
Described = Mapping[str, Any]
SCALES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
OF_SERVING = re.compile(r"\.(input_scale|input_global_scale|output_scale|activation_scale|[qkv]_scale|kv_cache_\w+)$")
"""What says how inputs of layers and caches of keys are rounded while a model is served: weights do not need it."""


def unpack(stored: Sequence[StoredTensor], config: Any) -> tuple[StoredTensor, ...]:
    """``stored``, with one tensor in the place of each packed one and of what belongs to it."""
    entry = getattr(config, "quantization_config", None) or {}
    described: Described = entry if isinstance(entry, Mapping) else entry.to_dict()
    recognise = KINDS.get(str(described.get("quant_method", "")).lower())
    if recognise is None:
        return tuple(stored)
    packed = {one.key: one for one in recognise({one.key: one for one in stored}, described)}
    gone = {part for one in packed.values() for _, part in one.parts}
    if packed:
        gone |= {one for one in stored if OF_SERVING.search(one.key)}
    return (*(one for one in stored if one not in gone), *packed.values())


def packing(stored: Sequence[StoredTensor]) -> str | None:
    """How those of ``unpack`` that are packed are stored, in words; None if none is."""
    kinds = {in_words(one) for one in stored if isinstance(one, Packed)}
    return " and ".join(sorted(kinds)) or None


def in_words(packed: Packed) -> str:
    """How a weight is stored."""
    form = packed.form
    if form.codes == "e2m1":
        return f"{'mxfp4' if form.scale == 'e8m0' else 'nvfp4'} (4-bit floats with scales)"
    if not form.has_zeros:
        return "fp8 (8-bit floats with scales)"
    return f"{OF_INTEGERS[type(packed)]} ({form.bits}-bit integers with scales)"


OF_INTEGERS: Mapping[type[Packed], str] = {
    Gptq: "gptq",
    GptqLessOne: "gptq",
    Awq: "awq",
    PackedIntegers: "compressed-tensors",
}


def _matrix(
    kind: type[Packed], name: str, shape: tuple[int, ...], form: StoredForm, **parts: StoredTensor | None
) -> Packed:
    dtype = {text: code for code, text in SCALES.items()}[form.rounds_to]
    some = tuple((part, one) for part, one in parts.items() if one is not None)
    return kind(name, some[0][1].file, dtype, shape, form, some)


# 8-bit floats.


def _fp8(by_key: By, described: Described) -> Iterator[Packed]:
    size = described.get("weight_block_size")
    return _eight_bit_floats(by_key, "_scale_inv", [tuple(size)] if size else [], rows=False)


def _eight_bit_floats(by_key: By, ending: str, blocks: Sequence[tuple[int, ...]], *, rows: bool) -> Iterator[Packed]:
    """Those whose scale is named by an ``ending``: one for the matrix, for blocks of one of some sizes, or, where
    ``rows`` may have their own, for each row."""
    for key, scales in by_key.items():
        values = by_key.get(key.removesuffix(ending))
        if not key.endswith(ending) or values is None or len(values.shape) < 2 or not values.dtype.startswith("F8_E"):
            continue
        codes = values.dtype.removeprefix("F8_").lower()
        first, sides = values.shape[:-2], values.shape[-2:]
        block = (1, 0) if scales.shape in ((), (1,)) or (rows and scales.shape == (*first, sides[0], 1)) else None
        for height, width in blocks:
            if scales.shape == (*first, -(-sides[0] // height), -(-sides[1] // width)):
                block = (height, width)
        if block is None or codes not in FLOAT_CODES or scales.dtype not in ("F32", "BF16", *(["F16"] if rows else [])):
            continue
        form = StoredForm(codes, block[1], "float32")
        matrix = _matrix(EightBitFloats, values.key, values.shape, form, codes=values, scales=scales)
        yield replace(matrix, height=block[0])


FLOAT_CODES = ("e4m3", "e5m2")


# 4-bit floats.


def _mxfp4(by_key: By, described: Described) -> Iterator[Packed]:
    """Experts of gpt-oss, which lie transposed."""
    for key, blocks in by_key.items():
        name = key.removesuffix("_blocks")
        scales = by_key.get(f"{name}_scales")
        if not key.endswith("_blocks") or scales is None or len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape:
            continue
        if blocks.dtype == scales.dtype == "U8" and blocks.shape[-1] == 16:
            experts, rows, groups, _ = blocks.shape
            form = StoredForm("e2m1", 32, "e8m0", turned=True)
            yield _matrix(FourBitFloats, name, (experts, groups * 32, rows), form, codes=blocks, scales=scales)


def _four_bit_floats(by_key: By, of_codes: str, of_outer: str, outer: str) -> Iterator[Packed]:
    """Linear layers in nvfp4 or mxfp4, whose codes and number of the matrix have names that end so."""
    for key, codes in by_key.items():
        layer = key.removesuffix(of_codes)
        scales, number = by_key.get(f"{layer}.weight_scale"), by_key.get(layer + of_outer)
        if not key.endswith(of_codes) or codes.dtype != "U8" or len(codes.shape) != 2 or scales is None:
            continue
        rows, columns = codes.shape[0], codes.shape[1] * 2
        name, shape = f"{layer}.weight", (rows, columns)
        if scales.dtype == "F8_E4M3" and scales.shape == (rows, columns // 16) and columns % 16 == 0:
            if number is not None and number.dtype == "F32" and number.shape in ((), (1,)):
                form = StoredForm("e2m1", 16, "e4m3", outer)
                yield _matrix(FourBitFloats, name, shape, form, codes=codes, scales=scales, outer=number)
        elif scales.dtype == "U8" and scales.shape == (rows, columns // 32) and columns % 32 == 0 and number is None:
            form = StoredForm("e2m1", 32, "e8m0")
            yield _matrix(FourBitFloats, name, shape, form, codes=codes, scales=scales)


def _modelopt(by_key: By, described: Described) -> Iterator[Packed]:
    yield from _four_bit_floats(by_key, ".weight", ".weight_scale_2", "times")
    yield from _eight_bit_floats(by_key, "_scale", [], rows=True)


# Integers.


def _gptq(by_key: By, described: Described) -> Iterator[Packed]:
    file_format = str(described.get("checkpoint_format") or described.get("format") or "gptq")
    bits = described.get("bits")
    if file_format not in ("gptq", "gptq_v2") or bits not in (4, 8) or described.get("dynamic"):
        return
    for layer, codes, zeros, scales in _words(by_key):
        columns, rows = codes.shape[0] * 32 // bits, codes.shape[1]
        groups = by_key.get(f"{layer}.g_idx")
        if groups is not None and (groups.shape != (columns,) or groups.dtype != "I32"):
            continue
        if zeros is None or zeros.shape != (scales.shape[0], rows * bits // 32) or rows * bits % 32:
            continue
        in_order = groups is None or described.get("desc_act") is False or scales.shape[0] == 1
        form = _integers(bits, columns, rows, scales, described, in_order=in_order)
        if form is not None:
            parts = {"codes": codes, "zeros": zeros, "scales": scales, "groups": groups}
            yield _matrix(
                GptqLessOne if file_format == "gptq" else Gptq, f"{layer}.weight", (rows, columns), form, **parts
            )


def _awq(by_key: By, described: Described) -> Iterator[Packed]:
    version = str(described.get("version") or described.get("checkpoint_format") or described.get("format") or "gemm")
    if version.lower() != "gemm" or described.get("bits", described.get("w_bit")) != 4:
        return
    for layer, codes, zeros, scales in _words(by_key):
        columns, rows = codes.shape[0], codes.shape[1] * 8
        if zeros is not None and zeros.shape != (scales.shape[0], codes.shape[1]):
            continue
        form = _integers(4, columns, rows, scales, described, in_order=True)
        if form is not None and columns % 2 == 0:
            parts = {"codes": codes, "zeros": zeros, "scales": scales}
            yield _matrix(Awq, f"{layer}.weight", (rows, columns), form, **parts)


def _words(by_key: By) -> Iterator[tuple[str, StoredTensor, StoredTensor | None, StoredTensor]]:
    """Layers whose codes are words: the name of each, its codes, zeros and scales."""
    for key, codes in by_key.items():
        layer = key.removesuffix(".qweight")
        zeros, scales = by_key.get(f"{layer}.qzeros"), by_key.get(f"{layer}.scales")
        if not key.endswith(".qweight") or codes.dtype != "I32" or len(codes.shape) != 2 or scales is None:
            continue
        if scales.dtype in SCALES and len(scales.shape) == 2 and (zeros is None or zeros.dtype == "I32"):
            yield layer, codes, zeros, scales


def _integers(
    bits: int, columns: int, rows: int, scales: StoredTensor, described: Described, *, in_order: bool
) -> StoredForm | None:
    """The form of integers whose ``scales`` are (groups, rows); None if these do not fit. Columns that are not in the
    order of their groups have a scale each."""
    size = described.get("group_size", described.get("q_group_size", -1))
    group = size if isinstance(size, int) and 0 < size < columns else columns
    if scales.shape != (-(-columns // group), rows):
        return None
    return StoredForm(f"int{bits}", 1 if not in_order else 0 if group == columns else group, SCALES[scales.dtype])


def _compressed(by_key: By, described: Described) -> Iterator[Packed]:
    """What compressed-tensors writes."""
    sparse = described.get("sparsity_config") or {}
    if described.get("quantization_status", "compressed") != "compressed" or sparse.get("format", "dense") != "dense":
        return
    ways = [way for group in (described.get("config_groups") or {}).values() if (way := group.get("weights"))]
    yield from _four_bit_floats(by_key, ".weight_packed", ".weight_global_scale", "over")
    blocks = [tuple(way["block_structure"]) for way in ways if way.get("block_structure")]
    yield from _eight_bit_floats(by_key, "_scale", blocks, rows=True)
    for key, codes in by_key.items():
        layer = key.removesuffix(".weight_packed").removesuffix(".weight")
        scales, zeros = by_key.get(f"{layer}.weight_scale"), by_key.get(f"{layer}.weight_zero_point")
        if len(codes.shape) != 2 or scales is None or scales.dtype not in SCALES or len(scales.shape) != 2:
            continue
        if key == f"{layer}.weight" and codes.dtype == "I8" and scales.shape == (codes.shape[0], 1):
            if zeros is None or (zeros.dtype == "I8" and zeros.shape == scales.shape):
                form = StoredForm("int8", 0, SCALES[scales.dtype])
                yield _matrix(PackedIntegers, key, codes.shape, form, codes=codes, scales=scales, zeros=zeros)
        elif key.endswith(".weight_packed") and codes.dtype == "I32":
            yield from _packed_integers(by_key, layer, ways)


def _packed_integers(by_key: By, layer: str, ways: Sequence[Described]) -> Iterator[Packed]:
    """A layer whose integers are packed in one of some ``ways``, if one alone fits."""
    codes, scales = by_key[f"{layer}.weight_packed"], by_key[f"{layer}.weight_scale"]
    zeros, groups, sizes = (by_key.get(f"{layer}.weight_{name}") for name in ("zero_point", "g_idx", "shape"))
    forms = {}
    for way in ways:
        bits, size = way.get("num_bits"), way.get("group_size")
        if way.get("type", "int") != "int" or bits not in (4, 8):
            continue
        columns = codes.shape[1] * 32 // bits
        group = size if isinstance(size, int) and 0 < size < columns else columns
        zero_words = (codes.shape[0] * bits // 32, scales.shape[1])
        if scales.shape != (codes.shape[0], -(-columns // group)) or (zeros is not None and zeros.shape != zero_words):
            continue
        in_order = groups is None or way.get("actorder") in (None, False, "weight", "static")
        forms[columns] = StoredForm(f"int{bits}", 0 if group == columns else group, SCALES[scales.dtype])
        if not in_order:
            forms[columns] = replace(forms[columns], group=1)
    if len(forms) == 1:
        ((columns, form),) = forms.items()
        parts = {"codes": codes, "scales": scales, "zeros": zeros, "groups": groups, "sizes": sizes}
        yield _matrix(PackedIntegers, f"{layer}.weight", (codes.shape[0], columns), form, **parts)


KINDS: Mapping[str, Callable[[By, Described], Iterator[Packed]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}
"""Methods, in the words of configurations."""
