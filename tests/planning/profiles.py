"""A small model, its data and a machine, as numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.config import Config
from tonnage.planning.layout import Layout
from tonnage.planning.machine import Machine, parse_hardware
from tonnage.planning.plan import DataProfile
from tonnage.planning.profile import BlockCost, Envelope, HeadCost, Line, ModelProfile, OutsideCost

ZERO = Line(0, 0)


def block(saved: float, peak: float, work: float) -> BlockCost:
    """Bytes a token saved and at the peak, and how many times the forward pass is run."""
    return BlockCost(
        saved=Line(0, saved),
        forward_peak=Envelope((Line(0, peak),)),
        backward_peak=Envelope((Line(400_000, peak),)),
        backward_bare_peak=Envelope((Line(100_000, peak),)),
        evaluation_peak=Envelope((Line(0, peak / 2),)),
        forward_flops=Line(0, 400_000),
        backward_flops=Line(0, 800_000 + 400_000 * (work - 1)),
        forward_traffic=Line(0, 1000),
        backward_traffic=Line(0, 2000 + 1000 * (work - 1)),
        forward_made=Line(0, 400),
        backward_made=Line(0, 800 + 400 * (work - 1)),
    )


HEAD = HeadCost(
    peak=Line(200_000, 10_000),
    evaluation_peak=Line(0, 4000),
    flops=Line(0, 384_000),
    traffic=Line(0, 40_000),
    made=Line(0, 15_000),
)
MODEL = ModelProfile(
    model_type="llama",
    num_parameters=1_000_000,
    embedding_parameters=64_000,
    outside_parameters=200_000,
    num_blocks=4,
    block_parameters=200_000,
    hidden_size=64,
    attention_size=64,
    vocab_size=1000,
    blocks={"none": block(5000, 6000, 1), "selective": block(2500, 6000, 1.2), "full": block(128, 7000, 2)},
    outside=OutsideCost(Line(0, 300), Line(0, 400), HEAD, HEAD, Line(0, 200)),
)
DATA = DataProfile(
    "/train",
    None,
    num_packs=100,
    num_tokens=100 * 900,
    supervised_tokens=30 * 900,
    max_length=1000,
    document_tokens=200.0,
)
MACHINE: Machine = parse_hardware("cpu:2c:24GB")


def machine(memory_bytes: float) -> Machine:
    """The machine with another memory."""
    return replace(MACHINE, device_bytes=round(memory_bytes))


def config(**changes: Any) -> Config:
    """A config for the data and one worker, with other keys."""
    fields: dict[str, Any] = {
        "model": "m",
        "data": {"train": "rows.jsonl", "max_length": 1000},
        "batch": {"tokens": 8500},
        "launch": {"workers": 1},
    }
    return Config.model_validate(fields | changes)


def layout(**changes: Any) -> Layout:
    """Two workers with ZeRO 1 and two micro-batches, unless changed."""
    settings: dict[str, Any] = {"workers": 2, "replicate": 1, "zero": 1, "recompute": "none", "precision": "bf16"}
    settings |= {"moments": "fp32", "optimizer_tier": "device", "gradient_tier": "device", "parameter_tier": "device"}
    settings |= {"micro_batch": 1, "micro_batches": 2, "row_tokens": 1000, "row_supervised": 300}
    return Layout(**settings | changes)
