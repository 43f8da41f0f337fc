"""What rank 0 writes down: one JSON object per step, per evaluation and per checkpoint, TensorBoard scalars, a log.

Floats are written at full precision; a value that is not finite is written as null, which JSON can say.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tonnage.checkpoint.save import Saved
from tonnage.rundir.directory import RunDirectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Recorder:
    """Writes the metrics and the log of a run; on other ranks than 0 it writes nothing."""

    def __init__(self, run: RunDirectory, *, rank: int, tensorboard: bool, first_step: int = 1) -> None:
        """``first_step``: TensorBoard hides what it has of this step and later ones, which are trained again."""
        self.files = (run.metrics, run.log)
        self._metrics = run.metrics.open("a", buffering=1) if rank == 0 else None
        self._log = run.log.open("a", buffering=1) if rank == 0 else None
        self._board: SummaryWriter | None = None
        if rank == 0 and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run.tensorboard), purge_step=first_step if first_step > 1 else None)

    def record(self, **values: Any) -> None:
        """One object of ``metrics.jsonl``; it must hold ``step``."""
        if self._metrics is not None:
            self._metrics.write(json.dumps({key: _jsonable(value) for key, value in values.items()}) + "\n")
        if self._board is not None:
            for key, value in values.items():
                if isinstance(value, int | float) and key != "step":
                    self._board.add_scalar(key, value, values["step"])

    def saved(self, checkpoints: Iterable[Saved]) -> None:
        """Checkpoints that became whole: a line of the log and an object of ``metrics.jsonl`` each."""
        for checkpoint in checkpoints:
            self.log(str(checkpoint))
            self.record(
                step=checkpoint.step,
                checkpoint_bytes=checkpoint.num_bytes,
                blocked_seconds=checkpoint.blocked_seconds,
                save_seconds=checkpoint.save_seconds,
            )

    def memory(self, step: int, phases: Sequence[Mapping[str, Any]]) -> None:
        """The peak of every phase on every rank: an object of ``metrics.jsonl``, and a table in the log."""
        self.record(step=step, memory_phases=phases)
        self.log("peak memory by phase, in GB by worker (host" + (", device)" if _on_device(phases) else ")"))
        for phase in phases:
            kinds = ("host", "device") if _on_device(phases) else ("host",)
            figures = "   ".join(" ".join(f"{number / 1e9:.3f}" for number in phase[kind]) for kind in kinds)
            self.log(f"  {phase['phase']:<14} {figures}")

    def log(self, message: str) -> None:
        """One line of ``log.txt``, with the time."""
        if self._log is not None:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def close(self) -> None:
        """Flush and close the files."""
        for file in (self._metrics, self._log):
            if file is not None:
                file.close()
        if self._board is not None:
            self._board.close()


def _on_device(phases: Sequence[Mapping[str, Any]]) -> bool:
    return any(any(phase["device"]) for phase in phases)


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
