"""How torch takes memory: chosen in the environment, before it is imported."""

from __future__ import annotations

import os


def choose_allocators() -> None:
    """Large tensors in huge pages, which cost fewer faults; on a GPU, segments that grow: what is freed in one stream,
    others may need whole. What the environment says already stays."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
