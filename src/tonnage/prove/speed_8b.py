"""How fast an 8B shape trains at 4,096 tokens, all weights: as planned, and with whole recompute.

What does not stay on the device rests in the host's memory, as the plan says.
"""

from __future__ import annotations

from tonnage.prove.proof import Proof
from tonnage.prove.speed import measure

LINES = {"tokens": "8B full, tokens", "mfu": "8B full, mfu"}
PACKS = 4


def prove(proof: Proof) -> None:
    """As planned; and recomputing whole blocks."""
    measure(proof, "8B", "all weights, as planned", packs=PACKS, steps=7, lines=LINES, compile="on")
    if not proof.brief:
        measure(proof, "8B", "all weights", packs=PACKS, steps=5, memory={"recompute": "full"}, compile="on")
