"""What loops compiled when they are first used compute does not depend on which process compiled them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib
import torch
from tonnage.kernels.norms import rms_norm
from tonnage.kernels.softmax import softmax_loss

torch.manual_seed(0)
logits, targets, weights = torch.randn(64, 50304).bfloat16(), torch.randint(50304, (64,)), torch.rand(64)
losses = softmax_loss(logits, targets, weights, 1.0, wants_gradient=True)
inputs, weight = torch.randn(512, 601).bfloat16().requires_grad_(), torch.rand(601).bfloat16().requires_grad_()
outputs = rms_norm(inputs, weight, 1e-6)
gradients = torch.autograd.grad(outputs, (inputs, weight), torch.randn_like(outputs))
for tensor in (losses, logits, outputs.detach(), *gradients):
    print(hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest())
"""


@pytest.mark.matrix
def test_loops_just_compiled_and_from_the_cache_give_the_same_bits(tmp_path: Path) -> None:
    """Or the first run on a machine, resumed, would not be what it was."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert list(tmp_path.rglob("*.nbi"))
    assert len(runs[0].stdout.split()) == 5
    assert runs[0].stdout == runs[1].stdout
