"""How fast shapes train at 4,096 tokens, by piece: a 1B shape with and without recompute, and compiled (on a CPU a
small one); an 8B shape with all its weights, by LoRA, over 4 bits, and in less of the card than its weights take; and
what it costs to keep states in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tonnage.planning.machine import device_named
from tonnage.prove.material import SHAPES, resting
from tonnage.prove.memory import DEVICE, MeasuredWay, hold_peak, parameters_of, take_full_packs
from tonnage.prove.proof import Proof
from tonnage.prove.runs import Ran

LENGTH = 4096
SMALL_LENGTH, FEW = 512, 4
"""Tokens and steps on a CPU."""


def _states(packs: int) -> tuple[MeasuredWay, ...]:
    """The 1B shape resident, its optimizer on the host, its gradients too, and all of it."""
    tokens = f"{packs * LENGTH // 1024}k tokens a step"
    tiers: Mapping[str, Mapping[str, Any]] = {
        "resident": DEVICE,
        "optimizer on the host": resting("host", "optimizer", gradient_tier="device", optimizer_resident=0),
        "gradients on the host too": resting("host", "optimizer", "gradient"),
        "all on the host": resting("host", "optimizer", "gradient", "parameter"),
    }
    return tuple(
        MeasuredWay(
            f"{tokens}, {case}",
            {"memory": {"recompute": "full", "micro_batch": 2, "parameter_tier": "device", **memory}},
            packs,
            steps=6,
            beside="" if case == "resident" else f"{tokens}, resident",
        )
        for case, memory in tiers.items()
    )


COMPILED = {"compile": "on"}
WAYS: Mapping[str, tuple[MeasuredWay, ...]] = {
    "speed": tuple(
        MeasuredWay(case, {"memory": {**DEVICE, "recompute": recompute}, "compile": how}, 4, steps=8)
        for recompute in ("none", "full")
        for case, how in ((f"recompute {recompute}", "off"), (f"recompute {recompute}, compiled", "on"))
    ),
    "speed 8B": (
        MeasuredWay(
            "all weights, as planned", COMPILED, 4, "8B", 7, lines={"tokens": "8B full, tokens", "mfu": "8B full, mfu"}
        ),
        MeasuredWay("all weights", {"memory": {"recompute": "full"}, **COMPILED}, 4, "8B", 5),
    ),
    "speed 8B adapters": (
        MeasuredWay("LoRA", {"adapter": {"rank": 32}, **COMPILED}, 4, "8B", 7, lines={"tokens": "8B LoRA, tokens"}),
        MeasuredWay("LoRA over nf4", {"adapter": {"rank": 32, "quantize": "nf4"}, **COMPILED}, 4, "8B", 6),
    ),
    "host tiers": (*_states(2), *_states(4), *_states(8)),
    "small card": tuple(
        MeasuredWay(f"all weights, in {budget}", {"memory": {"budget": {"device": budget}}}, 4, "8B", 5)
        for budget in ("24GB", "10GB")  # with weights on the device, and with those of a few blocks at a time
    ),
}
"""By piece. What does not stay on the device rests in the host's memory, as the plan says."""
NUM_IN_BRIEF = {"speed 8B": 1, "host tiers": 4, "small card": 1}


def prove(proof: Proof) -> None:
    """Every way of the piece; on a CPU none that is compiled."""
    ran = dict[str, Ran]()
    for way in WAYS[proof.piece][: NUM_IN_BRIEF.get(proof.piece) if proof.brief else None]:
        if not proof.on_gpu and way.config.get("compile") == "on":
            continue
        ran[way.case] = timed = measure(proof, way)
        if not way.beside:
            continue
        if refused := ran[way.beside].refused or timed.refused:
            proof.skip("host tiers", way.case, refused)
        else:
            proof.found("host tiers", way.case, timed.tokens_per_second / ran[way.beside].tokens_per_second)


def measure(proof: Proof, way: MeasuredWay) -> Ran:
    """Time a shape, on a CPU the small one: tokens a second, and its part of the peak."""
    name, length, steps = (way.shape, LENGTH, way.steps) if proof.on_gpu else ("small", SMALL_LENGTH, FEW)
    shape, label = SHAPES[name], f"{name}, {way.case}"
    way = replace(way, steps=steps, config={"precision": "bf16", **way.config})
    ran = take_full_packs(proof, way, name, shape, length)
    if ran.refused:
        for check in ("tokens", *way.lines.values()):
            proof.not_run(check, label, ran.refused, broke=ran.broke)
        return ran
    states = f"recompute {ran.layout['recompute']}, {ran.layout['moments']} moments"
    laid_out = f"{way.packs} x {length:,} tokens a step, {states}"
    proof.found("tokens", label, ran.tokens_per_second, laid_out)
    proof.found("seconds", label, ran.step_seconds / ran.planned_seconds)
    if proof.on_gpu:
        hold_peak(proof, label, ran)
    share = mfu(proof, shape, length, ran)
    if share is None:
        proof.skip("mfu", label, "the peak of this device is not in the catalogue")
    else:
        proof.found("mfu", label, share)
    if way.lines:
        proof.found(way.lines["tokens"], label, ran.tokens_per_second, laid_out)
        if "mfu" in way.lines and share is not None:
            proof.found(way.lines["mfu"], label, share)
    proof.more[label] = ran.told
    return ran


def mfu(proof: Proof, shape: Mapping[str, Any], length: int, ran: Ran) -> float | None:
    """Percent of the card's dense bf16 peak that the model needs; None for a device that the catalogue lacks.

    Operations are counted as PaLM and torchtitan count them: six a parameter and token, and 12 blocks x width x length
    for attention, of which a causal one needs half.
    """
    if not proof.on_gpu:
        return None
    known = device_named(proof.card, torch.cuda.get_device_properties(proof.device).total_memory)
    if known is None:
        return None
    of_attention = 12 * shape["num_hidden_layers"] * shape["hidden_size"] * length
    flops = 6 * parameters_of(shape) + of_attention
    return float(100 * flops * ran.tokens_per_second / known.flops["bf16"])
