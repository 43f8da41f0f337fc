"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def end_with(parent: int) -> None:
    """Let the system kill this process when its parent ends, if it has not already (Linux; nothing elsewhere)."""
    if sys.platform != "linux":
        return
    control(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def control(what: int, value: int | bytes) -> None:
    """``prctl``: change how the system treats or names this process."""
    ctypes.CDLL(None).prctl(what, value, 0, 0, 0)
