"""Workers for tests, forked from a process that has imported everything: that is most of what a short one costs.

As a module: ``train`` and ``work`` have groups of workers do something, one group after another, and ``tonnage`` has a
command line carried out in a process of its own. As a script: the
process that forks them, which ``work`` starts once and which ends with its standard input. A line in is
``["train_runs", [[2, ["RUN", "RUN"]], [3, ["RUN"]]]]``: ``main`` of which module, and for each group how many workers
and what they are told. A line out is what they printed and how one of them failed (empty if none did), in JSON.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO

from tonnage.launch.local import reserved_port
from tonnage.rundir.directory import RunDirectory

SECONDS = 400.0
"""How long a call may take."""


def train(*groups: tuple[int, Iterable[RunDirectory]], small_tiles: bool = False) -> None:
    """Train written runs: each group is so many workers, which take one run after another.

    ``small_tiles``: with tiles so small that the state of a tiny model is many of them.
    """
    paths = ((workers, [str(run.path) for run in runs]) for workers, runs in groups)
    work("small_tiles" if small_tiles else "train_runs", *paths)


def work(module: str, *groups: tuple[int, list[str]]) -> str:
    """Have groups of workers run ``main`` of a module of the tests, and return what they print.

    What a worker fails with fails the test.
    """
    forking = _started()
    assert forking.stdin is not None
    assert forking.stdout is not None
    forking.stdin.write(json.dumps([module, groups]) + "\n")
    forking.stdin.flush()
    told = select.select([forking.stdout], [], [], SECONDS)[0]
    answer = forking.stdout.readline() if told else ""
    if not answer:
        _stop(forking)
        _started.cache_clear()
    assert answer, "the process that forks workers ended" if told else f"workers did not end within {SECONDS:.0f} s"
    printed, failure = json.loads(answer)
    assert not failure, failure
    return str(printed)


def tonnage(*words: str | Path, cwd: Path | None = None, said: str = "", **environment: str) -> CompletedProcess[str]:
    """What ``tonnage WORDS`` does in a process of its own that need not import anything.

    ``said`` is its standard input; ``environment`` is added to the environment of this process. What it starts itself,
    such as the workers of a run, are processes as ever.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "asked.json")
        arguments = [str(word) for word in words]
        path.write_text(
            json.dumps(
                {"words": arguments, "cwd": str(cwd or Path.cwd()), "environment": {**os.environ, **environment}}
            )
        )
        Path(folder, "in").write_text(said)
        work("commanded", (1, [folder]))
        status = int(Path(folder, "status").read_text())
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return CompletedProcess(["tonnage", *arguments], status, out, err)


@cache
def _started() -> subprocess.Popen[str]:
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parent), str(here.parent / "parity"), os.environ.get("PYTHONPATH", "")])
    forking = subprocess.Popen(
        [sys.executable, str(here)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )
    atexit.register(_stop, forking)
    return forking


def _stop(forking: subprocess.Popen[str]) -> None:
    """The process, and whatever it forked."""
    if forking.poll() is None:
        os.killpg(forking.pid, signal.SIGKILL)
        forking.wait()


def serve() -> None:
    """Do what is asked, line by line, until nobody asks any more."""
    import train_runs  # noqa: F401
    from numba.core.registry import cpu_target
    from transformers import GPTNeoXForCausalLM, LlamaForCausalLM  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import commanded  # noqa: F401

    cpu_target.target_context.refresh()  # what numba, and what transformers, would look up in every process
    cpu_target.typing_context.refresh()
    get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()  # so that looking for garbage copies no page in every worker
    for line in sys.stdin:
        module, groups = json.loads(line)
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
            fails = any(_fails(module, size, told, printed, said) for size, told in groups)
            failure = (_read(said)[-8000:] or "a worker was killed") if fails else ""
            print(json.dumps([_read(printed), failure]), flush=True)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _fails(module: str, size: int, told: list[str], printed: IO[str], said: IO[str]) -> bool:
    """Whether a worker of a group does; the others are ended, as they may wait for it."""
    with reserved_port() as port:
        children = {_forked(module, told, rank, size, port, printed, said) for rank in range(size)}
        fails = False
        while children:
            pid, status = os.wait()
            children.discard(pid)
            if status and not fails:
                fails = True
                for child in children:
                    os.kill(child, signal.SIGKILL)
        return fails


def _forked(module: str, told: list[str], rank: int, size: int, port: int, printed: IO[str], said: IO[str]) -> int:
    if child := os.fork():
        return child
    status = 1
    try:
        os.dup2(printed.fileno(), 1)
        os.dup2(said.fileno(), 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        importlib.import_module(module).main(told)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
