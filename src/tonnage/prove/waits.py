"""How often the host waits for the device in a step, and how many kernels it launches."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch

from tonnage.prove.material import resting, tiny_llama
from tonnage.prove.proof import Proof
from tonnage.prove.runs import Spec, take

BLOCKS, STEPS = 16, 8


def prove(proof: Proof) -> None:
    """Of steps in the middle of a run, one micro-batch each and four."""
    model, file = tiny_llama(proof.folder, num_hidden_layers=BLOCKS)
    for micro_batch, case in ((4, "one micro-batch"), (1, "four micro-batches")):
        memory = resting("device", "optimizer", "gradient", recompute="none", micro_batch=micro_batch)
        spec = Spec(case.replace(" ", "-"), model, file, STEPS, {"memory": memory, "compile": "off"})
        counted = _Counted()
        ran = take(spec, proof.folder / "runs", counted)
        if ran.refused:
            proof.found("waits", case, float("inf"), f"refused: {ran.refused}")
            continue
        proof.found("waits", case, counted.waits / (STEPS - 3), counted.where())
        proof.found("launches", case, counted.launches)
        proof.more[case] = counted.places


class _Counted:
    """Counts waits from the third step to the last but one, as torch warns of them, and launches of the last."""

    def __init__(self) -> None:
        self.waits, self.launches = 0, 0
        self.places: dict[str, int] = {}
        self._stack = ExitStack()
        self._profiler: Any = None

    def __call__(self, taken: int) -> None:
        if taken == 2:
            self._seen = self._stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif taken == STEPS - 1:
            torch.cuda.set_sync_debug_mode("default")
            for warning in self._seen:
                if "synchroniz" in str(warning.message):
                    self.waits += 1
                    name = warning.filename.rpartition("/tonnage/")[2].rpartition("site-packages/")[2]
                    place = f"{name}:{warning.lineno}"
                    self.places[place] = self.places.get(place, 0) + 1
            self._stack.close()
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.__enter__()
        elif taken == STEPS:
            torch.cuda.synchronize()
            self._profiler.__exit__(None, None, None)
            self.launches = sum(warning.device_type.name == "CUDA" for warning in self._profiler.events())

    def where(self) -> str:
        most = sorted(self.places.items(), key=lambda entry: -entry[1])[:5]
        return ", ".join(f"{count} at {place}" for place, count in most)
