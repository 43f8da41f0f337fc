"""Where things rest, what is computed twice and how a step is cut up must not change a bit, or as little as sums do.

Documents are short: FlashAttention adds what several blocks of keys give for a query in no fixed order, and a document
of one block has nothing to add. With ``deterministic`` in the config that does not matter, and it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.prove.material import resting, tiny_llama
from tonnage.prove.proof import Proof, apart, unequal
from tonnage.prove.runs import Ran, Spec, hold, take

STEPS, FEW = 8, 3
RESIDENT: Mapping[str, Any] = resting(
    "device", "optimizer", "gradient", "parameter", "activation", recompute="none", micro_batch=2, moments="int8"
)
WAYS: Mapping[str, Mapping[str, Any]] = {
    "recompute selective": {"recompute": "selective"},
    "recompute full": {"recompute": "full"},
    "optimizer on the host": resting("host", "optimizer"),
    "optimizer partly on the host": resting("host", "optimizer", optimizer_resident=200_000),
    "optimizer on disk": resting("disk", "optimizer"),
    "gradients on the host": resting("host", "optimizer", "gradient"),
    "gradients on disk": resting("disk", "optimizer", "gradient"),
    "inputs of blocks on the host": resting("host", "activation", recompute="full"),
    "all on the host": resting("host", "optimizer", "gradient", "activation", recompute="full"),
    "all on disk": resting("disk", "optimizer", "gradient", "parameter"),
    "gradients alone on disk": resting("host", "optimizer", gradient_tier="disk"),
    "parameters on the host": resting("host", "optimizer", "gradient", "parameter", recompute="selective"),
    "parameters on the host, the rest on disk": {
        **resting("disk", "optimizer", "gradient"),
        **resting("host", "parameter", "activation", recompute="full"),
    },
    "one block of two recomputed": {"recompute": "full", "recompute_blocks": 1},
}


def prove(proof: Proof) -> None:
    """Each way beside the run whose states all stay on the device."""
    model, file = tiny_llama(proof.folder)
    steps = FEW if proof.brief else STEPS

    def ran(name: str, precision: str = "bf16", **memory: Any) -> Ran:
        config: dict[str, Any] = {
            "precision": precision,
            "optimizer": {"lr": 1e-3},
            "memory": {**RESIDENT, **memory},
            "deterministic": True,
        }
        return take(Spec(name, model, file, steps, config), proof.folder / "runs")

    resident = ran("resident")
    again = ran("again")
    _same(proof, "the same once more", again, resident)
    on_disk: Ran | None = None
    for name, memory in list(WAYS.items())[: 3 if proof.brief else None]:
        run = ran(name.replace(" ", "-"), **memory)
        if memory.get("gradient_tier") != "disk" or not proof.on_gpu or run.refused:
            _same(proof, name, run, resident)
        elif on_disk is None:  # the host adds up their norm, in another order
            on_disk = run
            proof.found("losses, bf16", name, apart(run.losses, resident.losses))
            proof.found("norms, bf16", name, apart(run.norms, resident.norms))
        else:
            _same(proof, f"{name}, as with gradients on disk", run, on_disk)
        proof.more[name] = {"losses": [*map(repr, run.losses)], "norms": [*map(repr, run.norms)]}
    if proof.brief:
        return
    whole = ran("fp32", "fp32", micro_batch=4)
    for size in (1, 2):
        hold(proof, "micro-batch", f"{size} instead of 4", ran(f"fp32-{size}", "fp32", micro_batch=size), whole)


def _same(proof: Proof, case: str, one: Ran, other: Ran) -> None:
    if other.refused:
        proof.found("same bits", case, float("inf"), f"the resident run was refused: {other.refused}")
    elif one.refused:  # a tier that this device does not have is refused before anything is loaded
        proof.not_run("same bits", case, one.refused, broke=one.broke)
    else:
        steps = list(zip(one.losses, one.norms, strict=True))
        proof.found("same bits", case, unequal(steps, list(zip(other.losses, other.norms, strict=True))))
