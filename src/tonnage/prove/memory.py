"""Planned peaks beside the allocator's, of 22 ways to train a shape that this device holds: with all on the device, and
with less of it (``memory elsewhere``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tonnage.prove.machine import free_bytes
from tonnage.prove.material import SHAPES, bare_shape, full_rows, resting
from tonnage.prove.proof import Proof
from tonnage.prove.runs import Ran, Spec, take

LENGTH = 2048
STEPS = 3
BYTES_A_PARAMETER = 16
"""Room for weights, gradients and fp32 states, and as much again for what is computed."""
DEVICE = resting("device", "optimizer", "gradient", "parameter")


@dataclass(frozen=True)
class MeasuredWay:
    """To train a shape: a row of the tables of pieces that measure."""

    case: str
    config: Mapping[str, Any]
    packs: int = 1
    """Of a step."""
    shape: str = "1B"
    """Of ``material.SHAPES``."""
    steps: int = STEPS
    lines: Mapping[str, str] = field(default_factory=dict)
    """The checks that hold it to a line, by ``tokens`` and ``mfu``."""
    beside: str = ""
    """The case of which its tokens a second are told as a share."""


def _on_device(**memory: Any) -> dict[str, Any]:
    return {"memory": {**DEVICE, "micro_batch": 1, **memory}}


def _away(**tiers: Any) -> dict[str, Any]:
    fixed = {"parameter_tier": "device", "recompute": "full", "micro_batch": 1}
    return {"memory": {**resting("host", "optimizer", "gradient"), **fixed, **tiers}}


WAYS: Mapping[str, tuple[MeasuredWay, ...]] = {
    "memory": (
        *(
            MeasuredWay(
                f"{moments} moments, recompute {recompute}, micro-batch {size}",
                _on_device(moments=moments, recompute=recompute, micro_batch=size),
                size,
            )
            for moments in ("fp32", "int8")
            for recompute in ("none", "selective", "full")
            for size in (1, 2)
        ),
        MeasuredWay("bf16 moments, four micro-batches", _on_device(moments="bf16", recompute="full"), 4),
    ),
    "memory elsewhere": (
        MeasuredWay("optimizer on the host", _away(gradient_tier="device", optimizer_resident=0)),
        MeasuredWay("gradients on the host too", _away()),
        MeasuredWay("inputs of blocks too", _away(activation_tier="host")),
        MeasuredWay("parameters on the host too", _away(parameter_tier="host")),
        MeasuredWay("one block recomputed", _on_device(recompute="full", recompute_blocks=1)),
        *(
            MeasuredWay(
                case, {"adapter": {"rank": 32, **adapter}, **_on_device(recompute=recompute, micro_batch=size)}, size
            )
            for case, adapter, recompute, size in (
                ("LoRA", {}, "none", 1),
                ("LoRA, micro-batch 2, recompute full", {}, "full", 2),
                ("LoRA over nf4", {"quantize": "nf4"}, "none", 1),
                ("LoRA over int8", {"quantize": "int8"}, "none", 1),
            )
        ),
    ),
}


def prove(proof: Proof) -> None:
    """Three steps in each way of the piece."""
    name, shape = sized(proof)
    proof.more["shape"] = {"name": name, **shape}
    for way in WAYS[proof.piece][: 2 if proof.brief else None]:
        ran = take_full_packs(proof, replace(way, config={"compile": "off", **way.config}), name, shape, LENGTH)
        if ran.refused:
            proof.not_run("peak", way.case, ran.refused, broke=ran.broke)
            continue
        hold_peak(proof, way.case, ran)
        proof.more[way.case] = ran.told


def take_full_packs(proof: Proof, way: MeasuredWay, name: str, shape: Mapping[str, Any], length: int) -> Ran:
    """Take the steps of a way over packs of one document each, with weights that are drawn."""
    model = bare_shape(proof.folder / "shape", **shape)
    data = full_rows(proof.folder, way.packs * way.steps, length, shape["vocab_size"])
    directory = f"{name}, {way.case}".replace(" ", "-").replace(",", "")
    settings = {"batch": {"sequences": way.packs}, **way.config}
    spec = Spec(directory, model, data, way.steps, settings, {"max_length": length}, drawn=True)
    return take(spec, proof.folder / "runs")


def hold_peak(proof: Proof, case: str, ran: Ran) -> None:
    """Hold the allocator's peak of a run against the planned one."""
    planned, measured = ran.planned_bytes / 1e9, ran.peak_bytes / 1e9
    proof.found("peak", case, measured / planned, f"planned {planned:.3f} GB, measured {measured:.3f} GB")


def sized(proof: Proof) -> tuple[str, dict[str, Any]]:
    """The 1B shape, or as many of its blocks as fit."""
    shape, free = dict(SHAPES["1B"]), free_bytes(proof.device)
    while shape["num_hidden_layers"] > 2 and 2 * BYTES_A_PARAMETER * parameters_of(shape) > free:
        shape["num_hidden_layers"] -= 1
    blocks = shape["num_hidden_layers"]
    return "1B" if blocks == SHAPES["1B"]["num_hidden_layers"] else f"1B, {blocks} blocks of it", shape


def parameters_of(shape: Mapping[str, Any]) -> int:
    """Of a Llama of some sizes, norms left out."""
    hidden, wide, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    kept = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    block = 2 * hidden * hidden + 2 * hidden * kept + 3 * hidden * wide
    heads = vocabulary * hidden * (1 if shape.get("tie_word_embeddings") else 2)
    return int(shape["num_hidden_layers"] * block + heads)
