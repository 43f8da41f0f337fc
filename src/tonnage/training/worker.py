"""One worker: ``python -m tonnage.training.worker RUN`` carries out the plan in a run directory and decides nothing.

Who it is comes from the environment, in the words of whatever started it (``parallel.place``). Under a launcher of ours
everything is prepared for it; under torchrun, mpirun or srun the workers first do that among themselves
(``training.external``), choose their threads, and print their errors.

SIGTERM or SIGUSR1 asks it to stop at the next step border and save; a second one, later than a moment, ends it at once.
``workers/stop-asked`` in the run directory asks for the same (``tonnage stop``).
Exit status: 0 done, 3 stopped as asked, 2 the user's mistake, 1 ours; in the last two cases the error is written into
the run directory, unless that is another launch's.
"""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import TYPE_CHECKING

from tonnage.errors import TonnageError, UserError, refused, user_error
from tonnage.files.visible import visible
from tonnage.files.writing import close_to_others
from tonnage.host.allocators import choose_allocators
from tonnage.host.parent import end_with
from tonnage.parallel.place import Place, find_place
from tonnage.rundir.directory import LAUNCHER, LAUNCHER_PROCESS, RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.tracking.trackers import Trackers
from tonnage.training.pusher import Pusher

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from tonnage.config import Config
    from tonnage.planning.plan import Plan

STOPPED, FAILED_GATE = 3, 4
"""Exit statuses of a worker whose run was stopped as asked, and is done but not within ``evaluate.gate``."""
NEEDED = (
    "tonnage.model.pretrained",
    "tonnage.training.external",
    "tonnage.training.work",
)
"""What a worker imports, with all that these import."""
WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable with which torch asks the driver's library, not CUDA, whether there are GPUs."""
REPORT_SECONDS = 120
"""For the page about a run, which takes one or two."""
ONE_REQUEST_SECONDS = 3.0


def main(path: str) -> int:
    """Run one worker to its end; returns its exit status."""
    close_to_others()
    _end_with_launcher()
    run, stop, place = RunDirectory(path), _StopFlag(), Place()
    try:
        place = find_place()
        with ExitStack() as stack:
            store = _admitted(run, place, stack)
            trackers, pusher = Trackers(run), Pusher(run)
            try:
                position = PositionFile(run.worker_position(place.rank))
                position.update(phase="import")
                work = _imported()
                config, plan = _read(run)
                if place.rank == 0:
                    trackers.start(config.track, samples=config.track_samples)
                    pusher.start(config.checkpoint.push)
                finished = work(run, config, plan, place.rank, position, stop.is_set, store)
            except Exception as caught:
                return _fail(run, place, caught, trackers, pusher, prints=store is not None)
            pusher.end()
            trackers.end("finished" if finished else "stopped")
            _report(run, place)
            if not finished:
                if store is not None:
                    from tonnage.training.external import stop_after_first

                    stop_after_first(store, place, REPORT_SECONDS)
                return STOPPED
            return FAILED_GATE if _fails_its_gate(run, place) else 0
    except Exception as caught:
        error = _explained(run, caught)
        _print_error(place, error)
        if os.environ.get(LAUNCHER) == "ray":  # which made sure that the directory is its own
            _write_error(run, place, error)
        return _exit_status(error)


def _admitted(run: RunDirectory, place: Place, stack: ExitStack) -> Store | None:
    """Wait until the directory is this launch's; the store that its workers share, None where a launcher of ours has
    seen to all of that.

    Raises:
        UserError: there is no run, or another launch has it.
    """
    if os.environ.get(LAUNCHER) == "local":
        return None
    place.announce()
    config, plan = _read(run)

    from tonnage.training.external import admitted

    return stack.enter_context(admitted(run, place, config, plan))


def _fail(
    run: RunDirectory, place: Place, caught: Exception, trackers: Trackers, pusher: Pusher, *, prints: bool
) -> int:
    """Leave what ended the work in the directory, which is this launch's; returns the exit status."""
    error = _explained(run, caught)
    _write_error(run, place, error)
    if prints:
        _print_error(place, error)
    pusher.end()
    trackers.end("failed")  # after the error is dated: those that other ranks have of this one's end are later
    _report(run, place)
    return _exit_status(error)


def _end_with_launcher() -> None:
    """End when the launcher that started this process is gone.

    The guardian does that as well, for a worker's own processes too; but it may be killed itself, and the launcher may
    be between starting a worker and telling it so.
    """
    if launcher := os.environ.get(LAUNCHER_PROCESS, ""):
        end_with(int(launcher))


def _fails_its_gate(run: RunDirectory, place: Place) -> bool:
    """Whether a run that torchrun, mpirun or srun started is not known to be within ``evaluate.gate``; says so then.
    The first worker asks the command that others would. Our own launchers do so when all workers have ended."""
    if place.rank or LAUNCHER in os.environ or not _read(run)[0].evaluate.gate:
        return False
    try:
        result = _tonnage("eval", run)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"not known whether the run is within evaluate.gate: {error}; ask tonnage eval {run.word}", flush=True)
        return True
    if result.returncode:
        print(result.stdout, result.stderr, flush=True)
    return result.returncode != 0


def _report(run: RunDirectory, place: Place) -> None:
    """Leave the page about a run that torchrun, mpirun or srun started: ours do so when all workers have ended."""
    if place.rank == 0 and LAUNCHER not in os.environ:
        with suppress(OSError, subprocess.TimeoutExpired):
            _tonnage("report", run)


def _tonnage(command: str, run: RunDirectory) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tonnage", command, str(run.path)]
    return subprocess.run(words, check=False, capture_output=True, text=True, errors="replace", timeout=REPORT_SECONDS)


