"""Models of real shapes on pretended cards: their launches, synchronisations and peaks, beside what was planned."""

from __future__ import annotations

from collections.abc import Iterator

from device.stand_in.machine import Pretended
from device.stand_in.settings import ALL_HOST, Setting

SPARED = {"STAND_IN_MOST_COPIED": "65536"}
WATCHES = ("counts", "shapes")
HOST_GB = 512
COMMAND = "train {config} {changes} memory.micro_batch=1 output={run}"


def shapes(*watches: str) -> Iterator[Setting]:
    """Those that issue 36 names: six, and an adapter over 4 bits."""
    for name, changes, card in (
        ("1b", "memory.optimizer_tier=device memory.gradient_tier=device memory.recompute=selective", "H100"),
        ("1b, gradients on host", "memory.gradient_tier=host memory.recompute=selective", "H100"),
        ("8b, moments int8", "memory.moments=int8 memory.recompute=full", "H100"),
        ("8b, optimizer on host", "memory.optimizer_tier=host memory.recompute=full", "H100"),
        ("8b, optimizer partly on host", "memory.optimizer_tier=host memory.recompute=selective", "H200"),
        ("8b, all on host", ALL_HOST.replace(" memory.micro_batch=1", ""), "RTX5090"),
        ("8b, adapter nf4", "adapter.rank=32 adapter.quantize=nf4 data.max_length=2048", "H100"),
    ):
        on = Pretended(card, host_gb=HOST_GB, watched_by=(*WATCHES, *watches), more=SPARED)
        yield Setting(name, changes, config=name[:2], on=on, command=COMMAND, seconds=600)
