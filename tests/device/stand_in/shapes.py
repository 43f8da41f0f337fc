"""Models of real shapes on pretended cards: their launches, synchronisations and peaks, beside what was planned."""

from __future__ import annotations

from collections.abc import Iterator

from device.stand_in.machine import Pretended
from device.stand_in.settings import ALL_HOST, ON_DISK, Setting

SPARED = {"STAND_IN_MOST_COPIED": "65536"}
WATCHES = ("counts", "shapes")
HOST_GB = 512
COMMAND = "train {config} {changes} memory.micro_batch=1 output={run}"
OF_THEIR_OWN = "train {config} {changes} memory.recompute=full steps=2 output={run}"
AS_PLANNED = "train {config} {changes} steps=2 output={run}"
AWAY = "memory.optimizer_tier=host memory.gradient_tier=host memory.activation_tier=host"
KEPT = "memory.activation_tier=device"
OUTGROWING = {
    "8b on 24 GB, state on a host of 128 GB": (
        "8b-of-4",
        f"{AWAY} memory.parameter_tier=device memory.recompute_blocks=3 memory.micro_batch=4",
        "24 GB",
        128,
    ),
    "32b on 24 GB, all on a host of 512 GB": (
        "32b-of-4",
        f"{AWAY} memory.parameter_tier=host memory.moments=int8 memory.recompute_blocks=2 memory.micro_batch=8",
        "24 GB",
        512,
    ),
    "13b on 24 GB, state and parameters on disk": (
        "13b-of-4",
        f"{KEPT} memory.parameter_tier=disk memory.optimizer_tier=disk memory.gradient_tier=host memory.micro_batch=8",
        "24 GB",
        64,
    ),
    "13b on 24 GB, state on disk": (
        "13b-of-4",
        f"{KEPT} memory.parameter_tier=host memory.optimizer_tier=disk memory.gradient_tier=host memory.micro_batch=2",
        "24 GB",
        128,
    ),
    "13b on 24 GB, all on a host of 256 GB": (
        "13b-of-4",
        f"{AWAY} memory.parameter_tier=host memory.recompute_blocks=1 memory.micro_batch=8",
        "24 GB",
        256,
    ),
    "70b on 80 GB, all on a host of 1 TB": (
        "70b-of-4",
        f"{AWAY} memory.parameter_tier=host memory.moments=int8 memory.recompute_blocks=1 memory.micro_batch=8",
        "H100",
        1000,
    ),
    "70b on 80 GB, all on disk": (
        "70b-of-4",
        f"{KEPT} memory.parameter_tier=disk memory.optimizer_tier=disk memory.gradient_tier=disk memory.micro_batch=8",
        "H100",
        128,
    ),
    "dolly in fp16 on 16 GB": (
        "dolly-of-32",
        f"{AWAY} precision=fp16 memory.parameter_tier=device memory.micro_batch=8",
        "T4",
        128,
    ),
    "1T on a DGX-2, all on disk": (
        "1t-of-4",
        f"{ON_DISK} memory.parameter_tier=disk memory.activation_tier=host memory.zero=3 memory.micro_batch=2 "
        "precision=fp16 launch.workers=16 batch.sequences=64",
        "DGX-2",
        1500,
    ),
}
"""What a plan chose for models that have no room on a card (``docs/zero.md``), with as many blocks as ``NAME-of-N``
says. A plan recomputes all blocks but a few; as many are kept here, or all but one. Builds of torch have no kernels for
V100: a T4's 16 GB stand for theirs, and a DGX-2's are cards of 32 GB that claim a T4's capability. 1T is 550 blocks of
12,288, which are planned for that node with whole weights; 128 of 25,600 are refused there."""
LONG = {
    "8b, 500,000 tokens on 80 GB": ("8b-500k", "", 1, 512),
    "8b, 1,000,000 tokens on eight of 80 GB": ("8b-1m", "launch.workers=8 parallel.context=8 memory.zero=3", 8, 2000),
}
"""All weights, one document a step: what rests where is the plan's choice."""
KINDS: dict[str, tuple[str, int, dict[str, str]]] = {
    "24 GB": ("RTX4090", 1, {}),
    "H100": ("H100", 1, {}),
    "T4": ("T4", 1, {}),
    "DGX-2": ("V100", 16, {"STAND_IN_CAPABILITY": "75"}),
}
"""Cards, how many, and what else is said of them."""


def shapes(*watches: str) -> Iterator[Setting]:
    """Six of all weights, and an adapter over 4 bits; one on two cards; then models that outgrow their card."""
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
    sharded = "launch.workers=2 memory.zero=3 memory.recompute=full memory.moments=int8"
    for name, changes, config in (
        ("1b, ZeRO 3 on 2", "", "1b"),
        ("1b, ZeRO 2 on 2", "memory.zero=2", "1b"),
        ("70b of 4 blocks, ZeRO 3 on 2", "", "70b-of-4"),  # most is held where two are gathered ahead
    ):
        on = Pretended("H100", devices=2, host_gb=HOST_GB, watched_by=(*WATCHES, *watches), more=SPARED)
        yield Setting(name, f"{sharded} {changes}", config=config, on=on, command=COMMAND, seconds=600)
    for name, (config, changes, devices, host_gb) in LONG.items():
        on = Pretended("H100", devices, host_gb, watched_by=(*WATCHES, *watches), more=SPARED)
        yield Setting(name, changes, config=config, on=on, command=AS_PLANNED, seconds=1200)
    for name, (config, changes, card, host_gb) in OUTGROWING.items():
        kind, devices, more = KINDS[card]
        on = Pretended(kind, devices, host_gb, watched_by=(*WATCHES, *watches), more=SPARED | more)
        yield Setting(name, changes, config=config, on=on, command=OF_THEIR_OWN, seconds=600)
