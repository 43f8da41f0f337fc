"""The pieces in their order: what has most to say comes first, for whoever has little time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A part of the proof, of at most ``LIMIT_SECONDS``."""

    name: str
    module: str
    """Of this package; its function ``prove`` is called."""
    shows: str
    seconds: int
    """That it should take on an H100; none has been timed there yet."""
    gpu: bool = False
    """Whether it needs a GPU."""
    several: bool = False
    """Whether it is only for several devices (``--gpus``)."""


LIMIT_SECONDS = 120
"""After which a piece is ended."""
CPU_SECONDS = 1800
"""The same on a CPU, which may be slow, and busy."""

PIECES: tuple[Piece, ...] = (
    Piece("rates", "rates", "what the device does: products, memory, copies, updates", 20),
    Piece("attention", "attention", "attention over packs, beside fp32 document by document", 10),
    Piece("head", "head", "the chunked head and its loss", 5),
    Piece("update", "update", "AdamW's update for all codecs and split masters", 10),
    Piece("families", "families", "20 steps of tiny models of several families", 40),
    Piece("tiers", "tiers", "every tier, recompute and micro-batch: the same bits", 30),
    Piece("resume", "resume", "a run that is stopped and goes on; a Session; answers", 50),
    Piece("adapters", "adapters", "LoRA, and over bases in 4 and 8 bits", 30),
    Piece("compile", "compiling", "compiled blocks", 50),
    Piece("refusals", "refusals", "mistakes are refused in a sentence", 15),
    Piece("waits", "waits", "waits and launches of a step", 15, gpu=True),
    Piece("memory", "memory", "planned peaks beside the allocator's, 20 ways to train", 70, gpu=True),
    Piece("speed", "speed", "a 1B shape at 4,096 tokens", 40),
    Piece("speed 8B", "speed_8b", "an 8B shape at 4,096 tokens, all weights", 60, gpu=True),
    Piece("speed 8B adapters", "speed_adapters", "an 8B shape at 4,096 tokens, LoRA and 4 bits", 50, gpu=True),
    Piece("host tiers", "host_tiers", "states on the host at 8k, 16k and 32k tokens a step", 60, gpu=True),
    Piece("beside", "beside", "TRL on the same rows", 40),
    Piece("several", "several", "ZeRO 0 to 3, hybrid, tensor and pipeline", 110, several=True),
    Piece("fewer", "fewer", "a run that goes on with fewer workers", 60, several=True),
    Piece("traffic", "traffic", "whether traffic is hidden behind computing", 60, several=True),
)


def named(names: tuple[str, ...]) -> list[Piece]:
    """The pieces of some names, all without any. Raises ``KeyError`` for a name that is none."""
    by_name = {piece.name: piece for piece in PIECES}
    return list(PIECES) if not names else [by_name[name] for name in names]
