"""Whether products of 16-bit numbers go through fp32 on this processor: where they are slower than those of fp32.

That is measured, and as it decides how results are rounded, it is measured once for all runs: one that goes on after a
failure must compute as it began, whoever else used the machine at the time. What was found is kept by processor and
version of torch in the user's cache directory; ``tonnage doctor --again`` measures it once more.

    products/FINGERPRINT-DTYPE.json
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tonnage.files.reading import read_json
from tonnage.files.writing import write_whole
from tonnage.host.cachedir import default_directory, kept, room_for, trusted
from tonnage.host.processor import processor
from tonnage.kernels.switches import is_on

HALVES = (torch.bfloat16, torch.float16)
PROBE, TURNS = 256, 25
"""Rows and columns of the products that are timed, and how often."""
PAUSE_SECONDS = 0.001
"""Between turns, so that not all of them fall into what somebody else does."""
SLOW = 1.25
"""A type goes through fp32 if its products take more than so many times as long as in fp32."""


def processor_is_slow(dtype: torch.dtype) -> bool:
    """Whether products of this type are slower on this processor than those of fp32, and so go through it; none do
    where that is switched off."""
    if dtype not in HALVES or not is_on("widening"):
        return False
    if dtype not in _slow:
        _slow[dtype] = _recalled(dtype)
    return _slow[dtype]


_slow: dict[torch.dtype, bool] = {}
"""What was found. Not ``functools.cache``: torch.compile looks through it, and would find a measurement to compile."""


def settle(dtype: torch.dtype, slow: bool) -> None:
    """Set the answer for this process: what the workers of a run agreed on. Does nothing where that is switched off."""
    if is_on("widening"):
        _slow[dtype] = slow


def forget(cache: Path | None = None) -> None:
    """Delete what was measured, so that it is measured again when next needed."""
    _slow.clear()
    for dtype in HALVES:
        with suppress(OSError):
            _file(dtype, cache).unlink()


def _recalled(dtype: torch.dtype) -> bool:
    path = _file(dtype)
    if (recorded := _read(path)) is not None:
        return recorded
    is_slow = _takes_longer(dtype)
    with kept(path, "products are measured again every time"), suppress(FileExistsError):
        room_for(path)  # of processes that measure at a time, the first one's counts for all
        record = {"processor": processor(), "torch": torch.__version__, "slow": is_slow}
        write_whole(path, json.dumps(record) + "\n", new=True)
    recorded = _read(path)
    return is_slow if recorded is None else recorded


def _file(dtype: torch.dtype, cache: Path | None = None) -> Path:
    identity = json.dumps([processor(), torch.__version__])
    fingerprint = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    name = f"{fingerprint}-{str(dtype).removeprefix('torch.')}.json"
    return trusted(default_directory() if cache is None else cache, "products", name)


def _read(path: Path) -> bool | None:
    """What a file says; None if there is none. One that does not read as it should is removed."""
    try:
        return bool(read_json(path)["slow"])
    except OSError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        with suppress(OSError):
            path.unlink()
        return None


def _takes_longer(dtype: torch.dtype) -> bool:
    """Than fp32, on one core, by turns; the least times count, as others may use the machine."""
    times: dict[torch.dtype, list[float]] = {torch.float32: [], dtype: []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _disable_current_modes():  # a model is weighed on tensors without content
            matrices = {kind: torch.ones(PROBE, PROBE, dtype=kind) for kind in times}
            for _ in range(TURNS):
                for kind, matrix in matrices.items():
                    start = time.perf_counter()
                    torch.mm(matrix, matrix)
                    times[kind].append(time.perf_counter() - start)
                time.sleep(PAUSE_SECONDS)
    finally:
        torch.set_num_threads(threads)
    return min(times[dtype]) > SLOW * min(times[torch.float32])
