"""How the libraries that compute take memory, and how their threads wait: said in the environment, before they are
imported, to this process and those it starts."""

from __future__ import annotations

import os
import sys
from ctypes import CDLL
from pathlib import Path

DRIVER, MANAGEMENT = Path("/dev/nvidiactl"), "libnvidia-ml.so.1"
"""File of NVIDIA's driver, and its library for management, which some containers leave out."""
CACHED_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 64, "LRU_CACHE_CAPACITY": 1}
"""How many shapes oneDNN keeps code and scratch memory for: of products, and of each kind of convolution. A block has
no more, and every padded micro-batch has shapes of its own: of the 1,024 that each keeps by default, ten micro-batches
of a hybrid of 24 blocks had filled 230 MB. Code that is not kept takes 0.15 ms to make."""
SPINS = "GOMP_SPINCOUNT"
WAITING = {SPINS: "1000", "KMP_BLOCKTIME": "1"}
"""How long a thread of OpenMP spins for the others before it sleeps: turns of GNU's, milliseconds of LLVM's and
Intel's. 1,000 turns take 0.02 to 0.05 ms, about what lies between two operations; GNU's spin so long where threads
outnumber cores. By default it is 300,000, some 15 ms: a core that spins is not idle, so the system never gives it the
thread that is waited for, which shares its own core with somebody else's. Beside one busy process on two cores a step
took four times as long as alone (``benchmarks/shared_machine.py``)."""


def configure_libraries() -> None:
    """On a CPU large tensors in huge pages, which cost fewer faults. On a GPU segments that grow: what is freed in one
    stream others may need whole, and rows differ in length. Threads that wait leave their cores to others soon. What
    the user has said stays."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    for name, most in CACHED_SHAPES.items():
        os.environ.setdefault(name, str(most))
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        for name, spins in WAITING.items():
            os.environ.setdefault(name, spins)
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(os.environ) and _is_managed():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def waits_for_long() -> bool:
    """Whether torch is here already and its threads spin as they do by default, which nothing changes any more: not in
    a copy of this process either."""
    return "torch" in sys.modules and {SPINS, "OMP_WAIT_POLICY"}.isdisjoint(os.environ)


def _is_managed() -> bool:
    """Whether the management library answers, or there is no driver whose library it is. torch asks it before it makes
    a segment that grows, and fails where no answer comes."""
    if not DRIVER.exists():
        return True
    try:
        library = CDLL(MANAGEMENT)
        answers = library.nvmlInit_v2() == 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return False
    return bool(answers)
