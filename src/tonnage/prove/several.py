"""Several devices beside one: ZeRO 0 to 3, tensor and pipeline, also with states and parameters on their hosts or on
disk, and hybrid, by ``tonnage.train``.

On a machine without GPUs the workers are processes that talk through gloo.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import tonnage
from tonnage.errors import TonnageError
from tonnage.prove.material import rows, tiny_model
from tonnage.prove.proof import Proof, apart

STEPS = 6


def prove(proof: Proof) -> None:
    """Each way to divide a model, its losses beside those of one worker."""
    model, file, workers = (
        tiny_model(proof.folder / "llama", "llama", num_hidden_layers=4),
        rows(proof.folder),
        proof.gpus,
    )
    alone = train(proof, "one", model, file, 1)
    ways: dict[str, dict[str, Any]] = {f"ZeRO {stage}": {"memory": {"zero": stage}} for stage in (3, 2, 1, 0)}
    for tier in ("host", "disk"):
        states = {"optimizer_tier": tier, "gradient_tier": tier}
        ways[f"ZeRO 3, all on {tier}"] = {"memory": {"zero": 3, "parameter_tier": tier, **states}}
        ways[f"ZeRO 1, states on {tier}"] = {"memory": {"zero": 1, **states}}
    if workers % 2 == 0:
        ways["tensor 2"] = {"parallel": {"tensor": 2}}
        ways["pipeline 2, 1f1b"] = {"parallel": {"pipeline": 2}}
        ways["pipeline 2, zero bubble"] = {"parallel": {"pipeline": 2, "schedule": "zero_bubble"}}
        for tier, axis in product(("host", "disk"), ("tensor", "pipeline")):
            away = {"zero": 3, "optimizer_tier": tier, "gradient_tier": tier, "parameter_tier": tier}
            ways[f"{axis} 2, all on {tier}"] = {"parallel": {axis: 2}, "memory": away}
    if workers >= 4 and workers % 2 == 0:
        ways["hybrid, 2 replicas"] = {"parallel": {"replicate": 2}, "memory": {"zero": 3}}
    for name, config in list(ways.items())[: 2 if proof.brief else None]:
        case = f"{name}, {workers} workers"
        try:
            losses = train(proof, name.replace(" ", "-").replace(",", ""), model, file, workers, **config)
        except TonnageError as error:
            proof.found("several, fp32", case, float("inf"), str(error)[-400:])
            continue
        proof.found("several, fp32", case, apart(losses, alone))


def train(proof: Proof, name: str, model: str, file: str, workers: int, **config: Any) -> list[float]:
    """The losses of a run."""
    memory = {"micro_batch": 1, **config.pop("memory", {})}
    run = tonnage.train(
        model,
        {"train": file, "max_length": 128, "template": "plain"},
        output=str(proof.folder / name),
        memory=memory,
        launch={"workers": workers},
        **{**settings(), **config},
    )
    return [step.loss for step in run.steps]


def settings() -> dict[str, Any]:
    """What all runs have in common."""
    return {
        "precision": "fp32",
        "steps": STEPS,
        "batch": {"sequences": 8},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 0},
    }
