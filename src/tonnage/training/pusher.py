"""What rank 0 has to do with pushing saves to the hub: start a process, and let it go."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from tonnage.rundir.directory import RunDirectory

MODULE = "tonnage.decide.pushing"
GRACE_SECONDS = 5.0


class Pusher:
    """The process that pushes a run's saves; none where nothing is pushed. Nothing here raises or waits for a push."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, repository: str | None) -> None:
        """Start it, if there is a repository; returns at once."""
        if repository is None:
            return
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(self._run.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            self._run.add_to_log(f"push: not started: {error.strerror}")

    def end(self) -> None:
        """End it, wherever it is: what has not arrived is sent later."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
