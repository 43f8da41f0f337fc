"""The rooms of the package: every file can be imported, and none takes a name that belongs to the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVERY_SUBMODULE = """
import importlib, inspect, pkgutil, tonnage
from importlib.util import find_spec
for found in pkgutil.walk_packages(tonnage.__path__, "tonnage."):
    if not found.name.endswith("_triton") or find_spec("triton"):
        importlib.import_module(found.name)
print(*(name for name in ("plan", "train", "start", "open_run") if name in vars(tonnage)))
assert all(inspect.isfunction(getattr(tonnage, name)) for name in ("plan", "train", "start", "open_run"))
assert all(inspect.isclass(getattr(tonnage, name)) for name in ("Run", "Plan", "Session", "UserError"))
"""


@pytest.mark.slow
def test_every_submodule_can_be_imported_and_none_is_called_like_a_function_of_the_package() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_SUBMODULE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_drawing_of_the_rooms_is_checked(tmp_path: Path) -> None:
    old = tmp_path / "rooms.svg"
    old.write_text((ROOT / "docs" / "rooms.svg").read_text().replace(">planning<", ">plan<"))
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "rooms.py", "--check", old], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"python scripts/rooms.py {old}" in done.stderr


def test_the_pages_name_every_room_and_every_kernel() -> None:
    source, docs = ROOT / "src" / "tonnage", ROOT / "docs"
    rooms = {path.name.removesuffix(".py") for path in source.iterdir() if not path.name.startswith("_")} - {"py.typed"}
    assert set(re.findall(r"^\| `(\w+)` \|", (docs / "rooms.md").read_text(), re.MULTILINE)) == rooms
    named = re.findall(
        r"`([\w/.]+\.(?:py|js|jinja|yaml|svg))`",
        (docs / "rooms.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text(),
    )
    assert len(named) > 100
    assert [name for name in named if not (ROOT / name).exists() and not any(source.rglob(name))] == []
    page = (docs / "kernels.md").read_text()
    kernels = {path.name for path in (source / "kernels").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", page)) == kernels
    linked = re.findall(r"\]\((\.\./[^)#]+)", page)
    assert len(linked) > 5
    assert all((docs / path).exists() for path in linked)
