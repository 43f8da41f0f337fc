"""What Linux alone has is not needed: neither its functions nor its files. Nothing of this is a proof of macOS."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tonnage.data.building.processes import SMALL_BYTES, num_processes
from tonnage.host.threads import available_cpus
from without_linux.no_linux import GONE, TREES

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


RUN = f"""
import os, sys
from pathlib import Path
import tonnage
from tonnage.demo.folder import write_folder
pretends = "TONNAGE_TESTS_WITHOUT_LINUX" in os.environ
assert pretends == (not any(os.path.exists(tree) for tree in {TREES}))
from tonnage.launch.forkserver import can_fork
assert pretends != can_fork()
folder = write_folder(Path("demo"))
data = {{"train": str(folder.train), "validation": 0.01, "max_length": 128}}
tonnage.train(
    folder.model, data, init="random", precision="fp32", batch={{"tokens": 512}}, steps=6, seed=1, output="run",
    launch={{"workers": 2, "threads": 1}}, memory={{"optimizer_tier": "disk"}}, checkpoint={{"every": 4}},
)
"""


def losses(folder: Path, path: str) -> list[float]:
    """Of a run of two workers, with what rests on disk."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if "grad_norm" in record]


@pytest.mark.slow
def test_a_run_without_linux_has_the_same_bits(tmp_path: Path) -> None:
    path = os.environ.get("PYTHONPATH", "")
    here, elsewhere = (
        losses(tmp_path / "here", path),
        losses(tmp_path / "elsewhere", f"{ROOT}/tests/without_linux:{path}"),
    )
    assert len(here) == 6
    assert here == elsewhere
