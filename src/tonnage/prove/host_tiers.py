"""What it costs to keep states in the host's memory: tokens a second beside those with all on the device."""

from __future__ import annotations

from tonnage.prove.memory import DEVICE
from tonnage.prove.proof import Proof
from tonnage.prove.speed import LENGTH, measure

PACKS = (2, 4, 8)
"""Of 4,096 tokens: 8k, 16k and 32k tokens a step."""


def prove(proof: Proof) -> None:
    """The 1B shape resident, its optimizer on the host, its gradients too, and all of it."""
    for packs in PACKS[: 1 if proof.brief else None]:
        tokens = f"{packs * LENGTH // 1024}k tokens a step"
        shared = {"recompute": "full", "micro_batch": 2, "parameter_tier": "device"}
        resident = measure(proof, "1B", f"{tokens}, resident", packs=packs, steps=6, memory={**shared, **DEVICE})
        for case, memory in (
            ("optimizer on the host", {"optimizer_tier": "host", "gradient_tier": "device", "optimizer_resident": 0}),
            ("gradients on the host too", {"optimizer_tier": "host", "gradient_tier": "host"}),
            ("all on the host", {"optimizer_tier": "host", "gradient_tier": "host", "parameter_tier": "host"}),
        ):
            ran = measure(proof, "1B", f"{tokens}, {case}", packs=packs, steps=6, memory={**shared, **memory})
            if resident.refused or ran.refused:
                proof.skip("host tiers", f"{tokens}, {case}", resident.refused or ran.refused)
            else:
                proof.found("host tiers", f"{tokens}, {case}", ran.tokens_per_second / resident.tokens_per_second)
