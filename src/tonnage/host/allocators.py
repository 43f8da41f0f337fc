"""How torch takes memory: said in the environment, before it is imported, to this process and those it starts."""

from __future__ import annotations

import os


def choose_allocators() -> None:
    """On a CPU large tensors in huge pages, which cost fewer faults. On a GPU segments that grow: what is freed in one
    stream others may need whole, and rows differ in length. What the user has said stays."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
