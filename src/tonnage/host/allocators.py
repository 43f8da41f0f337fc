"""How torch takes memory: said in the environment, before it is imported, to this process and those it starts."""

from __future__ import annotations

import os
from ctypes import CDLL
from pathlib import Path

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Variable of torch: large tensors on the CPU come in huge pages."""
DRIVER, MANAGEMENT = Path("/dev/nvidiactl"), "libnvidia-ml.so.1"
"""File of NVIDIA's driver, and its library for management, which some containers leave out."""
BALLOON, TAKES_BACK = Path("/sys/bus/virtio/drivers/virtio_balloon"), 5
"""Folder of the device by which a virtual machine shares memory with its host, and the bit of its features that says
whether the host takes back what is free."""
KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 64, "LRU_CACHE_CAPACITY": 1}
"""How many shapes oneDNN keeps code and scratch memory for: of products, and of each kind of convolution. A block has
no more, and every padded micro-batch has shapes of its own: of the 1,024 that each keeps by default, ten micro-batches
of a hybrid of 24 blocks had filled 230 MB. Code that is not kept takes 0.15 ms to make."""


def choose_allocators() -> None:
    """On a CPU large tensors in huge pages, where they pay. On a GPU segments that grow: what is freed in one stream
    others may need whole, and rows differ in length. What the user has said stays."""
    os.environ.setdefault(HUGE_PAGES, huge_pages())
    for name, most in KEPT.items():
        os.environ.setdefault(name, str(most))
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(os.environ) and _is_managed():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def huge_pages() -> str:
    """For ``HUGE_PAGES``. They cost fewer faults, but not on a virtual machine whose host takes back what has been free
    for a second, as it does with pages of that size: there it took 0.27 s to write to 206 MB again, and 0.12 s in small
    pages."""
    try:
        features = [path.read_text() for path in BALLOON.glob("*/features")]
    except OSError:  # some containers hide what the machine has
        features = []
    return "0" if any(of_device[TAKES_BACK : TAKES_BACK + 1] == "1" for of_device in features) else "1"


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
