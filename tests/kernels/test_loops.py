"""Loops are kept where that is possible; where it is not they are compiled each time, and that is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tonnage

CODE = """
import os, sys
import numpy as np
from tonnage.kernels import loops
from numba import prange
from numba.core.caching import IndexDataCacheFile

def add(x):
    for i in prange(len(x)):
        x[i] += 1

if sys.argv[1] == "full":
    def refuse(*_):
        raise OSError(28, os.strerror(28))
    IndexDataCacheFile.save = refuse
if sys.argv[1] == "nowhere":
    from numba.core import caching
    caching.CacheImpl._locator_classes = []
if sys.argv[1] == "semaphores":
    from multiprocessing import synchronize
    synchronize.SemLock.__init__ = None
values = np.zeros(3)
loops.loop(add)(values)
assert values.tolist() == [1, 1, 1]
"""


def compiled(folder: Path, cache: Path, fault: str = "") -> str:
    """Compile a loop in a process of its own; what it says."""
    if not (code := folder / "code.py").exists():  # numba 0.62 keeps nothing of a file that is newer
        code.write_text(CODE)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, str(code), fault]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_loops_are_kept_and_found_again(tmp_path: Path) -> None:
    assert compiled(tmp_path, tmp_path / "cache") == ""
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nb*")}
    assert len(kept) == 2
    assert compiled(tmp_path, tmp_path / "cache") == ""
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_what_was_compiled_of_other_code_is_not_used(tmp_path: Path) -> None:
    """Loops have others' functions and numbers in them, which an update changes."""
    other = tmp_path / "other"
    shutil.copytree(Path(tonnage.__file__).parent, other / "tonnage", ignore=shutil.ignore_patterns("__pycache__"))
    cache, code = tmp_path / "cache", tmp_path / "code.py"
    code.write_text(CODE)

    def stored() -> bytes:
        environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(other)}
        subprocess.run([sys.executable, str(code), ""], check=True, env=environment)
        (index,) = cache.rglob("*.nbi")
        return index.read_bytes()

    before = stored()
    assert stored() == before
    with (other / "tonnage" / "kernels" / "tiles.py").open("a") as file:
        file.write("# another\n")
    assert stored() != before


def test_threads_start_without_a_file_that_a_kill_would_leave(tmp_path: Path) -> None:
    assert compiled(tmp_path, tmp_path / "cache", "semaphores") == ""


@pytest.mark.parametrize("fault", ["full", "nowhere", "damaged", "open to all"])
def test_a_cache_that_cannot_be_used_costs_time_and_is_said_once(tmp_path: Path, fault: str) -> None:
    cache = tmp_path / "cache"
    if fault in ("damaged", "open to all"):
        assert compiled(tmp_path, cache) == ""
        (index,) = cache.rglob("*.nbi")
        if fault == "damaged":
            index.write_bytes(index.read_bytes()[:10])
        else:
            index.parent.chmod(0o777)
    said = compiled(tmp_path, cache, fault)
    assert "loops are compiled anew in every process" in said
    assert said.count("NUMBA_CACHE_DIR names another directory") == 1 + (fault == "damaged")
