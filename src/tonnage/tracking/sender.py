"""The process of one tracker: ``python -m tonnage.tracking.sender RUN NAME`` sends what is new in a run's files.

Rank 0 starts it and holds its standard input, on which a word comes when the run is over: how it ended. The sender then
sends the rest, ends the tracker's run and itself; for how long is for rank 0 to say, which kills it in the end. If the
input ends without a word, so does the sender: rank 0 is gone.

What fails is tried again, after a pause that grows. The first failure is said in the run's log, and that a tracker has
not answered for ``LATE_SECONDS``. What the library prints is not kept: it may hold secrets.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast, get_args

from tonnage.config import read_config
from tonnage.rundir.directory import RunDirectory, step_of
from tonnage.tracking.back_ends import TRACKERS, About, Outcome
from tonnage.tracking.news import Note, new_answers, new_numbers
from tonnage.tracking.told import told_config, told_error

LOOK_SECONDS = 1.0
"""Between two looks at the files."""
FIRST_PAUSE, LONGEST_PAUSE, LAST_PAUSE = 5.0, 300.0, 1.0
"""Seconds before something is tried again: at first, at most, and once the run is over."""
LATE_SECONDS = 60.0
NOT_FOR_SENDERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Schedulers and terminals tell all processes; what a sender does is said by its worker."""


def main(path: str, name: str) -> None:
    for number in NOT_FOR_SENDERS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    Sender(RunDirectory(path), name, EndOfRun()).work()


class EndOfRun(threading.Event):
    """That the run is over, as standard input says."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome: Outcome = "failed"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        word = sys.stdin.readline().strip()
        if word not in get_args(Outcome):
            os._exit(1)
        self.outcome = cast(Outcome, word)
        self.set()


class Sender:
    """What is sent to one tracker, and how far."""

    def __init__(self, run: RunDirectory, name: str, ending: EndOfRun) -> None:
        self._run, self._name, self._ending = run, name, ending
        self._tracker = TRACKERS[name]()
        self._note = Note()
        self._samples = self._is_ready = False
        self._said: set[str] = set()

    def work(self) -> None:
        """Send until the run is over and all is sent."""
        pause, troubled = FIRST_PAUSE, False
        while True:
            is_over = self._ending.is_set()  # before looking: nothing is written later
            try:
                with self._late():
                    if not self._is_ready:
                        self._start()
                        self._is_ready = True
                    more = self._send()
                    if is_over and not more:
                        self._tracker.end(self._ending.outcome)
                        return
            except Exception as error:  # of whatever kind: libraries raise what they like
                self._say("failed", f"{told_error(error)}; trying again, and training goes on")
                self._is_ready, troubled = False, True
                time.sleep(LAST_PAUSE) if is_over else self._ending.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if troubled:
                self._say("mended", "works again")
                pause, troubled = FIRST_PAUSE, False
            if not more:
                self._ending.wait(LOOK_SECONDS)

    def _start(self) -> None:
        run = self._run
        if self._note == Note():
            self._note = Note.of(run, self._name)
        config = read_config(run.config, [], check_files=False)
        self._samples = config.track_samples
        checkpoint = run.checkpoint_to_resume()
        first_step = step_of(checkpoint) + 1 if checkpoint is not None and self._note.metrics else 1
        about = About(run.path.resolve().name, run.path.resolve(), first_step, told_config(config))
        self._keep(replace(self._note, id=self._tracker.start(about, self._note.id)))

    def _send(self) -> bool:
        """Send some of what is new; whether there was any."""
        news, after = new_numbers(self._run, self._note.metrics)
        if news:
            self._tracker.log(news)
        more = after > self._note.metrics
        if more:
            self._keep(replace(self._note, metrics=after))
        if self._samples:
            news, after = new_answers(self._run, self._note.samples)
            if news:
                self._tracker.log(news)
            if after > self._note.samples:
                self._keep(replace(self._note, samples=after))
                more = True
        return more

    def _keep(self, note: Note) -> None:
        note.write(self._run, self._name)
        self._note = note

    def _say(self, what: str, message: str) -> None:
        """Say it in the run's log, once."""
        if what not in self._said:
            self._said.add(what)
            self._run.add_to_log(f"{self._name}: {message}")

    @contextmanager
    def _late(self) -> Iterator[None]:
        """Say so when what is inside takes long."""
        message = f"no answer for {LATE_SECONDS:.0f} s; still waiting, and training goes on"
        timer = threading.Timer(LATE_SECONDS, self._say, ("late", message))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    os._exit(0)  # libraries may have left threads that never end
