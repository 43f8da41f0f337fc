"""What was found, as a file: ``prove.json``, of a form with a version."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from tonnage.files.writing import write_whole

VERSION = 1
"""Of the form."""
Status = Literal["passed", "failed", "told", "skipped"]
"""``told`` is a figure without bounds."""
PART = "-part"
"""Ends what a result holds for as long as its piece goes on."""
MOST_TEXT = 6000
"""Letters of an error that are kept: its end."""


@dataclass(frozen=True)
class CheckedFigure:
    """A figure of one check in one case."""

    check: str
    """Its name in ``checks.CHECKS``."""
    case: str
    """Which of several: a model, a codec, a tier."""
    figure: float | None
    unit: str
    tolerance: str
    status: Status
    why: str = ""
    """Why it was skipped, or what else there is to say."""
    red: bool = False
    """Whether a line for this very card was held against it."""


@dataclass(frozen=True)
class PieceResult:
    name: str
    status: Status
    seconds: float
    device: str
    """``cuda`` or ``cpu``."""
    why: str = ""
    """Why it was skipped."""
    error: str = ""
    """The traceback of what it broke off with."""
    findings: tuple[CheckedFigure, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    """What was measured besides: plans, seconds of steps."""

    @staticmethod
    def of(found: Mapping[str, Any]) -> PieceResult:
        """From JSON. Raises ``TypeError`` or ``KeyError`` for another form."""
        return PieceResult(**{**found, "findings": tuple(CheckedFigure(**one) for one in found["findings"])})


def status_of(findings: Iterable[CheckedFigure], error: str = "") -> Status:
    statuses = {one.status for one in findings}
    if error or "failed" in statuses:
        return "failed"
    return next((one for one in ("passed", "told") if one in statuses), "skipped")


def result_file(folder: Path, name: str) -> Path:
    return folder / "pieces" / f"{name}.json"


def write(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def keep(folder: Path, result: PieceResult, machine: str) -> None:
    """Write down a piece's result; ``machine`` says for which machine and code it holds."""
    write(result_file(folder, result.name), {"version": VERSION, "of": machine, "piece": asdict(result)})


def kept(folder: Path, name: str, machine: str) -> PieceResult | None:
    """The result of a piece from an earlier call on this very machine with this code; None where there is none."""
    try:
        stored = json.loads(result_file(folder, name).read_text(encoding="utf-8"))
        if (stored["version"], stored["of"]) != (VERSION, machine):
            return None
        return PieceResult.of(stored["piece"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


@dataclass(frozen=True)
class ProofRecord:
    date: str
    machine: Mapping[str, Any]
    pieces: tuple[PieceResult, ...]
    missing: tuple[str, ...] = ()
    """Packages that were not there."""

    @property
    def failed(self) -> list[tuple[str, str]]:
        """Pieces that broke off and checks that did not hold, as (piece, what)."""
        failures = []
        for piece in self.pieces:
            if piece.error:
                failures.append((piece.name, f"broke off: {piece.error.strip().splitlines()[-1]}"))
            failed = [finding for finding in piece.findings if finding.status == "failed"]
            failures += [(piece.name, f"{finding.check} ({finding.case})") for finding in failed]
        return failures

    @property
    def counts(self) -> dict[str, int]:
        """Checks by what became of them."""
        counts = Counter(finding.status for piece in self.pieces for finding in piece.findings)
        return {status: counts[status] for status in get_args(Status)}

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "date": self.date,
            "machine": dict(self.machine),
            "missing": list(self.missing),
            "checks": self.counts,
            "failed": [" ".join((f"{piece}:", check)) for piece, check in self.failed],
            "seconds": round(sum(piece.seconds for piece in self.pieces), 1),
            "pieces": [asdict(piece) for piece in self.pieces],
        }
