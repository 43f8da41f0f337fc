"""Large tensors leave the process when they are freed, however many came before."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from pathlib import Path
from tonnage.training.memory import set_up_heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

set_up_heap(returns=sys.argv[1] == "yes")
torch.ones(24 << 20, dtype=torch.uint8)  # glibc learns from this that 24 MB is a common size
kept = []
before = resident()
for _ in range(20):
    large = torch.ones(20 << 20, dtype=torch.uint8)
    kept.append(torch.ones(70_000, dtype=torch.uint8))  # lies behind it on the heap
    del large
    large = [torch.ones(size << 20, dtype=torch.uint8) for size in (20, 8)]
    kept.append(torch.ones(70_000, dtype=torch.uint8))
    del large
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_what_is_freed_is_given_back() -> None:
    left = {
        how: int(subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True).stdout)
        for how in ("no", "yes")
    }
    assert left["yes"] < 8 << 20
    assert left["no"] > 2 * left["yes"]
