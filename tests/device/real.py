"""Walk what runs on one GPU on the GPU that is there, several settings at a time.

    python -m tests.device.real --output benchmarks/results/gpu_walk.json

The settings are those of the stand-in (``stand_in/settings.py``) that take one device; what they should end with is the
same. Nothing pretends here: kernels run, and what a setting trains is real.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device.stand_in.environments import ROOT
from device.stand_in.machine import Pretended, Served
from device.stand_in.settings import Setting, settings
from device.stand_in.walk import Walked, folder_of, walk

WHAT = "settings of one GPU, walked on a real one"
LONGEST = ("compile", "talked", "evaluated", "profile")
"""What takes longest is begun first."""


class Here(Served):
    """Commands of tonnage, carried out on this machine as it is."""

    def __init__(self, cache: Path) -> None:
        import torch

        self._cache = cache
        super().__init__(torch.__version__.partition("+")[0], sys.executable)

    def environment(self, on: Pretended, notes: Path | None = None) -> dict[str, str]:
        """As ``Served`` has it, without anything that pretends."""
        return environment(self._cache) | dict(on.more)


def environment(cache: Path) -> dict[str, str]:
    """Of every command."""
    path = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(one for one in path if one),
        "TONNAGE_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
        "STAND_IN_WATCHED_BY": "",
    }


def of_one_device() -> list[Setting]:
    """Settings that pretend nothing that one real GPU does not have."""
    plain = Pretended()
    hidden = Pretended(more={"CUDA_VISIBLE_DEVICES": ""})
    found = [one for one in settings() if one.on in (plain, hidden)]
    return sorted(found, key=lambda one: not one.compiles and not one.name.startswith(LONGEST))


def main() -> int:
    """Returns 1 where something did not end as expected."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.device.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/real"))
    parser.add_argument("--only", default="", help="settings in whose names this regular expression is found")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="at a time")
    parser.add_argument("--output", type=Path, help="where the results go, as they come")
    given = parser.parse_args()
    work = given.work.absolute()
    cache, models = work / "cache", work / "models"
    models.mkdir(parents=True, exist_ok=True)
    first = [["-m", "device.stand_in.models", str(models)], ["-m", "tonnage", "doctor", "--quick", "--json"]]
    for words in first:
        subprocess.run([sys.executable, *words], env=environment(cache), check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = {"what": WHAT, "machine": _machine(cache), "settings": {}}
    chosen = [one for one in of_one_device() if re.search(given.only, one.name)]
    waiting, good = deque(chosen), True
    with ThreadPoolExecutor(given.jobs) as pool:
        workers = [
            pool.submit(_walk_what_waits, waiting, cache, models, work, found, given.output) for _ in range(given.jobs)
        ]
        for worker in workers:
            good = worker.result() and good
    return 0 if good else 1


def _walk_what_waits(
    waiting: deque[Setting], cache: Path, models: Path, work: Path, found: dict[str, Any], output: Path | None
) -> bool:
    """Walk settings until none is left; whether all ended as expected."""
    good = True
    with Here(cache) as here:
        while True:
            try:
                setting = waiting.popleft()
            except IndexError:
                return good
            one = walk(setting, here, models, folder_of(work / "walks", setting))
            good = good and one.went_well
            _told(one, found, output)


def _told(one: Walked, found: dict[str, Any], output: Path | None) -> None:
    print(f"{one.seconds:6.1f} s  {one.name}: {one.outcome}", flush=True)
    found["settings"][one.name] = {**one.as_json(), "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M")}
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


def _machine(cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tonnage.prove.machine"]
    said = subprocess.run(command, env=environment(cache), capture_output=True, text=True, check=True).stdout
    described: dict[str, Any] = json.loads(said.splitlines()[-1])
    return described


if __name__ == "__main__":
    sys.exit(main())
