"""Tests see ``tests/`` on the path (``import tiny``) and use one thread each, as they may run side by side.

What the user's cache holds (measurements of this machine among them) is not seen: it would decide plans. The tests' own
says that this machine was measured, and is as is assumed of any: or every first plan would measure it.

Signals that whoever started the tests ignores (a background job ignores Ctrl-C, nohup a lost terminal) would be
ignored by every process that the tests start, so they get their usual meaning back.

Drawn examples are the same in every run; ``--hypothesis-profile=explore`` draws others.

Side by side, each process of ``make test`` keeps to a core of its own, with all that it starts: workers that wait for
each other's small messages take five times as long on cores where others are busy. Slow tests wait for other things
more than they compute, and may take any core that is free.
"""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from pretended import pretend_measured

settings.register_profile("same", derandomize=True, database=None)
settings.register_profile("explore")
settings.load_profile("same")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # plans and numbers that tests expect are those of processors
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have that of the process that started them
    os.environ["TONNAGE_CACHE"] = tempfile.mkdtemp(prefix="tonnage-tests-")
    atexit.register(shutil.rmtree, os.environ["TONNAGE_CACHE"], ignore_errors=True)
LONGEST = ("launch", "page", "parity", "pulse")
"""Directories whose files start processes that train, or wait for them longest."""
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    process = os.environ.get("PYTEST_XDIST_WORKER")
    if process and config.option.markexpr == "not slow" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(process.removeprefix("gw")) % len(cores)]})
    pretend_measured()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Loops are compiled before tests run side by side, which would each compile them."""
    if session.config.getoption("numprocesses", None):
        imports = "import torch; from tonnage.model.attention import compile_loops"
        calls = [f"{imports}; compile_loops(torch.{dtype})" for dtype in ("float32", "bfloat16")]
        compiling = [subprocess.Popen([sys.executable, "-c", call]) for call in calls]
        statuses = [process.wait() for process in compiling]
        if any(statuses):
            raise pytest.UsageError("tonnage's loops could not be compiled")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Of a test that takes arguments CI runs the quick combinations, or else the first slow one: the others are of the
    matrix, whichever of them somebody names."""
    made = yield
    combinations = [item for item in made if not item.get_closest_marker("matrix")] if isinstance(made, list) else []
    slow = [item for item in combinations if item.get_closest_marker("slow")]
    for item in slow if len(slow) < len(combinations) else slow[1:]:
        item.add_marker("matrix")
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest go first: processes take whole files, in this order, and none waits for the last. What is
    of the matrix is slow, too."""
    for item in items:
        if item.get_closest_marker("matrix"):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


@pytest.fixture(autouse=True)
def hears_of_interrupts() -> Iterator[None]:
    """A command that was carried out in this process leaves it deaf to Ctrl-C, as it has ended."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """A test that uses more threads leaves as many as before: small products of many threads wait more than they
    compute, and all tests after it would."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 1
    yield
    if "torch" in sys.modules and sys.modules["torch"].get_num_threads() != before:
        from tonnage.kernels.threads import use_threads

        use_threads(before)
