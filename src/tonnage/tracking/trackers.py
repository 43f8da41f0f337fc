"""What rank 0 has to do with trackers: start their processes, and at the end wait for them a moment."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from tonnage.errors import UserError
from tonnage.rundir.directory import RunDirectory
from tonnage.tracking.back_ends import Outcome
from tonnage.tracking.news import Note

END_SECONDS: dict[Outcome, float] = {"finished": 30.0, "stopped": 10.0, "failed": 5.0}
"""For trackers to have all, once the run is over. Whoever stops a run may be about to end the machine."""

SOON_SECONDS = 3.0
"""Within which an end is nothing to speak of."""


class Trackers:
    """The processes that send a run's numbers to trackers; none on other ranks than 0. Nothing here raises."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._samples = False
        self._senders: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, names: Sequence[str], *, samples: bool) -> None:
        """Start a sender for each tracker, of ``samples`` too if they are sent; returns at once."""
        self._samples = samples
        for name in names:
            self._cut_back(name)
            command = [sys.executable, "-m", "tonnage.tracking.sender", str(self._run.path), name]
            try:
                self._senders[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                self._run.add_to_log(f"{name}: not started: {error.strerror}; metrics.jsonl has everything")

    def _cut_back(self, name: str) -> None:
        """Note where a tracker's next record will be, where the run's files were cut: before anything is written."""
        with suppress(UserError, OSError):  # which the sender meets as well, and says
            if (note := Note.of(self._run, name)) != (now := note.within(self._run)):
                now.write(self._run, name)

    def end(self, outcome: Outcome) -> None:
        """Have all of them send the rest and end, for ``END_SECONDS`` at most, and say what was not sent."""
        seconds = END_SECONDS[outcome]
        for sender in self._senders.values():
            assert sender.stdin is not None
            with suppress(OSError):  # it is gone already
                sender.stdin.write(outcome.encode() + b"\n")
                sender.stdin.flush()
        deadline = time.monotonic() + seconds
        if late := self._late(min(SOON_SECONDS, seconds)):
            self._run.add_to_log(f"{', '.join(late)}: not done yet; waiting for {seconds:.0f} s at most")
        for name, sender in self._senders.items():
            try:
                status: int | None = sender.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                sender.kill()
                sender.wait()
                status = None
            with suppress(OSError):
                sender.stdin.close()  # type: ignore[union-attr]
            if status != 0:
                how = f"had not ended {seconds:.0f} s after the run" if status is None else f"ended with {status}"
                self._run.add_to_log(f"{name}: {how}; {self._missing(name, outcome)}")
        self._senders = {}

    def _late(self, seconds: float) -> list[str]:
        """Trackers that have not ended within so many."""
        deadline = time.monotonic() + seconds
        for sender in self._senders.values():
            with suppress(subprocess.TimeoutExpired):
                sender.wait(max(0.0, deadline - time.monotonic()))
        return [name for name, sender in self._senders.items() if sender.poll() is None]

    def _missing(self, name: str, outcome: Outcome) -> str:
        try:
            unsent = Note.of(self._run, name).unsent(self._run, samples=self._samples)
        except (UserError, OSError):
            return "what it has is not known"
        if not unsent:
            return "it was given everything, but may not have kept the last of it"
        later = "" if outcome == "finished" else ", and resuming the run sends them"
        return f"{unsent:,} record(s) were not sent; the run's own files have them{later}"
