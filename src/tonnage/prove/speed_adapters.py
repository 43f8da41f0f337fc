"""How fast an 8B shape trains at 4,096 tokens by LoRA, over its weights as they are and in 4 bits."""

from __future__ import annotations

from tonnage.prove.proof import Proof
from tonnage.prove.speed import measure

LINES = {"tokens": "8B LoRA, tokens"}
PACKS = 4


def prove(proof: Proof) -> None:
    """LoRA, and over nf4."""
    plain, packed = {"rank": 32}, {"rank": 32, "quantize": "nf4"}
    measure(proof, "8B", "LoRA", packs=PACKS, steps=7, lines=LINES, adapter=plain, compile="on")
    measure(proof, "8B", "LoRA over nf4", packs=PACKS, steps=6, adapter=packed, compile="on")
