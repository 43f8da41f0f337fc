"""``tonnage.train`` as people call it: stopped and gone on with, its answers, and a Session's steps beside its own."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tonnage
from tonnage.prove.material import data_of, tiny_llama
from tonnage.prove.proof import NOTHING, Proof, unequal
from tonnage.prove.tiers import RESIDENT

STEPS, STOP = 8, 4
CONFIG: Mapping[str, Any] = {
    "precision": "fp32",
    "batch": {"sequences": 4},
    "optimizer": {"lr": 1e-3},
    "launch": {"workers": 1, "threads": 1},
    "memory": dict(RESIDENT),  # or what was learnt from one run might cut up the next one's steps in another way
    "deterministic": True,
    "steps": STEPS,
    "checkpoint": {"every": STOP},
}
QUESTIONS = ("the quick brown fox =", "seven wizards brew strong tea =", "old copper kettles =", "a lazy dog =")


def prove(proof: Proof) -> None:
    """A run, the same run stopped after some steps and gone on with, and by hand."""
    model, file = tiny_llama(proof.folder)
    data = data_of(file)
    whole = tonnage.train(model, data, output=str(proof.folder / "whole"), **CONFIG)
    stopped = stopped_after(STOP, model, data, output=str(proof.folder / "stopped"), **CONFIG)
    reached = stopped.steps[-1].step
    stopped.resume(from_step=STOP)  # on a fast device it was not stopped before its end
    case = f"stopped after step {reached} of {STEPS}, gone on with after step {STOP}"
    proof.found("resumed", case, unequal(_steps(stopped), _steps(whole)))
    proof.found("resumed, export", "weights", _differing(stopped.export, whole.export))
    if not proof.brief:
        _by_hand(proof, model, data, whole)
        _answers(proof, whole)


def stopped_after(step: int, model: str, data: Mapping[str, Any], **config: Any) -> tonnage.Run:
    """Start a run, and stop it once it has taken a step."""
    with tonnage.start(model, data, **config) as running:
        for taken in running:
            if taken.step == step:
                break
    return running.run


def _steps(run: tonnage.Run) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in run.steps]


def _differing(one: Path, other: Path) -> int:
    """Bytes of files of weights that are not the same in both, roughly: all of a file that is not."""
    names = sorted({path.name for folder in (one, other) for path in folder.glob("*.safetensors")})
    total = 0 if names else 1
    for name in names:
        first, second = one / name, other / name
        if not (first.exists() and second.exists() and filecmp.cmp(first, second, shallow=False)):
            total += max(path.stat().st_size for path in (first, second) if path.exists())
    return total


def _by_hand(proof: Proof, model: str, data: Mapping[str, Any], whole: tonnage.Run) -> None:
    with tonnage.Session(model, data, output=str(proof.folder / "session"), **CONFIG) as session:
        for batch in session.batches():
            session.forward_backward(batch)
            session.update()
        steps = _steps(session.run)
    proof.found("session", f"{STEPS} steps", unequal(steps, _steps(whole)))


def _answers(proof: Proof, whole: tonnage.Run) -> None:
    """Greedy answers, side by side and one by one; on a GPU also beside those of the CPU."""
    try:
        together = whole.generate(list(QUESTIONS), max_new_tokens=16)
    except OverflowError:  # tokens that nobody has written
        if proof.computes:
            raise
        proof.skip("answers", "side by side and one by one", NOTHING)
        return
    alone = whole.generate(list(QUESTIONS), max_new_tokens=16, batch_size=1)
    proof.found("answers", "side by side and one by one", unequal(together, alone))
    if proof.on_gpu:
        proof.found("answers", "here and on the CPU", unequal(together, _on_the_cpu(whole.path, QUESTIONS)))


def _on_the_cpu(run: Path, questions: Sequence[str]) -> list[str]:
    program = (
        "import json, sys, tonnage; "
        "print(json.dumps(tonnage.open_run(sys.argv[1]).generate(sys.argv[2:], max_new_tokens=16)))"
    )
    command = [sys.executable, "-c", program, str(run), *questions]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=100).stdout
    answers: list[str] = json.loads(output.strip().splitlines()[-1])
    return answers
