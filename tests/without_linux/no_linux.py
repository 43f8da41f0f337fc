"""Takes from a Python what Linux has and macOS has not; this folder on ``PYTHONPATH`` does it to those it starts, too.

Gone are functions of the standard library and of the C library, and all of ``/proc`` and ``/sys``. Modules of tonnage
see ``sys.platform`` as it is on macOS; others see the truth, as their libraries are those of Linux. What is different
there besides (Accelerate instead of oneDNN, how processes are scheduled, dynamic libraries) cannot be seen so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

GONE: dict[ModuleType, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "pidfd_open"),
        *("O_DIRECT", "O_TMPFILE", "O_PATH", "pipe2", "copy_file_range", "splice", "getrandom", "eventfd", "setns"),
        *("POSIX_FADV_DONTNEED", "POSIX_FADV_WILLNEED", "SCHED_BATCH", "SCHED_IDLE", "getxattr", "setxattr"),
    ),
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_POPULATE_READ", "MADV_REMOVE", "MADV_DONTFORK", "MAP_POPULATE"),
    resource: ("prlimit", "RUSAGE_THREAD", "RLIMIT_MSGQUEUE", "RLIMIT_NICE"),
    select: ("epoll",),
    signal: ("sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGPOLL"),
    socket: ("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK"),
    time: ("CLOCK_BOOTTIME", "pthread_getcpuclockid"),
}
LIBRARY = frozenset({"prctl", "mallopt", "malloc_trim", "sync_file_range", "sched_getcpu", "fallocate", "mallinfo2"})
TREES = ("/proc", "/sys")


def in_trees(path: Any) -> bool:
    """Whether a path lies where only Linux has something."""
    if not isinstance(path, str | os.PathLike):
        return False
    words = os.fspath(path)
    return isinstance(words, str) and words.startswith(TREES) and (words + "/").split("/")[1] in ("proc", "sys")


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Of files that are opened and folders that are listed."""
    if event in ("open", "os.listdir", "os.scandir") and arguments and in_trees(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(arguments[0]))


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """``os.stat`` and its like, which see nothing there."""

    def without(path: Any, *more: Any, **options: Any) -> Any:
        if in_trees(path):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *more, **options)

    return without


class Elsewhere(ModuleType):
    """``sys`` of another system."""

    platform = "darwin"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(sys, name, value)


class OfTonnage(MetaPathFinder):
    """Gives its modules that ``sys``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname.partition(".")[0] == "tonnage" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if module.__dict__.get("sys") is sys:
                    module.__dict__["sys"] = elsewhere

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


seen = ctypes.CDLL.__getattr__


def of_library(self: ctypes.CDLL, name: str) -> Any:
    """A function of a library, if macOS has it."""
    if name in LIBRARY:
        raise AttributeError(name)
    return seen(self, name)


elsewhere = Elsewhere("sys")


def begin() -> None:
    """From now on, in this process."""
    for source, names in GONE.items():
        for name in names:
            if hasattr(source, name):
                delattr(source, name)
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    ctypes.CDLL.__getattr__ = of_library  # type: ignore[method-assign]
    os.stat, os.lstat, os.readlink = hidden(os.stat), hidden(os.lstat), hidden(os.readlink)
    sys.addaudithook(refuse)
    sys.meta_path.insert(0, OfTonnage())
    os.environ["TONNAGE_TESTS_WITHOUT_LINUX"] = "1"
