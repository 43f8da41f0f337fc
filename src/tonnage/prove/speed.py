"""How fast a 1B shape trains at 4,096 tokens, with and without recompute, and compiled; on a CPU a small shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tonnage.planning.machine import device_named
from tonnage.prove.material import SHAPES, bare_shape, full_rows
from tonnage.prove.memory import DEVICE, hold_peak, parameters_of
from tonnage.prove.proof import Proof
from tonnage.prove.runs import Ran, Spec, take

LENGTH, STEPS = 4096, 8
SMALL_LENGTH, FEW = 512, 4


def prove(proof: Proof) -> None:
    """Every way, its tokens a second and its part of the card's peak."""
    name = "1B" if proof.on_gpu else "small"
    for recompute in ("none", "full"):
        for how in ("off", "on") if proof.on_gpu else ("off",):
            memory = {**DEVICE, "recompute": recompute}
            case = f"recompute {recompute}" + ("" if how == "off" else ", compiled")
            measure(proof, name, case, packs=4, memory=memory, compile=how)


def measure(
    proof: Proof,
    name: str,
    case: str,
    *,
    packs: int,
    lines: Mapping[str, str] | None = None,
    length: int = LENGTH,
    steps: int = STEPS,
    **config: Any,
) -> Ran:
    """Time a shape of ``SHAPES``: tokens a second, and its part of the peak. ``lines`` are the checks that hold it to
    a line, by ``tokens`` and ``mfu``."""
    shape = SHAPES[name]
    if not proof.on_gpu:
        length, steps = SMALL_LENGTH, FEW
    model = bare_shape(proof.folder / name, **shape)
    given = full_rows(proof.folder, packs * steps, length, shape["vocab_size"])
    settings = {"batch": {"sequences": packs}, "precision": "bf16", **config}
    label = f"{name}, {case}"
    spec = Spec(
        label.replace(" ", "-").replace(",", ""), model, given, steps, settings, {"max_length": length}, drawn=True
    )
    ran = take(spec, proof.folder / "runs")
    if ran.refused:
        for check in ("tokens", *(lines or {}).values()):
            proof.not_run(check, label, ran.refused, broke=ran.broke)
        return ran
    said = f"{packs} x {length:,} tokens a step, recompute {ran.layout['recompute']}, {ran.layout['moments']} moments"
    proof.found("tokens", label, ran.tokens_per_second, said)
    proof.found("seconds", label, ran.step_seconds / ran.planned_seconds)
    if proof.on_gpu:
        hold_peak(proof, label, ran)
    share = mfu(proof, shape, length, ran)
    if share is None:
        proof.skip("mfu", label, "the peak of this device is not in the catalogue")
    else:
        proof.found("mfu", label, share)
    if lines:
        proof.found(lines["tokens"], label, ran.tokens_per_second, said)
        if "mfu" in lines and share is not None:
            proof.found(lines["mfu"], label, share)
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
