"""Small file systems in memory, for those who may mount them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A small file system in memory."""

    def __init__(self, path: Path, size: str) -> None:
        path.mkdir(parents=True)
        self.path = path
        self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def change(self, option: str) -> bool:
        """Mount it again with an option; whether that worked."""
        return self._mount("-o", f"remount,{option}", check=False)

    def _mount(self, *words: str, check: bool = True) -> bool:
        result = subprocess.run(["mount", *words, str(self.path)], capture_output=True, text=True, check=False)
        if check and result.returncode:
            pytest.skip(f"mounting is refused here: {result.stderr.strip()}")
        return result.returncode == 0


@contextmanager
def mounted(path: Path, size: str = "2m") -> Iterator[Disk]:
    """A disk at ``path`` as long as the context is open; skips the test where that is not allowed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount")
    disk = Disk(path, size)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk.path)], check=True)
