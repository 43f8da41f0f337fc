"""Loops that numba compiles for CPUs, kept for other processes where they may be.

To compile one takes seconds, so numba writes it beside the source or into the user's cache, as pickles. Where nothing
can be written, or what is there cannot be read or is not to be trusted, a loop is compiled in every process: that costs
time, and is said once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache
from numba.np.ufunc import parallel

from tonnage.host.cachedir import say_once, why_untrusted
from tonnage.kernels.tile_registers import AMX

# numba's own lock is a named semaphore, for processes that are forked while threads start, as none of ours is. glibc
# makes one of a file in /dev/shm, which stays there if the process is killed at that moment.
parallel._backend_init_process_lock = threading.RLock()

inner = partial(njit, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorates what loops call and Python does not: ways for Python to call it, which it would never take, are not
compiled."""
COMPILED_EACH_TIME = "loops are compiled anew in every process, which takes seconds"


class _Kept(FunctionCache):  # type: ignore[misc]
    """numba's cache of one function; its failures cost time and nothing else.

    What was compiled is used as long as all files that it may be compiled from are as they were. numba itself looks at
    the file of the loop alone, though functions and constants of other files are compiled into it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        file = self._cache_file
        file._source_stamp = (file._source_stamp, _sources())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for a signature; None if nothing was, or it cannot be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever half a pickle leads to
            _say(self.cache_path, f"cannot be read ({type(error).__name__}: {error})")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, if that is possible."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _say(self.cache_path, f"cannot be written ({error})")


@cache
def _sources() -> str:
    """A hash of all files that loops may be compiled from: kernels, and the formats and numbers of ``host``; and of
    whether they may use tile registers, which the system decides."""
    package, digest = Path(__file__).parents[1], hashlib.blake2b(str(AMX).encode(), digest_size=16)
    for file in sorted([*package.glob("kernels/*.py"), *package.glob("host/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def loop(function: Callable[..., Any]) -> Any:
    """Decorates a loop over ``prange``: compiled when it is first called, for all threads, without Python's lock."""
    compiled = njit(parallel=True, nogil=True, error_model="numpy")(function)
    try:
        cached = _Kept(function)
    except RuntimeError as error:  # numba has found no directory that it may write
        _say(Path(__file__).parent, f"cannot be written, nor can the user's cache ({error})")
        return compiled
    if why := why_untrusted(Path(cached.cache_path), owner_of=Path(__file__)):
        _say(cached.cache_path, f"is not used: {why}")
        return compiled
    compiled._cache = cached
    return compiled


def _say(directory: Path | str, what: str) -> None:
    say_once(f"{directory}: {what}; {COMPILED_EACH_TIME}; NUMBA_CACHE_DIR names another directory")
