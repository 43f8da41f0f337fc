"""Where things rest, what is computed twice and how a step is cut up must not change a bit, or as little as sums do.

Documents are short: FlashAttention adds what several blocks of keys give for a query in no fixed order, and a document
of one block has nothing to add. With ``deterministic`` in the config that does not matter, and it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.config import Config
from tonnage.prove.material import rows, tiny_model
from tonnage.prove.proof import Proof, apart, unequal
from tonnage.prove.runs import Ran, Spec, hold, take

STEPS, FEW = 8, 3
RESIDENT: Mapping[str, Any] = {
    "optimizer_tier": "device",
    "gradient_tier": "device",
    "parameter_tier": "device",
    "activation_tier": "device",
    "recompute": "none",
    "micro_batch": 2,
    "moments": "int8",
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "recompute selective": {"recompute": "selective"},
    "recompute full": {"recompute": "full"},
    "optimizer on the host": {"optimizer_tier": "host"},
    "optimizer partly on the host": {"optimizer_tier": "host", "optimizer_resident": 200_000},
    "optimizer on disk": {"optimizer_tier": "disk"},
    "gradients on the host": {"optimizer_tier": "host", "gradient_tier": "host"},
    "gradients on disk": {"optimizer_tier": "disk", "gradient_tier": "disk"},
    "inputs of blocks on the host": {"recompute": "full", "activation_tier": "host"},
    "all on the host": {
        "optimizer_tier": "host",
        "gradient_tier": "host",
        "activation_tier": "host",
        "recompute": "full",
    },
    "all on disk": {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk"},
    "gradients alone on disk": {"optimizer_tier": "host", "gradient_tier": "disk"},
    "parameters on the host": {
        "optimizer_tier": "host",
        "gradient_tier": "host",
        "parameter_tier": "host",
        "recompute": "selective",
    },
    "parameters on the host, the rest on disk": {
        "optimizer_tier": "disk",
        "gradient_tier": "disk",
        "parameter_tier": "host",
        "activation_tier": "host",
        "recompute": "full",
    },
    "one block of two recomputed": {"recompute": "full", "recompute_blocks": 1},
}


def prove(proof: Proof) -> None:
    """Each way beside the run whose states all stay on the device."""
    model, file = tiny_model(proof.folder / "llama", "llama"), rows(proof.folder)
    steps = FEW if proof.brief else STEPS

    def ran(name: str, precision: str = "bf16", **memory: Any) -> Ran:
        config: dict[str, Any] = {
            "precision": precision,
            "optimizer": {"lr": 1e-3},
            "memory": {**RESIDENT, **memory},
            **same_every_time(),
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


def same_every_time() -> dict[str, Any]:
    """What asks for the same bits every time, where this version of tonnage has a key for that."""
    return {"deterministic": True} if "deterministic" in Config.model_fields else {}


def _same(proof: Proof, case: str, one: Ran, other: Ran) -> None:
    if other.refused:
        proof.found("same bits", case, float("inf"), f"the resident run was refused: {other.refused}")
    elif one.refused:  # a tier that this device does not have is refused before anything is loaded
        proof.not_run("same bits", case, one.refused, broke=one.broke)
    else:
        steps = list(zip(one.losses, one.norms, strict=True))
        proof.found("same bits", case, unequal(steps, list(zip(other.losses, other.norms, strict=True))))
