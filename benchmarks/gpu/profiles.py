"""Profiles (``tonnage profile``) of the 8B shape's adapters, over 16 and 4 bits, compiled:

    python -m benchmarks.gpu.profiles --folder FOLDER --output FILE

A step is four packs of 4,096 tokens. Weights are drawn where they lie.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.inputs import write_our_run

from tonnage.prove.material import SHAPES, bare_shape, data_of, full_rows
from tonnage.prove.record import write
from tonnage.rundir.directory import RunDirectory

ADAPTERS: dict[str, dict[str, Any]] = {"LoRA": {"rank": 32}, "LoRA over nf4": {"rank": 32, "quantize": "nf4"}}
PACKS, LENGTH, STEPS = 4, 4096, 2
TAKEN = 2 * STEPS + 1
"""One to warm up, two that are timed, two that are recorded."""
OPERATIONS = 25


def profile(folder: Path, shape: str, adapter: dict[str, Any], length: int = LENGTH) -> dict[str, Any]:
    """Where a step's time goes."""
    sizes = SHAPES[shape]
    config = {
        "model": bare_shape(folder / "model", **sizes),
        "init": "random",
        "data": data_of(full_rows(folder, PACKS * TAKEN, length, sizes["vocab_size"]), length),
        "batch": {"sequences": PACKS},
        "steps": TAKEN,
        "precision": "bf16",
        "compile": "on",
        "adapter": adapter,
        "launch": {"workers": 1},
    }
    run = RunDirectory(folder / f"run-{adapter.get('quantize', 'plain')}")
    write_our_run(run.path, config)
    worker = [sys.executable, "-m", "benchmarks.gpu.drawn", "tonnage.training.profiling", str(run.path), str(STEPS)]
    if subprocess.run(worker, check=False).returncode:
        raise SystemExit("\n".join(error.trace for error in run.read_errors()))
    figures: dict[str, Any] = json.loads((run.path / "profile-0.json").read_text())
    return figures | {"operations": figures["operations"][:OPERATIONS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    profiles = dict[str, Any]()
    for name, adapter in ADAPTERS.items():
        profiles[name] = profile(arguments.folder, "8B", adapter)
        write(arguments.output, {"tokens_a_step": PACKS * LENGTH, "profiles": profiles})


if __name__ == "__main__":
    main()
