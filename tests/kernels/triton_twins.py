"""Kernels for GPUs beside their plain twins, in a process of its own: Triton decides when it is imported whether it
interprets (TRITON_INTERPRET=1), on a CPU, or compiles.

    python tests/kernels/triton_twins.py twins        every check, {"name": "" or what differs} as JSON
    python tests/kernels/triton_twins.py compiled     every kernel compiled for cards that are not here
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tonnage.host.quantized import Format
from tonnage.kernels import adamw, quantized
from tonnage.kernels.adamw import Hyper, split, update_torch
from tonnage.kernels.moments import Codec, Moments
from tonnage.kernels.quantized import pack, widen
from tonnage.kernels.switches import switched_off
from tonnage.training.vocabulary import Vocabulary, softmax_loss

CAPABILITIES = (80, 90, 120)


def same(name: str, ours: Tensor | None, twins: Tensor | None) -> str:
    """What differs, bit by bit."""
    if ours is None or twins is None:
        return "" if ours is twins else f"{name} is in one of both"
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    off = int((ours.reshape(-1).view(kind) != twins.reshape(-1).view(kind)).sum())
    return f"{off} of {ours.numel()} numbers of {name} differ" if off else ""


def states(dtype: torch.dtype, codec: Codec, shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor | None, Moments]]:
    """Twice the same weight, with what is missing of its master, and moments."""
    masters = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(2):
        weight, low = (masters.clone(), None) if dtype == torch.float32 else split(masters, dtype)
        found.append((weight, low, Moments.zeros(codec, shape, torch.device("cpu"))))
    return found


def rounded_root(values: Tensor) -> Tensor:
    """The square root, rounded as IEEE 754 says, as on GPUs: torch on a CPU is off in the last place at times."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def update(dtype: torch.dtype, codec: Codec, shape: tuple[int, ...]) -> str:
    """Four steps, one of which must change nothing."""
    from tonnage.kernels import adamw_triton

    ours, twin = states(dtype, codec, shape)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 5):
        gradient = (torch.randn(shape, generator=generator) * 10.0 ** (step - 3)).to(dtype)
        gradient.view(-1)[: gradient.numel() // 3] = 0.0
        hyper = Hyper(1e-2, 0.9, 0.95, 1e-8, 0.1, step, scale=0.37, key=0xF0000001 + step, first=7)
        if step != 3:
            with patch.object(Tensor, "sqrt", rounded_root):
                update_torch(*twin, gradient, hyper)
        scale = torch.tensor(float("nan") if step == 3 else 0.37)
        coefficients = [float(one) for one in adamw.coefficients_of(hyper)[1:]]
        weight, low, moments = ours
        signs = adamw.signed(hyper.key), adamw.signed(hyper.first)
        adamw_triton.update(weight, low, moments, gradient, scale, coefficients, *signs)
    pairs = {"weight": (ours[0], twin[0]), "low": (ours[1], twin[1])}
    pairs |= {name: (one, twin[2].named()[name]) for name, one in ours[2].named().items()}
    return ", ".join(told for name, pair in pairs.items() if (told := same(name, *pair)))


def round_to_nearest() -> None:
    """Let Triton's interpreter make bf16 of fp32 as GPUs do, to nearest, even of two: it cuts off what is too much."""
    from triton import language
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, wanted: Any) -> Any:
        if (source.dtype.scalar, wanted.scalar) != (language.float32, language.bfloat16):
            return plain(self, source, wanted)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), language.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = cast


def widened(form: Format, shape: tuple[int, int], dtype: torch.dtype, row: int, rows: int, column: int) -> str:
    """A part of a weight."""
    from tonnage.kernels import quantized_triton

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight[1, :70] = 0.0
    packed = pack(weight, form)
    ours, twin = (torch.empty(rows, shape[1] - column, dtype=dtype) for _ in range(2))
    tensors = packed.codes, packed.scales, packed.outer, packed.mean
    tables = None if form == "int8" else quantized._tables(ours.device)
    quantized_triton.widen(ours, tensors, tables, (shape[1], row, column))
    with switched_off(["quantized"]):
        widen(packed, twin, row, column)
    return same("numbers", ours, twin)


