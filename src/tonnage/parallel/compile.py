"""Compile blocks: each transformer block's forward and backward pass as a few fused kernels (``torch.compile``).

Blocks are alike, so one is compiled and the others find its code in the cache. Attention over documents stays as it
is: its shapes change with every pack, and its kernels are fused already; a block is compiled in two pieces around it.
Numbers of tokens are symbolic, so that a pack of another length compiles nothing anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

Compile = Literal["auto", "on", "off"]


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Let each block compile itself when it first runs. Names of parameters do not change."""
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)
