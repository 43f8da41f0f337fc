"""The dated results of a walk."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from device.stand_in import waits
from device.stand_in.environments import FOLDER, ROOT
from device.stand_in.machine import Served
from device.stand_in.settings import settings
from device.stand_in.shapes import shapes
from device.stand_in.walk import Walked, folder_of, make_models, walk

WHAT = (
    "settings walked without a GPU, under tests/device/stand_in: kernels do nothing, so no number of a tensor and no "
    "time is told"
)
VERSIONS = (
    "import importlib.metadata as m, json, torch;"
    "print(json.dumps({n: m.version(n) for n in ('transformers', 'triton')} | {'torch': torch.__version__}))"
)


def write(versions: list[str], work: Path, only: str, output: Path | None) -> int:
    """Walk the settings and shapes in whose names ``only`` is found, on each version of torch; returns 1 where one
    ended otherwise than expected. With an ``output``, results are written there, beside what it has of others."""
    good = True
    for version in versions:
        results = _Results(version, output)
        models = work / version / "models"
        make_models(models, version)
        with Served(version) as served:
            for setting in settings():
                if re.search(only, setting.name):
                    one = walk(setting, served, models, folder_of(work / version / "walks", setting))
                    results.add("settings", one)
                    good = good and one.went_well
            for shape in shapes("waits"):
                if re.search(only, shape.name):
                    one, places = waits.counted(shape, served, models, work / version / "shapes")
                    results.add("shapes", one, {"waits": places})
                    good = good and one.went_well
    return 0 if good else 1


class _Results:
    """What becomes of a version's settings, written as it comes."""

    def __init__(self, version: str, output: Path | None) -> None:
        self._version, self._output = version, output
        self._facts = json.loads(_said([str(FOLDER / version / "bin" / "python"), "-c", VERSIONS]))
        self._commit = _said(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])

    def add(self, kind: str, one: Walked, more: Mapping[str, Any] | None = None) -> None:
        """Say what became of a setting or a shape, and write it down."""
        print(f"{self._version} {one.seconds:6.1f} s  {one.name}: {one.outcome}", flush=True)
        if self._output is None:
            return
        found: dict[str, Any] = {"what": WHAT, "python": platform.python_version(), "torch": {}}
        if self._output.exists():
            found = json.loads(self._output.read_text())
        there = found["torch"].setdefault(self._version, {"settings": {}, "shapes": {}})
        there["versions"] = self._facts
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        there[kind][one.name] = {**one.as_json(), **(more or {}), "date": date, "commit": self._commit}
        self._output.write_text(json.dumps(found, indent=1) + "\n")


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
