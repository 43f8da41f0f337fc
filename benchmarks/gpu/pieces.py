"""The pieces in their order: what each runs, and how many seconds of an H200 with 16 cores it should take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROOF = "tonnage-prove/prove.json"
"""Where the proof writes, below the folder that it is given."""


@dataclass(frozen=True)
class Piece:
    """A command that writes a file of JSON."""

    name: str
    number: int
    """Of the issue's six kinds."""
    shows: str
    seconds: int
    command: tuple[str, ...]
    """Words after ``python -m``, of which ``{folder}`` and ``{output}`` are filled in."""
    only: tuple[str, ...] = ()
    """Names of the proof's pieces, for one that is part of it (``tonnage doctor --prove``)."""
    part: tuple[str, ...] = ()
    """Words for a part of it, which is enough under the stand-in: ``prove_stand_in.json`` and ``cuda_walk.json`` have
    all. Its models are small, and have weights there; those of the others have none."""

    def words(self, folder: Path, output: Path) -> list[str]:
        """The command."""
        return [word.format(folder=folder, output=output) for word in self.command]

    def written(self, folder: Path, output: Path) -> Path:
        """The file that it writes."""
        return folder / PROOF if self.only else output


def _proven(name: str, number: int, shows: str, seconds: int, *only: str, part: tuple[str, ...] = ()) -> Piece:
    command = ("tonnage.prove", "--directory", "{folder}", *(word for one in only for word in ("--only", one)))
    return Piece(name, number, shows, seconds, command, only, part)


def _beside(contest: str, seconds: int) -> Piece:
    """One of ``beside.CONTESTS``."""
    shows = f"{contest}: TRL and Trainer beside ours"
    command = ("benchmarks.gpu.beside", contest, "--folder", "{folder}", "--output", "{output}")
    return Piece(f"beside {contest.replace(',', '')}", 3, shows, seconds, command)


PIECES: tuple[Piece, ...] = (
    _proven("8B", 1, "8B, all weights, compiled: as planned, and with whole blocks recomputed", 110, "speed 8B"),
    _proven("8B adapters", 2, "8B, compiled: LoRA, and over nf4", 80, "speed 8B adapters"),
    Piece(
        "8B profiles",
        2,
        "profiles of both",
        80,
        ("benchmarks.gpu.profiles", "--folder", "{folder}", "--output", "{output}"),
    ),
    _beside("1B, full rows", 140),
    _beside("8B LoRA, full rows", 180),
    _beside("1B, short documents", 140),
    _beside("8B LoRA, short documents", 180),
    _proven("memory", 4, "planned peaks beside the allocator's, 13 ways", 80, "memory"),
    _proven("memory elsewhere", 4, "the same with less on the device, 9 ways", 60, "memory elsewhere"),
    _proven(
        *("families", 5, "families and adapters beside the CPU, packed beside alone", 110),
        *("families", "packing", "adapters"),
        part=("--quick",),
    ),
    Piece(
        "walks",
        6,
        "all settings of one GPU (tests/device/real.py)",
        240,
        ("tests.device.real", "--work", "{folder}", "--output", "{output}"),
        part=("--only", "^(model|precision|moments)"),
    ),
)


def fitting(pieces: Iterable[Piece], seconds: float) -> list[Piece]:
    """Those that fit in so many seconds, one after the other; a long one gives way to what comes after it."""
    chosen = []
    for piece in pieces:
        if piece.seconds <= seconds:
            chosen.append(piece)
            seconds -= piece.seconds
    return chosen


def in_turn(pieces: Sequence[Piece], states: dict[str, str], again: Sequence[str]) -> list[Piece]:
    """What is to be run: first what is asked for once more, then what is missing, then what other code measured."""
    order = ("missing", "broke off", "stale")
    waiting = [piece for piece in pieces if piece.name not in again and states[piece.name] in order]
    waiting.sort(key=lambda piece: states[piece.name] == "stale")
    return [piece for piece in pieces if piece.name in again] + waiting
