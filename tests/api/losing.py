"""Runs whose loss is one's own, in a process of their own. Prints a JSON object for ``test_loss``."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import tonnage

MODULE = """
def ours(logprobs, weights):
    return -(logprobs * weights).sum()

def scored(logprobs, weights, score):
    return -(logprobs * weights * score).sum()

def mean(logprobs, weights):
    return -(logprobs * weights).sum() / weights.sum()
"""
CHANGED = MODULE.replace("-(logprobs * weights).sum()\n", "-(weights * logprobs).sum()\n", 1)


def main(told: list[str]) -> None:
    folder = Path(told[0])
    os.chdir(folder)
    (folder / "code").mkdir()
    (folder / "code" / "losses_of_one.py").write_text(MODULE)
    sys.path.append(str(folder / "code"))
    losses: Any = import_module("losses_of_one")
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    rows = [{**row, "score": number % 3 + 0.5} for number, row in enumerate(rows)]
    data = {"train": rows, "validation": 0.2, "max_length": 128, "template": "plain", "carry": ["score"]}
    keys: dict[str, Any] = {"batch": {"sequences": 4}, "steps": 4, "evaluate": {"every": 2}, "precision": "fp32"}
    found: dict[str, Any] = {}

    def figures(run: tonnage.Run) -> list[list[float]]:
        return [
            [step.loss for step in run.steps],
            [step.grad_norm for step in run.steps],
            [record["eval_loss"] for record in run.evaluations],
        ]

    for workers in (1, 2):
        launch = {"workers": workers, "threads": 1}
        for name, loss in (("plain", None), ("ours", losses.ours), ("scored", losses.scored)):
            run = tonnage.train("model", data, output=f"{name}-{workers}", launch=launch, loss=loss, **keys)
            found[f"{name}-{workers}"] = figures(run)
    for axis in ("tensor", "pipeline"):
        launch = {"workers": 2, "threads": 1}
        for name, loss in (("plain", None), ("ours", losses.ours)):
            run = tonnage.train(
                "model", data, output=f"{name}-{axis}", launch=launch, parallel={axis: 2}, loss=loss, **keys
            )
            found[f"{name}-{axis}"] = figures(run)
    found["kept"] = json.loads(Path("ours-1/loss.json").read_text())
    found["none"] = Path("plain-1/loss.json").exists()

    said: dict[str, str] = {}

    def refused(name: str, call: Any, *given: Any, **named: Any) -> None:
        try:
            call(*given, **named)
        except tonnage.UserError as error:
            said[name] = str(error)

    launch = {"workers": 1, "threads": 1}
    refused("mean", tonnage.train, "model", data, output="mean", loss=losses.mean, launch=launch, **keys)
    found["left"] = Path("mean").exists()
    refused("lambda", tonnage.train, "model", data, output="mean", loss=lambda logprobs, weights: 0, launch=launch)
    uncarried = {**data, "carry": []}
    refused("column", tonnage.train, "model", uncarried, output="mean", loss=losses.scored, launch=launch, **keys)
    lacking = {**data, "train": [*rows, {"instruction": "a", "output": "b"}]}
    refused("rows", tonnage.train, "model", lacking, output="mean", loss=losses.scored, launch=launch, **keys)

    running = tonnage.start("model", data, output="stopped", loss=losses.ours, launch=launch, **{**keys, "steps": 300})
    next(running)
    run = running.stop()
    refused("nothing", run.resume)
    refused("other", run.resume, loss=losses.mean)
    refused("plain", tonnage.open_run("plain-1").resume, loss=losses.ours)
    before = run.steps[-1].step
    run = run.resume(loss=losses.ours, steps=before + 2, allow_changes=True)
    found["resumed"] = run.steps[-1].step - before
    (folder / "code" / "losses_of_one.py").write_text(CHANGED)
    refused("source", run.resume, loss=losses.ours)
    found["said"] = said
    print(json.dumps(found))
