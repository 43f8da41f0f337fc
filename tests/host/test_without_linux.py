"""What Linux alone has is not needed: neither its functions nor its files. Nothing of this is a proof of macOS."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.data.building.processes import SMALL_BYTES, num_processes
from tonnage.host.threads import available_cpus
from without_linux.no_linux import GONE

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_a_function_that_only_linux_has_is_asked_for_first() -> None:
    gone = {f"{module.__name__}.{name}" for module, names in GONE.items() for name in names}
    pattern = re.compile(rf"\b(?:{'|'.join(module.__name__ for module in GONE)})\.\w+")
    used = [(path, name) for path in SOURCES for name in gone & set(pattern.findall(path.read_text()))]
    assert len(used) >= 6
    for path, full in used:
        module, name = full.split(".")
        asked = "posix_fadvise" if "_FADV_" in name else name
        assert re.search(rf'(?:has|get)attr\({module}, "{asked}"', path.read_text()), (
            f"{path.relative_to(ROOT)}: {full}"
        )


def test_processes_are_counted_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert available_cpus() == {0, 1, 2}
    assert num_processes(SMALL_BYTES, 8) == 3


def test_windows_is_told_of_wsl() -> None:
    code = "import sys; sys.platform = 'win32'; import tonnage"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: found Windows, needed Linux or macOS: install tonnage inside WSL 2 (`wsl --install`), or use a "
        "container"
    )
