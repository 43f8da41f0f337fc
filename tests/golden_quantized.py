"""Twenty weights, ten as they come and ten that are meant to trip a quantiser, and what bitsandbytes makes of them.

    pip install bitsandbytes==0.50.2 && python tests/golden_quantized.py    writes golden_quantized.json beside this

bitsandbytes is no dependency of the tests: they compare digests. The weights are made of whole numbers, so that they
are the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

GOLDEN = Path(__file__).with_suffix(".json")
FORMATS = ("nf4", "nf4-double", "int8")
LOW_BOUNDS = (
    -0.8480964004993439,
    -0.6106329262256622,
    -0.33967943489551544,
    -0.13791173323988914,
    -0.045525018125772476,
)
HIGH_BOUNDS = (0.03979014977812767, 0.2035212516784668, 0.3893125355243683, 0.5016634166240692, 0.8614784181118011)
"""Halfway between two neighbouring levels of nf4."""


def bell(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers about as weights have them: sums of four whole numbers."""
    draw = torch.Generator().manual_seed(seed)
    return ((torch.randint(0, 4096, (4, *shape), generator=draw).sum(0) - 8190).float() / 2**13).to(dtype)


def beside(numbers: Tensor) -> Tensor:
    """Numbers, and the next ones below and above."""
    ends = torch.tensor(2.0, dtype=numbers.dtype)
    return torch.cat([numbers, numbers.nextafter(ends), numbers.nextafter(-ends)])


def weights() -> dict[str, Tensor]:
    """All twenty, by name."""
    half, brain = torch.float16, torch.bfloat16
    sizes = [
        ((64, 64), torch.float32),
        ((128, 96), brain),
        ((33, 70), half),
        ((7, 129), torch.float32),
        ((576, 192), brain),
        ((256, 576), half),
        ((48, 1000), brain),
        ((3, 40, 32), torch.float32),
        ((100, 64), half),
        ((17, 63), brain),
    ]
    found = {
        f"random {'x'.join(map(str, size))} {dtype}": bell(size, at, dtype) for at, (size, dtype) in enumerate(sizes)
    }
    outliers = bell((40, 128), 20)
    outliers.view(-1)[::97] *= 2**12
    tiny = bell((16, 64), 21) * 2.0 ** -torch.arange(120, 136)[:, None]
    extreme = bell((6, 80), 22)
    extreme[0, :3] = torch.tensor([3.4028235e38, -3.4028235e38, 1e38])
    lonely = torch.zeros(30, 64)
    lonely.view(-1)[5::67] = torch.tensor([-1.0, 0.5, -0.0])[torch.arange(len(lonely.view(-1)[5::67])) % 3]
    ties = torch.ones(8, 64)
    ties[:, 1:31] = beside(torch.tensor(LOW_BOUNDS + HIGH_BOUNDS)) * torch.tensor([1, -1, 1, 1, -1, 1, 1, 1.0])[:, None]
    ties *= 2.0 ** torch.arange(-3, 5)[:, None]
    largest = torch.tensor([0.003])  # of a shorter block; quotients and products with its inverse have other codes
    shorter = torch.cat([largest, beside(torch.tensor(LOW_BOUNDS + HIGH_BOUNDS) * largest)])
    halves = torch.arange(-127, 128).float() / 2 + 0.25
    rows = torch.stack([torch.cat([torch.tensor([127.0]), scale * halves]) for scale in (1.0, 1.5, -1.0, 2.0)])
    found |= {
        "zeros, the last block shorter": torch.zeros(5, 13),
        "all equal": torch.full((16, 96), -0.3, dtype=brain),
        "outliers": outliers,
        "denormals": torch.arange(-300, 300).view(6, 100).int().abs().view(torch.float32) * bell((6, 100), 23).sign(),
        "about the smallest normal number": tiny,
        "extremes": extreme,
        "extremes of fp16": torch.tensor([[65504.0, -65504.0, 6e-8, 1.0] * 17], dtype=half),
        "one number a block": lonely,
        "between two levels of nf4": torch.cat([ties.flatten(), shorter])[None],
        "between two whole numbers": rows,
    }
    return found


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of the bytes of all tensors, by name."""
    made = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        made.update(name.encode() + str(tensor.dtype).encode() + tensor.contiguous().flatten().numpy().tobytes())
    return made.hexdigest()


def theirs(weight: Tensor, form: str) -> dict[str, Tensor]:
    """What bitsandbytes makes of a weight, by our names."""
    from bitsandbytes import functional

    if form == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.reshape(-1, weight.shape[-1]))
        return {"codes": codes, "scales": scales}
    double = form == "nf4-double"
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
    found = {"codes": codes, "scales": state.absmax}
    return found | ({"outer": state.state2.absmax, "mean": state.offset} if double else {})


def main() -> None:
    """Write the digests of what bitsandbytes makes of all weights."""
    found = {name: {form: digest(theirs(weight, form)) for form in FORMATS} for name, weight in weights().items()}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
