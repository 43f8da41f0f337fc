"""The pieces in their order: what has most to say comes first, for whoever has little time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProofPiece:
    """A part of the proof, of at most ``LIMIT_SECONDS``."""

    name: str
    module: str
    """Of this package, whose ``prove`` is called with a ``Proof`` that has the piece's name."""
    shows: str
    seconds: int
    """That it takes on an H200 and 16 cores or, where it has not come to its end there, should take."""
    alone: bool = True
    """Whether nothing else may run meanwhile, as it measures time or memory. The others run side by side on a GPU."""
    gpu: bool = False
    """Whether it needs a GPU."""
    several: bool = False
    """Whether it is only for several devices (``--gpus``)."""


LIMIT_SECONDS = 120
"""After which a piece is ended."""
CPU_SECONDS = 1800
"""The same on a CPU, which may be slow, and busy."""

TOGETHER, CORES = 4, 4
"""Pieces that go on side by side at most, and processors that each of them has at least."""

PIECES: tuple[ProofPiece, ...] = (
    ProofPiece("rates", "rates", "what the device does: products, memory, copies, updates", 20),
    ProofPiece("attention", "attention", "attention over packs, beside fp32 document by document", 15, alone=False),
    ProofPiece("head", "head", "the chunked head and its loss", 15, alone=False),
    ProofPiece("update", "update", "AdamW's update for all codecs and split masters", 30, alone=False),
    ProofPiece("families", "families", "20 steps of tiny models of several families", 60, alone=False),
    ProofPiece("packing", "families", "the same in bf16, and packed beside alone", 45, alone=False),
    ProofPiece("tiers", "tiers", "every tier, recompute and micro-batch: the same bits", 65, alone=False),
    ProofPiece("resume", "resume", "a run that is stopped and goes on; a Session; answers", 90, alone=False),
    ProofPiece("adapters", "families", "LoRA, and over bases in 4 and 8 bits", 60, alone=False),
    ProofPiece("compile", "compiling", "compiled blocks", 100, alone=False),
    ProofPiece("refusals", "refusals", "mistakes are refused in a sentence", 25, alone=False),
    ProofPiece("waits", "waits", "waits and launches of a step", 50, alone=False, gpu=True),
    ProofPiece("memory", "memory", "planned peaks beside the allocator's, 13 ways to train", 80, gpu=True),
    ProofPiece("memory elsewhere", "memory", "the same with less on the device, 9 ways", 60, gpu=True),
    ProofPiece("speed", "speed", "a 1B shape at 4,096 tokens", 60),
    ProofPiece("speed 8B", "speed", "an 8B shape at 4,096 tokens, all weights", 90, gpu=True),
    ProofPiece("speed 8B adapters", "speed", "an 8B shape at 4,096 tokens, LoRA and 4 bits", 80, gpu=True),
    ProofPiece("host tiers", "speed", "states on the host at 8k, 16k and 32k tokens a step", 110, gpu=True),
    ProofPiece("small card", "speed", "an 8B shape, all weights, in 24 and 10 GB of the card", 100, gpu=True),
    ProofPiece("beside", "beside", "TRL on the same rows", 50),
    ProofPiece("several", "several", "ZeRO 0 to 3, hybrid, tensor and pipeline", 110, several=True),
    ProofPiece("fewer", "several", "a run that goes on with fewer workers", 60, several=True),
    ProofPiece("traffic", "traffic", "whether traffic is hidden behind computing", 60, several=True),
)


def named(names: tuple[str, ...]) -> list[ProofPiece]:
    """The pieces of some names, all without any. Raises ``KeyError`` for a name that is none."""
    by_name = {piece.name: piece for piece in PIECES}
    return list(PIECES) if not names else [by_name[name] for name in names]