def _explained(run: RunDirectory, error: Exception) -> Exception:
    """What the system refused, and memory that did not suffice, as the user's to mend; anything else as it is."""
    if _is_out_of_memory(error):
        with suppress(TonnageError, OSError):
            return _out_of_memory(run, error)
    if not isinstance(error, OSError):
        return error
    change = f"mend that, then go on from the last checkpoint: tonnage train --resume {run.word}"
    if error.filename:
        return refused(error, change=change) or error
    return refused(error, "what the run writes could not be written", run.path, change=change) or error


def _is_out_of_memory(error: Exception) -> bool:
    kind, message = type(error).__name__, str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # of memory that is asked of the system in one piece
        return True
    return kind in ("OutOfMemoryError", "MemoryError") or "DefaultCPUAllocator: can't allocate memory" in message


def _out_of_memory(run: RunDirectory, error: Exception) -> UserError:
    """That a device's memory, or the machine's, did not suffice, with what was planned."""
    from tonnage.planning.plan import Plan
    from tonnage.planning.words import describe

    plan = Plan.read(run.plan)
    layout, budget = plan.layout, plan.budget.memory
    if layout.device == "cpu":  # of which the budget is the machine's
        budget *= plan.workers
    message = str(error).strip().partition("\n")[0].partition(". GPU")[0]
    return user_error(
        found=f"out of memory: {message or type(error).__name__}",
        needed=f"{plan.choice.peak_bytes / 1e9:.2f} GB a worker as planned ({describe(layout)}), "
        f"of {budget / 1e9:.2f} GB: others took some since, or the plan is wrong",
        change=f"plan with less: memory.budget.device={round(0.85 * budget / 1e6)}MB, in the config or as the last "
        f"word of tonnage train --resume {run.word}",
        where="memory",
    )


def _write_error(run: RunDirectory, place: Place, error: Exception) -> None:
    """Leave the error for whoever started this worker; where that is impossible, in its output."""
    try:
        run.write_error(place.rank, error, _exit_status(error))
    except OSError:
        _print_error(place, error)


def _imported() -> Callable[..., bool]:
    """What a worker does (``work.work``), and all that it needs."""
    gc.disable()  # until all is made that stays: looking through it again and again takes a quarter of the start
    choose_allocators()

    from tonnage.training.work import work

    gc.freeze()  # modules are not looked through again
    return work


def _import_torchao() -> None:
    """Import what transformers does of torchao where it is installed, which asks then what GPUs can do: that would
    begin CUDA, so torch says that there are none, and none for Triton."""
    if importlib.util.find_spec("torchao") is None:
        return
    import torch
    from torch._inductor import config
    from torch.utils._triton import has_triton

    looked, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        with suppress(ImportError), config.patch(triton_disable_device_detection=True):
            importlib.import_module("torchao.prototype.mx_formats")
    finally:
        torch.cuda.is_available = looked
        has_triton.cache_clear()


def import_all(model_type: str = "") -> None:
    """Import what a worker needs and what a model of a type is made of, for workers that are forked from this process.

    Nothing is computed, and no device is looked at.
    """
    choose_allocators()
    was_on, before = gc.isenabled(), os.environ.get(WITHOUT_CUDA)
    gc.disable()  # of the millions of objects that imports make, all stay
    os.environ[WITHOUT_CUDA] = "1"  # or to ask whether there is a GPU would begin what cannot be forked
    try:
        _import_torchao()
        for name in NEEDED:
            importlib.import_module(name)
        # Other packages, whose kernels some families ask for when they are imported, may do anything.
        if model_type.isidentifier() and not any(map(importlib.util.find_spec, ("flash_attn", "kernels"))):
            with suppress(ImportError):  # a model's own code: the worker imports that itself
                importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        _fill_tables()
    finally:
        del os.environ[WITHOUT_CUDA]
        if before is not None:
            os.environ[WITHOUT_CUDA] = before
        if was_on:
            if not gc.get_freeze_count():  # to the oldest: to look through them once takes a quarter of a second
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _fill_tables() -> None:
    """Let libraries build the tables that each process needs once; each takes about a tenth of a second."""
    from numba.core.registry import cpu_target
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def _read(run: RunDirectory) -> tuple[Config, Plan]:
    """What was decided. Raises ``UserError`` where nothing was."""
    from tonnage.config import read_config
    from tonnage.planning.plan import Plan

    if not (run.config.exists() and run.plan.exists()):
        change = "write one first: tonnage train CONFIG --prepare"
        raise user_error("no run", "a run directory that this machine sees", change, str(run.path))
    return read_config(run.config, [], check_files=False), Plan.read(run.plan)


def _print_error(place: Place, error: Exception) -> None:
    text = f"error: {error}" if isinstance(error, TonnageError) else "".join(traceback.format_exception(error))
    with suppress(OSError):
        print(visible(f"worker {place.rank}: {text}"), file=sys.stderr, flush=True)


def _exit_status(error: Exception) -> int:
    return error.exit_status if isinstance(error, TonnageError) else 1


class _StopFlag:
    """Set by a signal; read at step borders.

    A scheduler signals the launcher and the workers at once, and the launcher passes its signal on: what comes within
    ``ONE_REQUEST_SECONDS`` of the first is the same request.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > ONE_REQUEST_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def is_set(self) -> bool:
        return self._since is not None


if __name__ == "__main__":
    exit_status = main(sys.argv[1])
    # Everything is written and closed. The threads of the libraries that are loaded here do not always survive the
    # interpreter's own end: one finished run in some hundred was seen to abort in it ("terminate called without an
    # active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)
