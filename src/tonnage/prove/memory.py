"""Planned peaks beside the allocator's, of 22 ways to train a shape that this device holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tonnage.prove.machine import free_bytes
from tonnage.prove.material import SHAPES, bare_shape, full_rows
from tonnage.prove.proof import Proof
from tonnage.prove.runs import Ran, Spec, take

LENGTH = 2048
STEPS = 3
BYTES_A_PARAMETER = 16
"""Room for weights, gradients and fp32 states, and as much again for what is computed."""
DEVICE = {"optimizer_tier": "device", "gradient_tier": "device", "parameter_tier": "device"}


def prove(proof: Proof) -> None:
    """Each way that has all on the device, three steps."""
    _hold(proof, _resident())


def elsewhere(proof: Proof) -> None:
    """The others."""
    _hold(proof, _others())


def _hold(proof: Proof, chosen: Iterator[Way]) -> None:
    name, shape = sized(proof)
    model = bare_shape(proof.folder / "shape", **shape)
    proof.more["shape"] = {"name": name, **shape}
    ways = list(chosen)
    for number, (case, packs, config) in enumerate(ways[: 2 if proof.brief else None]):
        given = full_rows(proof.folder, packs * STEPS, LENGTH, shape["vocab_size"])
        settings = {"batch": {"sequences": packs}, "compile": "off", **config}
        spec = Spec(f"way-{number}", model, given, STEPS, settings, {"max_length": LENGTH}, drawn=True)
        ran = take(spec, proof.folder / "runs")
        if ran.refused:
            proof.not_run("peak", case, ran.refused, broke=ran.broke)
            continue
        hold_peak(proof, case, ran)
        proof.more[case] = ran.told


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


Way = tuple[str, int, dict[str, Any]]
"""What is told of a way, packs of a step, keys of the config."""


def _resident() -> Iterator[Way]:
    for moments in ("fp32", "int8"):
        for recompute in ("none", "selective", "full"):
            for size in (1, 2):
                memory = {**DEVICE, "moments": moments, "recompute": recompute, "micro_batch": size}
                yield f"{moments} moments, recompute {recompute}, micro-batch {size}", size, {"memory": memory}
    fixed = {**DEVICE, "moments": "bf16", "recompute": "full", "micro_batch": 1}
    yield "bf16 moments, four micro-batches", 4, {"memory": fixed}


def _others() -> Iterator[Way]:
    host = {"optimizer_tier": "host", "recompute": "full", "micro_batch": 1, "parameter_tier": "device"}
    yield "optimizer on the host", 1, {"memory": {**host, "gradient_tier": "device", "optimizer_resident": 0}}
    yield "gradients on the host too", 1, {"memory": {**host, "gradient_tier": "host"}}
    yield "inputs of blocks too", 1, {"memory": {**host, "gradient_tier": "host", "activation_tier": "host"}}
    away = {**host, "gradient_tier": "host", "parameter_tier": "host"}
    yield "parameters on the host too", 1, {"memory": away}
    some = {**DEVICE, "recompute": "full", "recompute_blocks": 1, "micro_batch": 1}
    yield "one block recomputed", 1, {"memory": some}
    fixed = {**DEVICE, "recompute": "none", "micro_batch": 1}
    yield "LoRA", 1, {"adapter": {"rank": 32}, "memory": fixed}
    yield (
        "LoRA, micro-batch 2, recompute full",
        2,
        {
            "adapter": {"rank": 32},
            "memory": {**fixed, "recompute": "full", "micro_batch": 2},
        },
    )
    yield "LoRA over nf4", 1, {"adapter": {"rank": 32, "quantize": "nf4"}, "memory": fixed}
    yield "LoRA over int8", 1, {"adapter": {"rank": 32, "quantize": "int8"}, "memory": fixed}