def loss(dtype: torch.dtype, rows: int, size: int, scale: float, *, gradient: bool) -> str:
    """Losses of rows, one of which weighs nothing and one of which is not finite, and their gradients."""
    from tonnage.kernels import softmax_triton

    generator = torch.Generator().manual_seed(0)
    logits = (6.0 * torch.randn(rows, size, generator=generator)).to(dtype)
    logits[1, 2] = float("inf")
    targets = torch.randint(0, size, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    weights[2] = 0.0
    given = logits.float().clone()
    vocabulary = Vocabulary(scale=scale)
    want, slopes = softmax_loss(given, targets[:, None], weights[:, None], vocabulary, wants_gradient=gradient)
    ours = softmax_triton.softmax_loss(logits, targets, weights, scale, gradient)
    if ours[1].isfinite():
        return "what was not finite is"
    good = torch.arange(rows) != 1
    try:
        torch.testing.assert_close(ours[good], want[good, 0], rtol=1e-5, atol=1e-6)
        if gradient:  # rounded once: off by one place at most, where the twin is next to a border of two roundings
            places = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
            torch.testing.assert_close(logits[good].float(), slopes[good], rtol=1.01 * places, atol=6e-8)
    except AssertionError as error:
        return str(error)
    return ""


def checks() -> Iterator[tuple[str, str]]:
    """Name of every check, and what differs."""
    round_to_nearest()
    codecs: tuple[Codec, ...] = ("fp32", "bf16", "int8")
    shapes = ((3, 300), (2, 512), (1100,))
    for dtype, codec, shape in product((torch.float32, torch.bfloat16, torch.float16), codecs, shapes):
        name = str(dtype).removeprefix("torch.")
        yield f"update {name} {codec} {'x'.join(map(str, shape))}", update(dtype, codec, shape)
    forms: tuple[Format, ...] = ("nf4", "nf4-double", "int8")
    parts = (((9, 4096), 4, 5, 0), ((40, 192), 5, 20, 64), ((7, 34), 3, 2, 2))
    for form, (shape, *part), dtype in product(forms, parts, (torch.bfloat16, torch.float16, torch.float32)):
        yield f"widen {form} {shape} {part} {dtype}", widened(form, shape, dtype, *part)
    for dtype, gradient, scale in product((torch.bfloat16, torch.float16), (True, False), (1.0, 0.25)):
        for size in (300, 5000):
            name = f"softmax {dtype} {size} {scale} {'with' if gradient else 'without'} gradient"
            yield name, loss(dtype, 4, size, scale, gradient=gradient)


def sources() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Every kernel: name, function, types of arguments, constants, options."""
    from tonnage.kernels import adamw_triton, quantized_triton, softmax_triton

    floats = dict.fromkeys(("omb1", "beta2", "omb2", "keep", "step_size", "unbias", "eps"), "fp32")
    exact = {"enable_fp_fusion": False}
    for weight, moment in product(("bf16", "fp16", "fp32"), ("fp32", "bf16")):
        low = {"bf16": "*i16", "fp16": "*i32", "fp32": "*fp32"}[weight]
        types = {"weights": f"*{weight}", "lows": low, "ms": f"*{moment}", "vs": f"*{moment}"}
        types |= {"gradients": f"*{weight}", "factor": "*fp32", "number": "i64", "key": "i32", "first": "i32"}
        constants = {"SIZE": adamw_triton._ELEMENTS}
        yield f"update {weight} {moment}", adamw_triton.update_elements, types | floats, constants, exact
    for weight, low in (("bf16", "*i16"), ("fp16", "*i32"), ("fp32", "*fp32")):
        types = {"weights": f"*{weight}", "lows": low, "ms": "*i8", "vs": "*u8", "m_scales": "*fp32"}
        types |= {"v_scales": "*fp32", "gradients": f"*{weight}", "factor": "*fp32", "number": "i32", "row": "i32"}
        constants = {"SIZE": adamw_triton._BLOCKS}
        yield f"update {weight} int8", adamw_triton.update_blocks, types | floats, constants, exact

    for out, double in product(("bf16", "fp16", "fp32"), (True, False)):
        types = {"out": f"*{out}", "codes": "*u8", "scales": "*u8" if double else "*fp32", "outer": "*fp32"}
        types |= {"mean": "*fp32", "levels": "*fp32", "book": "*fp32"}
        types |= dict.fromkeys(("width", "row", "column", "columns"), "i32")
        constants = {"DOUBLE": double, "PAIRS": quantized_triton._NUMBERS // 2}
        yield f"widen nf4{'-double' * double} {out}", quantized_triton.widen_pairs, types, constants, exact
    for out in ("bf16", "fp16", "fp32"):
        types = {"out": f"*{out}", "codes": "*i8", "scales": "*fp32"}
        types |= dict.fromkeys(("width", "row", "column", "columns"), "i32")
        constants = {"SIZE": quantized_triton._NUMBERS}
        yield f"widen int8 {out}", quantized_triton.widen_rows, types, constants, exact
    for logits, gradient in product(("bf16", "fp16"), (True, False)):
        types = {"logits": f"*{logits}", "targets": "*i64", "weights": "*fp32", "losses": "*fp32"}
        constants = {"SIZE": 128256, "GRADIENT": gradient, "PIECE": softmax_triton._PIECE}
        options = {"num_warps": softmax_triton._WARPS}
        yield f"softmax {logits} {gradient}", softmax_triton.softmax_rows, types | {"scale": "fp32"}, constants, options


def compiled() -> Iterator[tuple[str, str]]:
    """Every kernel for every card, and why it is not to be had."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, function, types, constants, options in sources():
        for capability in CAPABILITIES:
            source = ASTSource(function, types | dict.fromkeys(constants, "constexpr"), constants)
            try:
                found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
                told = "" if found.asm.get("cubin") else "no code"
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
            yield f"{name} for sm_{capability}", told


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(dict(checks() if sys.argv[1] == "twins" else compiled())))
