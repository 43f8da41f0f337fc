"""What other libraries read where weights are stored in few bits, for ``tests/model/test_packed.py``.

    python tests/golden_stored.py    writes golden_stored.json beside this

It needs gptqmodel 7.7.0, autoawq 0.2.9 (its file ``awq/utils/packing_utils.py`` is enough, on the path) and
compressed-tensors 0.20.1, which the tests do not. Weights are random words, so that every code, zero and scale occurs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN = Path(__file__).with_suffix(".json")
ROWS, COLUMNS = 24, 64
LAYER = "a"


def encoded(tensor: Tensor) -> dict[str, Any]:
    """A tensor as JSON."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": kind, "shape": list(tensor.shape), "bytes": base64.b64encode(content).decode()}


def decoded(entry: dict[str, Any]) -> Tensor:
    """The tensor of ``encoded``."""
    content = torch.frombuffer(bytearray(base64.b64decode(entry["bytes"])), dtype=torch.uint8)
    return content.view(getattr(torch, entry["dtype"])).view(entry["shape"])


def words(*shape: int) -> Tensor:
    """Random bits."""
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


Case = tuple[str, dict[str, Any], dict[str, Tensor], Tensor]


def of_gptqmodel() -> Iterator[Case]:
    """What ``dequantize_weight`` of its layer in torch says, of both ways to store zeros."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    for bits, group, acts, version, kind in (
        (4, 32, False, "gptq", torch.float16),
        (4, 32, False, "gptq_v2", torch.bfloat16),
        (4, 16, True, "gptq", torch.float16),
        (8, 32, False, "gptq", torch.float16),
        (8, -1, True, "gptq_v2", torch.float16),
    ):
        size = COLUMNS if group == -1 else group
        layer = TorchLinear(
            bits=bits, group_size=group, sym=False, desc_act=acts, in_features=COLUMNS, out_features=32, bias=False
        )
        order = torch.randperm(COLUMNS) if acts else torch.arange(COLUMNS)
        tensors = {
            "qweight": words(COLUMNS * bits // 32, 32),
            "qzeros": words(COLUMNS // size, 32 * bits // 32),
            "scales": (torch.rand(COLUMNS // size, 32) / 16).to(kind),
            "g_idx": (torch.arange(COLUMNS) // size)[order].to(torch.int32),
        }
        for name, value in tensors.items():
            setattr(layer, name, value.clone())
        if version == "gptq":
            convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        expected = layer.dequantize_weight().t()
        entry = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": acts}
        entry["checkpoint_format"] = version
        yield f"{version}, {bits} bits, {group}{', act-order' if acts else ''}", entry, tensors, expected


def of_autoawq() -> Iterator[Case]:
    """What ``dequantize_gemm`` says."""
    from packing_utils import dequantize_gemm

    tensors = {"qweight": words(COLUMNS, 4), "qzeros": words(2, 4), "scales": (torch.rand(2, 32) / 16).half()}
    expected = dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, 32).t()
    entry = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    yield "awq", entry, tensors, expected


def of_compressed_tensors() -> Iterator[Case]:
    """What its compressors say."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    pairs = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    floats, shape = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), torch.tensor([ROWS, COLUMNS])
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    integers = {"num_bits": 4, "type": "int", "symmetric": True}
    scale = torch.rand(ROWS, 2).to(torch.bfloat16)
    by_row = torch.rand(ROWS, 1).to(torch.bfloat16)
    cases: list[tuple[str, str, dict[str, Any], dict[str, Tensor]]] = [
        (
            "nvfp4",
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
            {
                "weight_packed": pairs,
                "weight_scale": (torch.rand(ROWS, COLUMNS // 16) * 400).to(torch.float8_e4m3fn),
                "weight_global_scale": torch.tensor([9731.0]),
            },
        ),
        (
            "mxfp4",
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
            {"weight_packed": pairs, "weight_scale": torch.randint(118, 130, (ROWS, 2), dtype=torch.uint8)},
        ),
        (
            "int4",
            "pack-quantized",
            integers | {"strategy": "group", "group_size": 32},
            {"weight_packed": words(ROWS, COLUMNS // 8), "weight_scale": scale, "weight_shape": shape},
        ),
        (
            "int4 with zeros",
            "pack-quantized",
            integers | {"strategy": "group", "group_size": 32, "symmetric": False},
            {
                "weight_packed": words(ROWS, COLUMNS // 8),
                "weight_scale": scale,
                "weight_shape": shape,
                "weight_zero_point": words(ROWS // 8, 2),
            },
        ),
        (
            "int8 by rows",
            "pack-quantized",
            integers | {"strategy": "channel", "num_bits": 8},
            {"weight_packed": words(ROWS, COLUMNS // 4), "weight_scale": by_row, "weight_shape": shape},
        ),
        (
            "int8 bytes",
            "int-quantized",
            integers | {"strategy": "channel", "num_bits": 8},
            {"weight": words(ROWS, COLUMNS // 4).view(torch.int8), "weight_scale": by_row},
        ),
        ("fp8 by rows", "float-quantized", fp8 | {"strategy": "channel"}, {"weight": floats, "weight_scale": by_row}),
        (
            "fp8 of a matrix",
            "float-quantized",
            fp8 | {"strategy": "tensor"},
            {"weight": floats, "weight_scale": torch.tensor([0.013], dtype=torch.bfloat16)},
        ),
        (
            "fp8 by blocks",
            "float-quantized",
            fp8 | {"strategy": "block", "block_structure": [16, 32]},
            {"weight": floats, "weight_scale": torch.rand(2, 2).to(torch.bfloat16)},
        ),
    ]
    for name, file_format, way, tensors in cases:
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**way), format=file_format)
        compressor = BaseCompressor.get_value_from_registry(file_format)
        expected = compressor.decompress(dict(tensors), scheme)["weight"]
        entry: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": file_format,
            "quantization_status": "compressed",
        }
        entry["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": way}}
        yield f"compressed-tensors, {name}", entry, tensors, expected


def main() -> None:
    """Write all cases."""
    torch.manual_seed(0)
    cases = [
        {
            "name": name,
            "quantization_config": entry,
            "tensors": {f"{LAYER}.{part}": encoded(value) for part, value in tensors.items()},
            "expected": encoded(expected),
        }
        for of_library in (of_gptqmodel, of_autoawq, of_compressed_tensors)
        for name, entry, tensors, expected in of_library()
    ]
    GOLDEN.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
