"""A run on several workers that is stopped, and goes on with half of them."""

from __future__ import annotations

import tonnage
from tonnage.prove.material import rows, tiny_model
from tonnage.prove.proof import Proof, apart
from tonnage.prove.several import STEPS, settings, train

STOP = 3


def prove(proof: Proof) -> None:
    """Losses beside those of one worker to the end."""
    model, given, workers = (
        tiny_model(proof.folder / "llama", "llama", num_hidden_layers=4),
        rows(proof.folder),
        proof.gpus,
    )
    one = train(proof, "one", model, given, 1)
    data = {"train": given, "max_length": 128, "template": "plain"}
    output = str(proof.folder / "fewer")
    with tonnage.start(model, data, output=output, launch={"workers": workers}, **settings()) as running:
        for step in running:
            if step.step == STOP:
                break
    run, few = running.run, max(1, workers // 2)
    reached = run.steps[-1].step
    if reached < STEPS:
        run.resume(launch={"workers": few})
    proof.found("fewer", f"{workers} to {few} workers after step {reached}", apart([s.loss for s in run.steps], one))
