"""The proof (``tonnage doctor --prove``) on pretended GPUs, for what there is to see on them: that every piece comes to
its end, refusals, waits, graphs, planned peaks. Whatever depends on numbers or seconds says that the device computes
nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from device.stand_in.environments import FOLDER
from device.stand_in.machine import Pretended
from device.stand_in.shapes import HOST_GB, SPARED
from tonnage.prove.pieces import PIECES

WHAT = (
    "the proof, carried out without a GPU under tests/device/stand_in: kernels do nothing, so what depends on a number "
    "of a tensor or on a time is skipped"
)
LIMIT_SECONDS = 1500
"""Of a piece: two processors here do the host's part of what sixteen would, beside other work."""
PROVED = 2
"""Statuses of the proof from here on are no verdict."""
LARGE = ("memory", "memory elsewhere", "speed", "speed 8B", "speed 8B adapters", "host tiers", "small card", "beside")
"""Pieces of real shapes, which get no real memory for them."""


def prove(versions: list[str], card: str, devices: int, work: Path, only: list[str], output: Path | None) -> int:
    """Carry it out on each version of torch, or ``only`` some pieces; returns 1 where a check failed or a piece broke
    off. With an ``output``, the records are written there."""
    asked = [piece.name for piece in PIECES if piece.name in only or not only]
    chosen = [[name for name in asked if (name in LARGE) is large] for large in (False, True)]
    plain = Pretended(card, devices, watched_by=())
    spared = Pretended(card, devices, HOST_GB, watched_by=("shapes",), more=SPARED)
    good, found = True, dict[str, Any]()
    if output is not None and output.exists():
        found = json.loads(output.read_text())["torch"]
    for version in versions:
        folder = work / version / "proof"
        folder.mkdir(parents=True, exist_ok=True)
        for on, names in zip((plain, spared), chosen, strict=True):
            words = ["--directory", str(folder), "--gpus", str(devices), "--limit", str(LIMIT_SECONDS)]
            words += [word for name in names for word in ("--only", name)]
            command = [str(FOLDER / version / "bin" / "python"), "-m", "tonnage.prove", *words]
            status = subprocess.run(command, env=on.environment(version), check=False).returncode if names else 0
            if status >= PROVED:
                raise SystemExit(f"the proof ended with status {status}")
            good = good and not status
        found[version] = json.loads((folder / "tonnage-prove" / "prove.json").read_text())
        if output is not None:
            output.write_text(json.dumps({"what": WHAT, "torch": found}, indent=1) + "\n")
    return 0 if good else 1
