"""The dated results of a walk."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from device.stand_in import waits
from device.stand_in.environments import FOLDER, ROOT
from device.stand_in.machine import Served
from device.stand_in.settings import settings
from device.stand_in.walk import Walked, make_models, walk

VERSIONS = (
    "import importlib.metadata as m, json, torch;"
    "print(json.dumps({n: m.version(n) for n in ('transformers', 'triton')} | {'torch': torch.__version__}))"
)


def write(versions: list[str], work: Path, only: str, output: Path | None) -> int:
    """Walk all settings whose names have ``only``, on each version of torch; returns 1 where one ended otherwise than
    expected. With an ``output``, results are written there."""
    results = dict[str, Any]()
    good = True
    for version in versions:
        models = work / version / "models"
        make_models(models, version)
        walked, shapes = list[Walked](), list[tuple[Walked, dict[str, Any]]]()
        with Served(version) as served:
            for setting in settings():
                if only in setting.name:
                    walked.append(walk(setting, served, models, work / version / "walks" / _folder(setting.name)))
                    _tell(version, walked[-1])
            if not only:
                shapes = waits.counted(served, models, work / version / "shapes", [])
        good = good and all(one.went_well for one in (*walked, *(one for one, _ in shapes)))
        results[version] = {
            "versions": json.loads(_said([str(FOLDER / version / "bin" / "python"), "-c", VERSIONS])),
            "settings": {one.name: one.as_json() for one in walked},
            "shapes": {one.name: {**one.as_json(), "waits": places} for one, places in shapes},
        }
        if output is not None:
            output.write_text(json.dumps(_dated(results), indent=1) + "\n")
    return 0 if good else 1


def _tell(version: str, one: Walked) -> None:
    print(f"{version} {one.seconds:6.1f} s  {one.name}: {one.outcome}", flush=True)


def _folder(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _dated(results: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": "settings walked without a GPU, under tests/device/stand_in: kernels do nothing, so no number of a "
        "tensor and no time is told",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": _said(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]),
        "python": platform.python_version(),
        "torch": results,
    }
