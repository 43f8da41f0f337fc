"""Runs on the device ``apart`` that are killed at random instants and go on until they are done.

    python tests/device/killed.py --kills 30 [--seed 0] [--result benchmarks/results/kills_apart.json]

Everything that is trained rests elsewhere, in turn: all on disk, and parameters in the host's memory with the rest on
disk. A worker is killed with SIGKILL some time after it has written a step, or while it starts, and another one goes on
from the last whole checkpoint, one of which is saved at every step. In the end every step's loss and norm and every
tensor of the last checkpoint must be those of a run that nobody killed and that has everything on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    HERE = Path(__file__).resolve().parent
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "parity")]

from ready import of_families, run_of, updated_by_host
from safetensors.torch import load_file

from tiny import llama_config, write_model
from tonnage.checkpoint.save import checkpoint_path
from tonnage.files.writing import write_json
from tonnage.host.processor import processor
from tonnage.rundir.directory import RunDirectory, complete_checkpoints

STEPS = 8
DISK = {"optimizer_tier": "disk", "gradient_tier": "disk"}
WAYS: dict[str, dict[str, Any]] = {
    "all on disk": {**DISK, "parameter_tier": "disk", "recompute": "selective"},
    "parameters in the host's memory": {**DISK, "parameter_tier": "host", "recompute": "full"},
}
FIRST_SECONDS, LATER_SECONDS = 12.0, 3.0
"""Within which a worker is killed: after it was started, or after the first step that it writes down."""


def main(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill so often; what came of it."""
    drawn, began = random.Random(seed), time.monotonic()
    written = of_families(
        folder,
        lambda _, path: write_model(path, llama_config()),
        sequences=2,
        kernels="plain",
        steps=STEPS,
        precision="bf16",
        optimizer={"lr": 3e-3, "clip": 0.5},
    )

    def run(**memory: Any) -> RunDirectory:
        made = run_of(written("llama", micro_batch=1, **memory))
        return updated_by_host(made) if "disk" in memory.values() else made

    reference, told = run(), Counter[str]()
    _ended(_started(reference), reference)
    while told["kills"] < kills:
        way = list(WAYS)[told["runs"] % len(WAYS)]
        one = run(**WAYS[way])
        while True:
            worker, when = _started(one), drawn.random()
            if told["kills"] == kills or not _killed(worker, one, when, told):
                _ended(worker, one)
                break
            told["kills"] += 1
            told[way] += 1
        told["runs"] += 1
        told["wrong"] += _differs(one, reference)
    return {
        "command": f"python tests/device/killed.py --kills {kills} --seed {seed}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": processor(),
        "seconds": round(time.monotonic() - began),
        **{name: told[name] for name in ("runs", "kills", "wrong", *WAYS, "before a step", "after a step")},
    }


def _started(run: RunDirectory) -> subprocess.Popen[bytes]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    tests = Path(__file__).resolve().parents[1]
    paths = [str(tests), str(tests / "parity"), os.environ.get("PYTHONPATH", "")]
    code = f"from device import apart_runs; apart_runs.main(['late', {str(run.path)!r}])"
    if there := complete_checkpoints(run.checkpoints):
        write_json(run.resume, {"checkpoint": there[-1].name})
    said = (run.path / "said").open("ab")
    environment = {**os.environ, **alone, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=said, stderr=said)


def _killed(worker: subprocess.Popen[bytes], run: RunDirectory, when: float, told: Counter[str]) -> bool:
    """Kill it: one in four before it has written a step. False where it has ended before."""
    before, began = len(run.read_metrics()), time.monotonic()
    early = when < 0.25
    while not early and worker.poll() is None and len(run.read_metrics()) == before:
        time.sleep(0.02)
    time.sleep(4 * when * FIRST_SECONDS if early else when * LATER_SECONDS)
    if worker.poll() is not None:
        return False
    worker.kill()
    worker.wait()
    stepped = len(run.read_metrics()) > before
    told["after a step" if stepped else "before a step"] += 1
    assert time.monotonic() - began < 300, (run.path / "said").read_text()
    return True


def _ended(worker: subprocess.Popen[bytes], run: RunDirectory) -> None:
    assert worker.wait() == 0, (run.path / "said").read_text()[-3000:]


def _differs(run: RunDirectory, reference: RunDirectory) -> bool:
    """Whether a step, written down once or twice, or a tensor of the last checkpoint is another."""
    steps = {one["step"]: (one["loss"], one["grad_norm"]) for one in reference.read_metrics() if "loss" in one}
    mine = [(one["step"], (one["loss"], one["grad_norm"])) for one in run.read_metrics() if "loss" in one]
    if {step for step, _ in mine} != steps.keys() or any(found != steps[step] for step, found in mine):
        return True
    for file in checkpoint_path(reference.checkpoints, STEPS).glob("*.safetensors"):
        got, want = load_file(checkpoint_path(run.checkpoints, STEPS) / file.name), load_file(file)
        if got.keys() != want.keys() or not all(tensor.equal(got[key]) for key, tensor in want.items()):
            return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = main(given.kills, given.seed, Path(temporary))
    print(json.dumps(found))
    if given.result is not None:
        given.result.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(found["wrong"]))
