"""What rank 0 writes down: one JSON object per step, per evaluation and per checkpoint, answers, a log.

Floats are written at full precision; a value that is not finite is written as null, which JSON can say.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tonnage.checkpoint.save import Saved
from tonnage.files.visible import as_json_text
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import Prompt, Sample

SHOWN_ANSWERS, SHOWN_LETTERS = 2, 60
"""Of an evaluation, in the log."""


class Recorder:
    """Writes the metrics and the log of a run; on other ranks than 0 it writes nothing."""

    def __init__(self, run: RunDirectory, *, rank: int) -> None:
        self.files = (run.metrics, run.log)
        self._samples = run.samples
        self._metrics = run.metrics.open("a", buffering=1) if rank == 0 else None
        self._log = run.log.open("a", buffering=1) if rank == 0 else None

    def record(self, **values: Any) -> None:
        """One object of ``metrics.jsonl``; it must hold ``step``."""
        if self._metrics is not None:
            not_finite = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
            self._metrics.write(json.dumps(values | dict.fromkeys(not_finite)) + "\n")

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

    def answered(self, step: int, prompts: Sequence[Prompt], answers: Sequence[str], seconds: float) -> None:
        """What the model answered after ``step``: an object of ``samples.jsonl`` each, and the first in the log."""
        if self._metrics is None:
            return
        with self._samples.open("a") as file:
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start=1):
                sample = Sample(step, number, prompt.text, answer, prompt.expected)
                file.write(as_json_text(json.dumps(asdict(sample), ensure_ascii=False)) + "\n")
        self.log(f"answered {len(answers)} prompt(s) in {seconds:.1f} s")
        for prompt, answer in list(zip(prompts, answers, strict=True))[:SHOWN_ANSWERS]:
            self.log(f"  {_line(prompt.text, at_end=True)} -> {_line(answer)}")

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
        for file in (self._metrics, self._log):
            if file is not None:
                file.close()


def _line(text: str, *, at_end: bool = False) -> str:
    """A text on a line, as much of its beginning as is shown, or of its end."""
    line = " ".join(text.split())
    if len(line) <= SHOWN_LETTERS:
        return line
    return "..." + line[3 - SHOWN_LETTERS :] if at_end else line[: SHOWN_LETTERS - 3] + "..."


def _on_device(phases: Sequence[Mapping[str, Any]]) -> bool:
    return any(any(phase["device"]) for phase in phases)
