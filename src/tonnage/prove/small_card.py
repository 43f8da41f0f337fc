"""How fast an 8B shape trains, all weights, with less of the card than its weights alone take in 32 bits: the rest lies
in the host's memory."""

from __future__ import annotations

from tonnage.prove.proof import Proof
from tonnage.prove.speed import measure
from tonnage.prove.speed_8b import PACKS

BUDGETS = ("24GB", "10GB")
"""With weights on the device, and with those of a few blocks at a time."""


def prove(proof: Proof) -> None:
    """Within each budget, as planned."""
    for budget in BUDGETS[: 1 if proof.brief else None]:
        memory = {"budget": {"device": budget}}
        measure(proof, "8B", f"all weights, in {budget}", packs=PACKS, steps=5, memory=memory)
