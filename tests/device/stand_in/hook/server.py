"""Carries out commands of tonnage under the stand-in, each in a copy of this process: imports are most of what a short
command costs.

A line in is JSON: ``words``, ``directory``, ``environment`` (all of it), ``given`` and ``output`` (files of its input
and output), ``seconds``. A line out is the exit status, 124 where the command took longer than that.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pkgutil import walk_packages
from typing import Any, NoReturn

LOOK_SECONDS = 0.02


def main() -> None:
    """Serve until nobody asks any more."""
    importlib.import_module("tonnage.training.worker").import_all("llama")
    for room in ("tonnage.cli", "tonnage.decide"):
        for found in walk_packages(importlib.import_module(room).__path__, f"{room}."):
            importlib.import_module(found.name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(_done(json.loads(line)), flush=True)


def _done(asked: dict[str, Any]) -> int:
    """The exit status of a command."""
    sys.stdout.flush()
    if not (measured := os.fork()):
        _pretend_measured(asked["environment"])
    os.waitpid(measured, 0)
    if not (child := os.fork()):
        _carry_out(asked)
    end = time.monotonic() + asked["seconds"]
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(LOOK_SECONDS)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def _pretend_measured(environment: dict[str, str]) -> NoReturn:
    """Say that the pretended machine was measured, and is as is assumed of any: or first plans would measure it."""
    try:
        os.environ.clear()
        os.environ.update(environment)
        from pretended import pretend_measured
        from tonnage.doctor.cache import load_machine

        if load_machine(".") is None:
            pretend_measured()
    finally:
        os._exit(0)


def _carry_out(asked: dict[str, Any]) -> NoReturn:
    status: object = 1
    try:
        os.setsid()
        os.chdir(asked["directory"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        for number, (path, how) in enumerate(
            ((asked["given"], os.O_RDONLY), (asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        ):
            opened = os.open(path, how, 0o644)
            os.dup2(opened, number)
            if number:
                os.dup2(opened, 2)
            os.close(opened)
        sys.stdin = os.fdopen(0, closefd=False)
        for name in os.environ["STAND_IN_WATCHED_BY"].split():
            importlib.import_module(name)
        sys.argv = ["tonnage", *asked["words"]]
        status = 0
        importlib.import_module("tonnage.cli.main").main()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    main()
