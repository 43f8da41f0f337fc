"""Several devices beside one: ZeRO 0 to 3, tensor and pipeline, also with states and parameters on their hosts or on
disk, and hybrid; and (``fewer``) a run that is stopped, and goes on with half of its workers. By ``tonnage.train``.

On a machine without GPUs the workers are processes that talk through gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import tonnage
from tonnage.errors import TonnageError
from tonnage.prove.material import data_of, resting, tiny_llama
from tonnage.prove.proof import Proof, apart
from tonnage.prove.resume import stopped_after

STEPS, STOP = 6, 3
STATES = ("optimizer", "gradient")
ALL = (*STATES, "parameter")
SETTINGS: Mapping[str, Any] = {
    "precision": "fp32",
    "steps": STEPS,
    "batch": {"sequences": 8},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"every": 0},
}
"""What all runs have in common."""


def prove(proof: Proof) -> None:
    """Each way to divide a model, or a run with fewer workers, its losses beside those of one worker to the end."""
    model, file = tiny_llama(proof.folder, num_hidden_layers=4)
    alone = _train(proof, "one", model, file, 1)
    if proof.piece == "fewer":
        _go_on_with_fewer(proof, model, file, alone)
        return
    for name, config in list(_ways(proof.gpus).items())[: 2 if proof.brief else None]:
        case = f"{name}, {proof.gpus} workers"
        try:
            losses = _train(proof, name.replace(" ", "-").replace(",", ""), model, file, proof.gpus, **config)
        except TonnageError as error:
            proof.found("several, fp32", case, float("inf"), str(error)[-400:])
            continue
        proof.found("several, fp32", case, apart(losses, alone))


def _ways(workers: int) -> dict[str, dict[str, Any]]:
    ways: dict[str, dict[str, Any]] = {f"ZeRO {stage}": {"memory": {"zero": stage}} for stage in (3, 2, 1, 0)}
    for tier in ("host", "disk"):
        ways[f"ZeRO 3, all on {tier}"] = {"memory": resting(tier, *ALL, zero=3)}
        ways[f"ZeRO 1, states on {tier}"] = {"memory": resting(tier, *STATES, zero=1)}
    if workers % 2 == 0:
        ways["tensor 2"] = {"parallel": {"tensor": 2}}
        ways["context 2"] = {"parallel": {"context": 2}}
        ways["pipeline 2, 1f1b"] = {"parallel": {"pipeline": 2}}
        ways["pipeline 2, zero bubble"] = {"parallel": {"pipeline": 2, "schedule": "zero_bubble"}}
        for tier, axis in product(("host", "disk"), ("tensor", "pipeline")):
            ways[f"{axis} 2, all on {tier}"] = {"parallel": {axis: 2}, "memory": resting(tier, *ALL, zero=3)}
    if workers >= 4 and workers % 2 == 0:
        ways["hybrid, 2 replicas"] = {"parallel": {"replicate": 2}, "memory": {"zero": 3}}
    return ways


def _train(proof: Proof, name: str, model: str, file: str, workers: int, **config: Any) -> list[float]:
    config["memory"] = {"micro_batch": 1, **config.get("memory", {})}
    settings: dict[str, Any] = {**SETTINGS, "launch": {"workers": workers}, **config}
    run = tonnage.train(model, data_of(file), output=str(proof.folder / name), **settings)
    return [step.loss for step in run.steps]


def _go_on_with_fewer(proof: Proof, model: str, file: str, alone: list[float]) -> None:
    workers, few = proof.gpus, max(1, proof.gpus // 2)
    settings: dict[str, Any] = {**SETTINGS, "launch": {"workers": workers}, "checkpoint": {"every": STOP}}
    run = stopped_after(STOP, model, data_of(file), output=str(proof.folder / "fewer"), **settings)
    run.resume(launch={"workers": few}, from_step=STOP)  # on fast devices it was not stopped before its end
    case = f"{workers} to {few} workers after step {STOP} of {STEPS}"
    proof.found("fewer", case, apart([step.loss for step in run.steps], alone))
