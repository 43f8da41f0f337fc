"""Kills the workers when their launcher is gone: a small process of its own, standard library only.

The launcher holds the other end of this process's standard input and writes one line for every process
group it starts (``+1234``) and every one that has ended (``-1234``). However the launcher ends, SIGKILL
included, the kernel closes that pipe; end of file means that the groups still listed have no master, and
they are killed. Workers need to know nothing of it, a worker that hangs or is stopped is killed all the
same, and so are the processes a worker started. Works on every Unix.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
