"""The same bits from run to run on a device whose fastest kernels add in whatever order they finish."""

from __future__ import annotations

import os

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable of cuBLAS: with workspaces of fixed sizes its products are the same every time."""
FILLS = "fill_uninitialized_memory"
"""Setting of torch, by which all memory is written to before it is used."""
FIXED = (":4096:8", ":16:8")


def compute_the_same(device: torch.device) -> None:
    """Let this process compute with kernels that add in one order, attention's backward pass among them.

    Before the first product. An operation that has no such kernel raises ``RuntimeError``. On a CPU nothing is
    changed: there every kernel adds in one order.
    """
    if device.type == "cpu":
        return
    if os.environ.get(WORKSPACE) not in FIXED:
        os.environ[WORKSPACE] = FIXED[0]
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, FILLS, False)  # nothing here reads what it has not written
