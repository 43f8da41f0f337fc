"""Which processor this is, as the system says."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from tonnage.host.control_groups import read

FEATURES = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "sve", "bf16", "asimdhp", "i8mm"}
)
"""Instruction sets that matrix products may use, by Linux's names."""


@cache
def processor() -> tuple[str, tuple[str, ...]]:
    """Its name, and those of ``FEATURES`` that it has, sorted."""
    info = read(Path("/proc/cpuinfo"))
    return _name(info), tuple(sorted(_features(info)))


def _name(info: str) -> str:
    found = re.search(r"^(?:model name|Model|cpu)\s*:\s*(.+)$", info, re.MULTILINE)
    if found:
        return " ".join(found[1].split())
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _features(info: str) -> frozenset[str]:
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    return FEATURES & frozenset(found[1].split()) if found else frozenset()
