"""What a piece is given: the device, a folder of its own, how large things may be, and where its figures go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tonnage.prove.checks import CHECKS
from tonnage.prove.record import CheckedFigure

NOTHING = "the device does not compute: what it should have written is still zero"
NEEDS_GPU = "needs a GPU"


@dataclass
class Proof:
    device: torch.device
    card: str
    """The GPU's name; empty on a CPU."""
    computes: bool
    """Whether the device multiplies; a stand-in for one does not."""
    folder: Path
    """For runs and models; empty at first."""
    piece: str = ""
    """Its name: the row of a table that several pieces share."""
    gpus: int = 1
    """How many devices, or on a CPU workers, those pieces take that want several."""
    brief: bool = False
    """Whether a slice will do: the least of every kind."""
    findings: list[CheckedFigure] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    tell: Callable[[], None] = lambda: None
    """Called after every finding."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def found(self, check: str, case: str, figure: float, why: str = "") -> None:
        """Hold a figure against a check's bounds, as far as these are for this card."""
        limits = CHECKS[check]
        bounded = limits.least is not None or limits.most is not None
        for_us = (limits.card in self.card) if limits.card else (self.on_gpu or not limits.gpu_only)
        if limits.numeric and not self.computes:
            self.skip(check, case, NOTHING)
            return
        if not math.isfinite(figure):
            self._add(check, case, None, "failed" if bounded and for_us else "told", why or f"it is {figure}")
            return
        if not bounded or not for_us:
            why = why or (f"the bounds are for {limits.card or 'GPUs'}" if bounded else "")
            self._add(check, case, figure, "told", why)
            return
        self._add(check, case, figure, "passed" if limits.holds(figure) else "failed", why, red=limits.red)

    def not_run(self, check: str, case: str, why: str, *, broke: bool) -> None:
        """Say that there was no run: the plan's refusal skips the check, what broke off fails it."""
        if broke:
            self._add(check, case, None, "failed", why)
        else:
            self.skip(check, case, f"refused: {why}")

    def skip(self, check: str, case: str, why: str) -> None:
        self._add(check, case, None, "skipped", why)

    def _add(self, check: str, case: str, figure: float | None, status: Any, why: str, *, red: bool = False) -> None:
        definition = CHECKS[check]
        why = why.replace(str(self.folder.resolve()), ".")  # the record holds no paths
        figure = None if figure is None else float(figure)
        self.findings.append(
            CheckedFigure(check, case, figure, definition.unit, definition.tolerance, status, why, red)
        )
        self.tell()


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative distance between numbers of two runs; infinite where one has more of them."""
    if len(one) != len(other) or not one:
        return math.inf
    pairs = zip(one, other, strict=True)
    return max(abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a + b) else math.inf for a, b in pairs)


def unequal(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of two sequences differ, and by how many one is longer."""
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other)) + (not one)
