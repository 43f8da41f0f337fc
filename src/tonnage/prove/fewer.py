"""A run on several workers that is stopped, and goes on with half of them."""

from __future__ import annotations

import tonnage
from tonnage.prove.material import rows, tiny_model
from tonnage.prove.proof import Proof, apart
from tonnage.prove.several import STEPS, settings, train

STOP = 3


def prove(proof: Proof) -> None:
    """Losses beside those of one worker to the end."""
    model, data_file, workers = (
        tiny_model(proof.folder / "llama", "llama", num_hidden_layers=4),
        rows(proof.folder),
        proof.gpus,
    )
    alone = train(proof, "one", model, data_file, 1)
    data = {"train": data_file, "max_length": 128, "template": "plain"}
    output = str(proof.folder / "fewer")
    config = {**settings(), "checkpoint": {"every": STOP}}
    with tonnage.start(model, data, output=output, launch={"workers": workers}, **config) as running:
        for step in running:
            if step.step == STOP:
                break
    run, few = running.run, max(1, workers // 2)
    run.resume(launch={"workers": few}, from_step=STOP)  # on fast devices it was not stopped before its end
    case = f"{workers} to {few} workers after step {STOP} of {STEPS}"
    proof.found("fewer", case, apart([step.loss for step in run.steps], alone))
